#include "engine/join_session.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reduce/adasum.h"

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

// What a joined rank submits: the same call, without own rows where ranks may differ in them.
Call neutral_call(const Description& theirs, const SharedGroup& group) {
  Call call;
  call.kind = theirs.kind;
  call.dtype = theirs.dtype;
  call.reduction = theirs.reduction;
  call.root = theirs.root;
  call.group = group;
  call.memory.kind = theirs.memory;
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

JoinSession::JoinSession(WorkTable& works, Matching& matching, Planning& planning,
                         BucketTable& buckets, Hosts& hosts, ControlPlane& control,
                         const Clock& clock, Owner& owner, SharedGroup all)
    : works_(works),
      matching_(matching),
      planning_(planning),
      buckets_(buckets),
      hosts_(hosts),
      control_(control),
      clock_(clock),
      owner_(owner),
      all_(std::move(all)) {}

uint64_t JoinSession::meetings() const {
  return matching_.uses({KeySpace::kName, hash_of(kMeeting), 0});
}

void JoinSession::refuse_joined() const {
  if (is_joined()) {
    throw UsageError(
        "this rank has called join() and only answers calls of others until all ranks "
        "have; wait for join() to return");
  }
}

std::shared_ptr<JoinSession::Session> JoinSession::begin() {
  if (session_) return session_;
  session_ = std::make_shared<Session>();
  // Works of all ranks since they last met, so that counts are comparable.
  int64_t works = works_.common_ended() - works_before_;
  for (const auto& [key, work] : works_.in_flight()) {
    session_->own.push_back(work);
    works += static_cast<int64_t>(work->group->is_all());
  }
  session_->entry = {works * all_->size() + all_->rank};
  MessageHead joined;
  joined.type = MessageType::kJoined;
  joined.value = session_->number = meetings();
  for (const int to : all_->ranks) {
    if (to != all_->rank) control_.send(to, joined);
  }
  pass_next_in_slots();
  return session_;
}

bool JoinSession::is_over(Session& session) {
  if (!session.meeting) {
    std::erase_if(session.own, [](const auto& work) { return work->ended(); });
    if (!session.own.empty()) return false;
    Call call;
    call.kind = Kind::kAllreduce;
    call.dtype = DType::kInt64;
    call.reduction = Reduction::kMax;
    call.shape = {1};
    call.name = kMeeting;
    const Description description = owner_.header_of(call);
    const Key key = owner_.next_key(call, *all_);
    session.number = key.instance;
    session.meeting = owner_.submit_as(key, call, description, session.entry.data(), session_);
  }
  // Answered works are known to all, but may not have ended here: they write to buckets.
  return session.meeting->ended() && (session.meeting->failure || works_.is_empty());
}

const Work& JoinSession::awaited(const Session& session) const {
  if (!session.meeting) return *session.own.front();
  return session.meeting->ended() ? *works_.in_flight().begin()->second : *session.meeting;
}

std::vector<ControlMessage> JoinSession::end(const std::shared_ptr<Session>& session) {
  if (session_ != session) return {};  // another thread has seen its end
  std::vector<ControlMessage> queries = std::move(session_->queries);
  session_.reset();
  works_before_ = works_.common_ended();
  std::erase_if(joined_, [this](const auto& entry) { return entry.second < meetings(); });
  return queries;
}

int JoinSession::answer_calls() {
  if (!session_ || session_->is_answering) return 0;  // starting a work calls this, too
  const std::shared_ptr<Session> session = session_;
  session->is_answering = true;
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  } guard{session->is_answering};
  int answered = 0;
  const auto is_for_us = [&](const Matching::Header& header) {
    const Description& theirs = header.description;
    const bool is_over = theirs.joins > session->number;  // for the other rank, so not for this one
    return !is_over && (theirs.kind == Kind::kMessage || find_group(theirs.group) != nullptr);
  };
  while (const auto header = matching_.find_header(hash_of(kMeeting), session->number, is_for_us)) {
    answer(*header);
    ++answered;
  }
  while (const auto number = buckets_.next_to_answer()) {
    owner_.launch_bucket_for_others(*number);
    ++answered;
  }
  if (answered > 0) session->answered_ns = clock_.now_ns();
  return answered;
}

std::vector<ControlMessage> JoinSession::take_queries() {
  return session_ ? std::exchange(session_->queries, {}) : std::vector<ControlMessage>{};
}

void JoinSession::answer(const Matching::Header& header) {
  const auto& [key, from, theirs] = header;
  const SharedGroup group = find_group(theirs.group);
  std::vector<int> told = {from};
  std::string why =
      joined_text(all_->rank) + "neither sends nor receives: exchange messages before";
  Call call;
  const bool has_output = theirs.kind == Kind::kReduceScatter;
  std::shared_ptr<std::byte> memory;
  if (theirs.kind != Kind::kMessage) {
    told = group->ranks;
    call = neutral_call(theirs, group);
    const std::string label = label_of(key, theirs, *group);
    why = refusal(theirs, *group, all_->rank, label, allreduces_only_);
    if (why.empty()) {
      try {
        memory = planning_.neutral_array(call, has_output);
      } catch (const std::exception& error) {
        why = joined_text(all_->rank) + "cannot answer " + label + ": " + error.what();
      }
    }
  }
  if (!why.empty()) {
    matching_.advance(key);
    matching_.take(key);
    for (const int to : told) {
      if (to == all_->rank) continue;
      owner_.send_failure(to, MessageType::kMismatch, key,
                          {why, FailureKind::kUsage, theirs.joins});
    }
    return;
  }
  if (has_output) call.output = memory.get() + bytes_of(call);
  Description ours = theirs;
  ours.inline_bytes = owner_.inline_bytes();
  owner_.submit_as(key, call, ours, memory.get(), memory);
  pass_next_in_slots();
}

SharedGroup JoinSession::find_group(uint64_t id) const {
  if (id == 0) return all_;
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

void JoinSession::pass_next_in_slots() {
  Call call;
  call.kind = Kind::kAllreduce;
  if (hosts_.slots() && is_joined()) hosts_.slots()->pass(owner_.next_key(call, *all_).instance);
}

void JoinSession::on_joined(int from, uint64_t meeting) {
  joined_[from] = meeting;
  buckets_.for_each_running([this](const Work& work) { on_launched(work); });
  for (const auto& [key, work] : works_.in_flight()) {
    if (work->keyed_channel && !work->names_no_sender) work->keyed_channel->announce(false);
  }
}

void JoinSession::on_launched(const Work& work) {
  for (const auto& [rank, meeting] : joined_) {
    if (work.group->index_of(rank) < 0 || meeting < meetings()) continue;
    MessageHead launched;
    launched.type = MessageType::kLaunched;
    launched.key = work.key;
    control_.send(rank, launched);
  }
}

}  // namespace ringdl
