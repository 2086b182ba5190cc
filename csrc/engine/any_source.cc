// Receives that name no rank.
//
// A message is a work of its two ends, and a receive that names no rank cannot tell which: it waits
// under a key of its own until a header of such a message has come that no receive has claimed,
// then submits that rank's next message, and ends with it. Headers are always accepted, so there is
// nothing to ask for. Ranks are served in turn, and each rank's messages in the order in which it
// sent them; of several receives, the one submitted first is served first. A receive that names a
// rank claims its next message at once, so it goes before those that wait.

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "engine/engine.h"

namespace ringdl {
namespace {

// While no message has come.
class Awaiting final : public Collective {
 public:
  bool step(Channel&) override { return false; }
  std::string describe() const override { return "no rank has sent one"; }
};

}  // namespace

std::shared_ptr<Work> Engine::receive_from_any(const Call& call, void* data) {
  const SharedGroup members = call.group ? call.group : all_;
  if (members->size() == 1) {
    throw UsageError("there is no other rank to receive from; copy the array instead");
  }
  Call receive = call;
  receive.group = group_of_receiver(*members);
  const Description description = header_of(receive, *find_layout(*receive.group));
  const Key key = key_of(receive, *receive.group);
  auto work = make_work(description, key, receive.group);
  work->collective = std::make_unique<Awaiting>();
  work->names_no_sender = true;
  work->begin_ns = now_ns();
  in_flight_[key] = work;
  matching_.advance(key);
  ++inline_works_;
  AnyReceive any{work, call, data, {}, nullptr};
  for (int member = 0; member < members->size(); ++member) {
    any.pairs.push_back(member == members->rank ? nullptr
                                                : group_of_pair(member, members->rank, *members));
  }
  any_receives_.push_back(std::move(any));
  are_headers_new_ = true;
  progress();
  if (!work->ended()) fail_if_all_have_left(*work);
  return work;
}

// How many receives have found their message, or ended.
int Engine::step_any_receives() {
  if (any_receives_.empty() || is_in_any_receives_) return 0;  // to start a work is to look again
  is_in_any_receives_ = true;
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  } guard{is_in_any_receives_};
  int moved = 0;
  const bool are_headers_new = std::exchange(are_headers_new_, false);
  for (size_t i = 0; i < any_receives_.size(); ++i) {
    AnyReceive& any = any_receives_[i];
    if (!any.message && !any.work->ended() && are_headers_new && find_message(any)) ++moved;
    if (!any.message || any.work->ended() || !any.message->released.load()) continue;
    ++moved;
    if (any.message->failure) {
      fail(any.work, any.message->failure);
    } else {
      finish(any.work);
    }
  }
  std::erase_if(any_receives_, [](const AnyReceive& any) { return any.work->ended(); });
  return moved;
}

bool Engine::find_message(AnyReceive& any) {
  const int size = static_cast<int>(any.pairs.size());
  for (int i = 1; i <= size; ++i) {
    const int member = (last_sender_ + i) % size;
    const SharedGroup& pair = any.pairs[static_cast<size_t>(member)];
    if (!pair) continue;
    Call call = any.call;
    call.group = pair;
    call.from_any = false;
    const Key key = key_of(call, *pair);
    if (!matching_.has_header(key)) continue;
    last_sender_ = member;
    any.work->sender = member;
    any.message = submit_as(key, call, header_of(call, *find_layout(*pair)), any.data, nullptr);
    return true;
  }
  return false;
}

// One that is left may still send.
void Engine::fail_if_all_have_left(const Work& work) {
  if (work.sender >= 0 || work.ended()) return;
  int last = -1;
  for (const int rank : work.group->ranks) {
    if (rank == rank_) continue;
    if (!departures_->has_left(rank)) return;
    last = rank;
  }
  const std::string ranks =
      work.group->size() == 2 ? "rank " + std::to_string(last) + " has" : "all other ranks have";
  fail_key(work.key,
           {ranks + " shut down without sending " + work.label() + ", for which rank " +
                std::to_string(rank_) + " waits. Have some rank send it before that",
            false, work.description.joins},
           false);
}

}  // namespace ringdl
