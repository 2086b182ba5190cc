#include "engine/membership.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace ringdl {
namespace {

constexpr int64_t kLookEveryNs = kSecond / 2;

// What a rank that has failed had sent may be on its way, perhaps over others: so it is not called
// failed at the first look. Once this rank has left, those that know before it that all have may
// go, too.
constexpr int kLooksBeforeFailed = 1;
constexpr int kLooksAfterLeaving = 4;

[[noreturn]] void raise_failed(int rank) {
  throw RankFailedError("rank " + std::to_string(rank) +
                        " has ended without shutdown(), so what it takes part in cannot end: "
                        "find what ended its process (a crash, os._exit, too little memory) and "
                        "start the job again");
}

}  // namespace

Membership::Membership(Transport& transport, ControlPlane& control, const Hosts& hosts)
    : transport_(transport),
      hosts_(hosts),
      rank_(transport.rank()),
      size_(transport.size()),
      departures_(control, rank_, size_) {}

void Membership::look_for_failed(int64_t now) {
  const std::vector<int>& lost = transport_.lost();
  for (const int rank : lost) {
    if (!is_leaving() && !has_left(rank)) raise_failed(rank);
  }
  const auto& window = hosts_.window();
  if ((!window && lost.empty()) || now < next_look_ns_) return;
  next_look_ns_ = now + kLookEveryNs;
  const int looks = is_leaving() ? kLooksAfterLeaving : kLooksBeforeFailed;
  for (int rank = 0; rank < size_; ++rank) {
    if (has_left(rank)) continue;
    const bool has_ended = std::ranges::count(lost, rank) > 0 ||
                           (window && window->reaches(rank) && window->has_ended(rank));
    if (has_ended && ++missed_[rank] > looks) raise_failed(rank);
  }
}

}  // namespace ringdl
