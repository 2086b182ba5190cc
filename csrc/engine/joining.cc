// What a rank does that has nothing to submit any more, while others have: Engine::join().
//
// Each key's header goes to the next rank whatever the call is, so a joined rank hears of every
// call that the rank before it makes, or answers. (Where the header would go with data that waits
// for other ranks, it goes at once if a rank has joined.) It answers by submitting the same with
// the reduction's neutral element, or without rows, which has the next rank hear of it. Unnamed
// allreduces would meet in slots: it passes the next one of them beforehand. Buckets have no
// headers: a rank that joins tells all others, and from then on they tell it what they launch.
//
// It ends with a meeting, an allreduce that each rank submits once its own works have ended. A work
// ends on no rank before all have submitted it, so nothing is left to be answered then. What a rank
// submits after the meeting may come before it has ended here: headers say how many there were.

#include <algorithm>
#include <utility>

#include "base/buffer.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "reduce/adasum.h"
#include "reduce/neutral.h"

namespace ringdl {
namespace {

constexpr const char* kMeeting = "ringdl.join";

std::string joined_text(int rank) { return "rank " + std::to_string(rank) + " has joined and "; }

// Why a joined rank cannot answer a call; empty if it can.
std::string refusal(const Description& theirs, const Group& group, int rank,
                    const std::string& label, bool allreduces_only) {
  if (allreduces_only && theirs.kind != Kind::kAllreduce) {
    return joined_text(rank) + "answers allreduces only, as RINGDL_JOIN=allreduce says, not " +
           label + ": make the call before any rank calls join()";
  }
  const bool has_root = theirs.kind == Kind::kBroadcast || theirs.kind == Kind::kGather ||
                        theirs.kind == Kind::kScatter;
  if (has_root && theirs.root == group.rank) {
    return joined_text(rank) + "cannot be the root of " + label +
           ": name one that has not called join()";
  }
  if (theirs.operation != 0 && theirs.operation != kAdasumDigest) {
    return joined_text(rank) + "has nothing neutral for " + label +
           ", a reduction of your own: make the call before any rank calls join()";
  }
  if (theirs.algorithm == Algorithm::kMpi) {
    return joined_text(rank) + "cannot take part in MPI's own allreduce: use another algorithm";
  }
  return {};
}

// What a joined rank submits: the same, without rows of its own where ranks may differ in them.
Call neutral_call(const Description& theirs, const SharedGroup& group) {
  Call call;
  call.kind = theirs.kind;
  call.dtype = theirs.dtype;
  call.reduction = theirs.reduction;
  call.root = theirs.root;
  call.group = group;
  call.algorithm = theirs.algorithm;
  if (theirs.wire != theirs.dtype) call.compression = theirs.wire;
  if (theirs.operation != 0) call.operation = {find_adasum(theirs.dtype), theirs.operation, {}};
  if (has_uneven_rows(theirs.kind)) {
    call.shape = {0, theirs.count};
    call.splits.assign(static_cast<size_t>(group->size()), 0);
  } else if (theirs.kind == Kind::kReduceScatter && theirs.dimensions > 0) {
    call.shape = {theirs.shape[0], theirs.count / std::max<int64_t>(theirs.shape[0], 1)};
  } else {
    call.shape = {theirs.count};
  }
  return call;
}

}  // namespace

void Engine::begin_join() {
  note_submitter();
  joining_ = std::make_shared<Joining>();
  // Those that all ranks have, so that counts compare, since they last met.
  int64_t works = common_works_ended_ - works_before_join_;
  for (const auto& [key, work] : in_flight_) {
    joining_->own.push_back(work);
    works += static_cast<int64_t>(work->group->is_all());
  }
  joining_->entry = {works * size_ + rank_};
  MessageHead joined;
  joined.type = MessageType::kJoined;
  joined.value = joining_->number = next_meeting();
  for (int to = 0; to < size_; ++to) {
    if (to != rank_) control_->send(to, joined);
  }
  pass_next_in_slots();
}

bool Engine::all_have_joined(Joining& joining) {
  if (!joining.meeting) {
    std::erase_if(joining.own, [](const auto& work) { return work->ended(); });
    if (!joining.own.empty()) return false;
    Call call;
    call.kind = Kind::kAllreduce;
    call.dtype = DType::kInt64;
    call.reduction = Reduction::kMax;
    call.shape = {1};
    call.name = kMeeting;
    const Description description = header_of(call, *find_layout(*all_));
    const Key key = key_of(call, *all_);
    joining.number = key.instance;
    joining.meeting = submit_as(key, call, description, joining.entry.data(), joining_);
  }
  // What was answered is known to all, but may not have ended here: it writes to buckets.
  return joining.meeting->ended() && (joining.meeting->failure || in_flight_.empty());
}

const Work& Engine::awaited_in_join(const Joining& joining) const {
  if (!joining.meeting) return *joining.own.front();
  return joining.meeting->ended() ? *in_flight_.begin()->second : *joining.meeting;
}

void Engine::end_join() {
  for (const auto& query : joining_->queries) answer_query(query);
  joining_.reset();
  works_before_join_ = common_works_ended_;
  std::erase_if(joined_, [this](const auto& entry) { return entry.second < next_meeting(); });
}

// How many calls; the works begin at once, and end like any other.
int Engine::answer_calls() {
  if (joining_->is_answering) return 0;  // to start a work is to look for messages, too
  const std::shared_ptr<Joining> joining = joining_;
  joining->is_answering = true;
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  } guard{joining->is_answering};
  int answered = 0;
  const auto is_for_us = [this](const Matching::Header& header) {
    const Description& theirs = header.description;
    const bool is_over = theirs.joins > joining_->number;  // for the other rank: not for this one
    return !is_over && (theirs.kind == Kind::kMessage || find_group(theirs.group) != nullptr);
  };
  while (const auto header = matching_.find_header(hash_of(kMeeting), joining->number, is_for_us)) {
    answer(*header);
    ++answered;
  }
  for (auto& [number, bucket] : buckets_) {
    if (!bucket.prepared || bucket.prepared->key.instance >= bucket.launched_elsewhere) continue;
    std::fill_n(bucket.data, bucket.bytes, std::byte{0});
    launch(bucket);
    ++answered;
  }
  if (answered > 0) joining->answered_ns = now_ns();
  // Who asks concludes from what is missing, and headers may come after the question.
  if (quiet_polls_ >= kQuietPolls) {
    for (const auto& query : std::exchange(joining->queries, {})) answer_query(query);
  }
  return answered;
}

void Engine::answer(const Matching::Header& header) {
  const auto& [key, from, theirs] = header;
  const SharedGroup group = find_group(theirs.group);
  std::vector<int> told = {from};
  std::string why = joined_text(rank_) + "neither sends nor receives: exchange messages before";
  if (theirs.kind != Kind::kMessage) {
    told = group->ranks;
    why = refusal(theirs, *group, rank_, label_of(key, theirs, *group), answers_allreduces_only_);
  }
  if (!why.empty()) {
    matching_.advance(key);
    matching_.take(key);
    for (const int to : told) {
      if (to != rank_) tell_failure(to, MessageType::kMismatch, key, {why, true, theirs.joins});
    }
    return;
  }
  Call call = neutral_call(theirs, group);
  const size_t bytes = bytes_of(call);
  const bool has_output = call.kind == Kind::kReduceScatter;
  const auto memory = std::make_shared<Buffer>(bytes * (has_output ? 2 : 1));
  if (has_output) call.output = memory->data() + bytes;
  fill_neutral(call.dtype, call.reduction, memory->data(), bytes / item_bytes(call.dtype));
  Description ours = theirs;
  ours.inline_bytes = inline_bytes();
  submit_as(key, call, ours, memory->data(), memory);
  pass_next_in_slots();
}

uint64_t Engine::next_meeting() const {
  return matching_.uses({KeySpace::kName, hash_of(kMeeting), 0});
}

void Engine::set_join_answers_allreduces_only(bool only) {
  Lock lock = lock_for_call();
  answers_allreduces_only_ = only;
}

void Engine::know_group(const SharedGroup& group) {
  Lock lock = lock_for_call();
  groups_[group->id] = group;
}

SharedGroup Engine::find_group(uint64_t id) const {
  if (id == 0) return all_;
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

void Engine::pass_next_in_slots() {
  Call call;
  call.kind = Kind::kAllreduce;
  if (slots_ && joining_) slots_->pass(key_of(call, *all_).instance);
}

void Engine::tell_joined_ranks(const Work& work) {
  for (const auto& [rank, meeting] : joined_) {
    if (work.group->index_of(rank) < 0 || meeting < next_meeting()) continue;
    MessageHead launched;
    launched.type = MessageType::kLaunched;
    launched.key = work.key;
    control_->send(rank, launched);
  }
}

void Engine::on_joined(int from, uint64_t meeting) {
  joined_[from] = meeting;
  for (const auto& [number, bucket] : buckets_) {
    if (bucket.running && !bucket.running->ended()) tell_joined_ranks(*bucket.running);
  }
  for (const auto& [key, work] : in_flight_) {
    if (work->keyed_channel && !work->names_no_sender) work->keyed_channel->announce(false);
  }
}

void Engine::on_launched(const Key& key) {
  const auto found = buckets_.find(static_cast<int64_t>(key.hash));
  if (found == buckets_.end()) return;
  uint64_t& launched = found->second.launched_elsewhere;
  launched = std::max(launched, key.instance + 1);
}

}  // namespace ringdl
