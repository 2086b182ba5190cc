#include "engine/membership.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ringdl {
namespace {

constexpr int64_t kLookEveryNs = kSecond / 2;

// Messages of a rank that has failed may be on their way, perhaps via others, so it is not called
// failed at the first check. Once this rank has left, ranks that know before it that all have left
// may end, too.
constexpr int kLooksBeforeFailed = 1;
constexpr int kLooksAfterLeaving = 4;

Failure failure_of(const Membership::Failed& failed) {
  const std::string rank = "rank " + std::to_string(failed.rank);
  if (!failed.why.empty()) {
    return {rank + " cannot be reached any more, so what it takes part in cannot end: " +
                failed.why + ". Repair that, and start the job again",
            FailureKind::kRankFailed};
  }
  return {rank +
              " has ended without shutdown(), so what it takes part in cannot end: find what ended "
              "its process (an exception, a crash, os._exit, too little memory) and start the job "
              "again",
          FailureKind::kRankFailed};
}

}  // namespace

Membership::Membership(Transport& transport, ControlPlane& control, const Hosts& hosts)
    : transport_(transport),
      hosts_(hosts),
      rank_(transport.rank()),
      size_(transport.size()),
      departures_(control, rank_, size_) {}

std::vector<Membership::Failed> Membership::find_failed(int64_t now) {
  std::vector<Failed> found;
  const auto& lost = transport_.lost();
  for (const Transport::Lost& one : lost) {
    if (is_leaving() && has_left(one.rank)) departures_.on_quiet(one.rank);
    if (!is_gone(one.rank) && !one.why.empty()) found.push_back(one);
  }
  const auto& window = hosts_.window();
  if ((!window && lost.empty()) || now < next_check_ns_) return found;
  next_check_ns_ = now + kLookEveryNs;
  const int looks = is_leaving() ? kLooksAfterLeaving : kLooksBeforeFailed;
  for (int rank = 0; rank < size_; ++rank) {
    const auto is_it = [rank](const auto& one) { return one.rank == rank; };
    if (rank == rank_ || has_failed(rank) || std::ranges::any_of(found, is_it)) continue;
    const bool has_ended = std::ranges::any_of(lost, is_it) ||
                           (window && window->reaches(rank) && window->has_ended(rank));
    if (!has_ended) continue;
    if (has_left(rank)) {
      if (is_leaving()) departures_.on_quiet(rank);
    } else if (++missed_[rank] > looks) {
      found.push_back({rank, {}});
    }
  }
  return found;
}

bool Membership::has_failed(int rank) const {
  return std::ranges::any_of(failed_, [rank](const Failed& one) { return one.rank == rank; });
}

bool Membership::fail(Failed failed) {
  if (is_gone(failed.rank)) return false;
  failed_.push_back(std::move(failed));
  return true;
}

Failure Membership::failure_in(const Group& group) const {
  for (const Failed& failed : failed_) {
    if (group.index_of(failed.rank) >= 0) return failure_of(failed);
  }
  return {};
}

void Membership::refuse_failed() const {
  if (!failed_.empty()) failure_of(failed_.front()).raise();
}

}  // namespace ringdl
