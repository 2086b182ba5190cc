#include "engine/any_receives.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

// While no message has arrived, and until the work that receives it has ended.
class Awaiting final : public Collective {
 public:
  bool step(Channel&) override { return false; }
  int64_t pieces() const override { return may_be_written ? 0 : -1; }
  std::string describe() const override { return "no rank has sent one"; }

  bool may_be_written = false;  // the receive's buffer, by a rank that has failed
};

// That may then write to its buffer.
bool has_failed_with_sender(const Work& message) {
  return message.state.load() == Work::State::kFailed && !message.released.load() &&
         message.failure.kind == FailureKind::kRankFailed;
}

}  // namespace

AnyReceives::AnyReceives(WorkTable& works, Matching& matching, const Membership& membership,
                         Submitter& submitter)
    : works_(works), matching_(matching), membership_(membership), submitter_(submitter) {}

std::shared_ptr<Work> AnyReceives::submit(const Call& call, void* data,
                                          const SharedGroup& members) {
  if (members->size() == 1) {
    throw UsageError("there is no other rank to receive from; copy the array instead");
  }
  if (call.memory.is_on_device()) {
    throw UsageError(
        "a message from any rank is received in the CPU's memory; name the rank that sends, or "
        "copy the array");
  }
  Call receive = call;
  receive.group = group_of_receiver(*members);
  const Description description = submitter_.header_of(receive);
  const Key key = submitter_.next_key(receive, *receive.group);
  auto work = works_.make_keyed(description, key, receive.group);
  work->collective = std::make_unique<Awaiting>();
  work->names_no_sender = true;
  works_.begin(work);
  matching_.advance(key);
  Receive waiting{work, call, data, {}, nullptr};
  for (int member = 0; member < members->size(); ++member) {
    waiting.pairs.push_back(
        member == members->rank ? nullptr : group_of_pair(member, members->rank, *members));
  }
  receives_.push_back(std::move(waiting));
  are_headers_new_ = true;
  return work;
}

int AnyReceives::step() {
  if (receives_.empty()) return 0;
  int moved = 0;
  const bool are_headers_new = std::exchange(are_headers_new_, false);
  for (size_t i = 0; i < receives_.size(); ++i) {
    Receive& receive = receives_[i];
    if (!receive.message && !receive.work->ended() && are_headers_new && find_message(receive)) {
      ++moved;
    }
    if (!receive.message || receive.work->ended()) continue;
    const bool may_be_written = has_failed_with_sender(*receive.message);
    if (!may_be_written && !receive.message->released.load()) continue;
    ++moved;
    static_cast<Awaiting&>(*receive.work->collective).may_be_written = may_be_written;
    if (receive.message->failure) {
      works_.fail(receive.work, receive.message->failure);
    } else {
      works_.finish(receive.work);
    }
  }
  std::erase_if(receives_, [](const Receive& receive) { return receive.work->ended(); });
  return moved;
}

bool AnyReceives::find_message(Receive& receive) {
  const int size = static_cast<int>(receive.pairs.size());
  for (int i = 1; i <= size; ++i) {
    const int member = (last_sender_ + i) % size;
    const SharedGroup& pair = receive.pairs[static_cast<size_t>(member)];
    if (!pair) continue;
    Call call = receive.call;
    call.group = pair;
    call.from_any = false;
    const Key key = submitter_.next_key(call, *pair);
    if (!matching_.has_header(key)) continue;
    last_sender_ = member;
    receive.work->sender = member;
    receive.message =
        submitter_.submit_as(key, call, submitter_.header_of(call), receive.data, nullptr);
    return true;
  }
  return false;
}

Failure AnyReceives::failure_by_leaving(const Work& work) const {
  if (work.sender >= 0 || work.ended()) return {};
  const int self = work.group->ranks[static_cast<size_t>(work.group->rank)];
  int last = -1;
  for (const int rank : work.group->ranks) {
    if (rank == self) continue;
    if (!membership_.has_left(rank)) return {};
    last = rank;
  }
  const std::string ranks =
      work.group->size() == 2 ? "rank " + std::to_string(last) + " has" : "all other ranks have";
  return {ranks + " shut down without sending " + work.label() + ", for which rank " +
              std::to_string(self) + " waits. Have some rank send it before that",
          FailureKind::kMismatch, work.description.joins};
}

}  // namespace ringdl
