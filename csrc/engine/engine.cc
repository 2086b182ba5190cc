#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/buffer.h"
#include "base/error.h"
#include "base/keep_for_good.h"

namespace ringdl {
namespace {

EngineOptions within_limits(EngineOptions options) {
  options.inline_bytes = std::min(options.inline_bytes, kMaxPayloadBytes);
  return options;
}

// The longest message that travels on a tag that was granted.
size_t longest_message(size_t segment_bytes) {
  return std::max(segment_bytes, kOneMessageBytes) + 64;
}

}  // namespace

Engine::Engine(std::unique_ptr<Transport> transport, EngineOptions options, const Clock& clock)
    : clock_(clock),
      transport_(std::move(transport)),
      options_(within_limits(options)),
      rank_(transport_->rank()),
      size_(transport_->size()),
      all_(group_of_all(rank_, size_)),
      tags_(transport_->max_tag()),
      control_(std::make_shared<ControlPlane>(
          *transport_, [this](const ControlMessage& message) { handle(message); })),
      hosts_(rank_, size_),
      planning_(hosts_, *options_.executor, options_.segment_bytes),
      works_(*transport_, *control_, *options_.executor, clock,
             [this](const Work& work, const Failure& why) {
               if (work.key.space == KeySpace::kBucket) buckets_.on_end(work.key, why);
             }),
      buckets_(works_, matching_, planning_, tags_),
      immediate_(all_, *options_.executor, hosts_, planning_, matching_, works_, *this),
      membership_(*transport_, *control_, hosts_),
      any_receives_(works_, matching_, membership_, *this),
      joining_(works_, matching_, buckets_, hosts_, *control_, clock, *this, all_),
      diagnosis_(*this, *transport_, *control_),
      watchdog_(diagnosis_, rank_) {
  works_.set_longest_message(longest_message(options_.segment_bytes));
}

Engine::~Engine() { close(); }

void Engine::close() {
  if (!transport_) return;
  give_up();
  joining_.forget_groups();
  transport_.reset();
}

void Engine::give_up() noexcept try {
  buckets_.clear();
  while (!works_.is_empty()) {
    const std::shared_ptr<Work> work = works_.in_flight().begin()->second;
    works_.fail(work, {"the communicator was destroyed while " + work->label() + " was in flight"});
  }
  any_receives_.give_up();
  works_.withdraw();
  control_->close();
  works_.keep_leaving();
  if (!control_->idle()) keep_for_good(control_);
} catch (...) {  // the transport is broken: there is nothing left to withdraw from
}

std::shared_ptr<Work> Engine::submit(const Call& call, void* data) {
  const auto in_flight = works_.in_flight().size();
  // As many headers may be parked at a peer, and as many tags can be granted.
  if (in_flight >= static_cast<size_t>(tags_.pooled)) {
    throw UsageError(std::to_string(tags_.pooled) +
                     " works are in flight on this rank; wait for some before submitting more");
  }
  const SharedGroup& group = call.group ? call.group : all_;
  if (call.from_any) {
    const std::shared_ptr<Work> work = any_receives_.submit(call, data, group);
    poll();
    if (work->ended()) return work;
    Failure failure = any_receives_.failure_by_leaving(*work);
    if (!failure && work->sender < 0) failure = membership_.failure_in(*group);
    if (failure) fail_key(work->key, failure, false);
    return work;
  }
  const Description description = header_of(call);
  std::shared_ptr<Buffer> stand_in;  // see row_bytes()
  if (has_uneven_rows(call.kind) && bytes_of(call) > 0 && description.count == 0) {
    stand_in = std::make_shared<Buffer>(bytes_of(call));
    std::fill_n(stand_in->data(), stand_in->size(), std::byte{0});
    data = stand_in->data();
  }
  if (description.algorithm == Algorithm::kMpi && in_flight > 0) {
    throw UsageError(std::to_string(in_flight) +
                     " works are in flight on this rank; MPI's own allreduce needs that there are "
                     "none: wait for them first, or take another algorithm");
  }
  return submit_as(next_key(call, *group), call, description, data, std::move(stand_in));
}

std::shared_ptr<Work> Engine::submit_as(const Key& key, const Call& call,
                                        const Description& description, void* data,
                                        std::shared_ptr<const void> memory) {
  const SharedGroup& group = call.group ? call.group : all_;
  auto collective = planning_.make(call, description, data, *group);
  immediate_.pass(call, key, *group);
  return submit_begun(key, description, group, std::move(collective), std::move(memory));
}

std::shared_ptr<Work> Engine::submit_begun(const Key& key, const Description& description,
                                           const SharedGroup& group,
                                           std::unique_ptr<Collective> collective,
                                           std::shared_ptr<const void> memory) {
  auto work = works_.make_keyed(description, key, group);
  work->collective = std::move(collective);
  work->memory = std::move(memory);
  begin(work);
  return work;
}

// The first step hands the first messages to the channel, so that the header can carry one of them.
void Engine::begin(const std::shared_ptr<Work>& work) {
  works_.begin(work);
  matching_.advance(work->key);
  const Matching::Parked parked = matching_.take(work->key);
  const Failure failure = parked.failure ? parked.failure : membership_.failure_in(*work->group);
  if (failure) {
    works_.fail(work, failure);
    return;
  }
  if (works_.step(work)) return;
  const bool may_wait = !joining_.may_have_joined();  // who has joined learns of it by the header
  work->keyed_channel->announce(may_wait && work->collective->greets_next());
  for (const Matching::Parked::Message& message : parked.messages) {
    if (work->ended()) break;
    apply(*work, message.from, message.head, message.description, message.payload.data());
  }
  if (!work->ended()) check_previous_left(work);
  poll();
}

std::shared_ptr<Work> Engine::launch_bucket(int64_t number) {
  const std::shared_ptr<Work> work = buckets_.take_prepared(number);
  joining_.on_launched(*work);
  matching_.advance(work->key);
  works_.begin(work);
  if (const Failure failure = membership_.failure_in(*work->group)) {
    works_.fail(work, failure);
  } else if (!works_.step(work)) {
    check_previous_left(work);
    poll();
  }
  return work;
}

void Engine::remove_bucket(int64_t number) {
  const std::shared_ptr<Work> running = buckets_.remove(number);
  if (!running) return;
  fail_everywhere(*running, {running->label() + " was dropped on rank " + std::to_string(rank_) +
                             " while in flight; keep the buckets until wait() has returned"});
}

Description Engine::header_of(const Call& call) {
  Description description = describe(call);
  if (call.kind == Kind::kAllreduce) {
    description.algorithm = planning_.plan(call, call.group ? *call.group : *all_).algorithm;
  }
  description.inline_bytes = inline_bytes();
  description.joins = joining_.meetings();
  return description;
}

uint32_t Engine::inline_bytes() const {
  return works_.has_many() ? 0 : static_cast<uint32_t>(options_.inline_bytes);
}

Key Engine::next_key(const Call& call, const Group& group) {
  const uint64_t what = call.name.empty() ? static_cast<uint64_t>(call.kind) : hash_of(call.name);
  return matching_.next(call.name.empty() ? KeySpace::kUnnamed : KeySpace::kName, what ^ group.id);
}

int Engine::poll() {
  ++polls_;
  const int messages = transport_->poll();
  quiet_polls_ = messages > 0 ? 0 : std::min(quiet_polls_ + 1, kQuietPolls);
  const int answered = joining_.answer_calls();
  if (is_quiet()) {
    for (const ControlMessage& query : joining_.take_queries()) answer_query(query);
  }
  const int moved = works_.settle() + any_receives_.step();
  if (!queries_.empty() && !answers_later()) {
    for (const auto& query : std::exchange(queries_, {})) diagnosis_.on_query(query);
  }
  return messages + answered + moved;
}

// Who asks concludes from what is missing, and where a message is awaited from any rank, its header
// may come after the question.
bool Engine::answers_later() const { return !any_receives_.is_empty() && !is_quiet(); }

std::string Engine::watch_over(int64_t now) {
  const bool may_know_of_calls = (!joining_.is_joined() || is_quiet()) && !answers_later();
  if (rank_ == 0 && may_know_of_calls) diagnosis_.detect_stuck(now);
  diagnosis_.check_counts(now);
  membership_.departures().check(now);
  std::string text = watchdog_.check(works_.in_flight(), now);
  if (watchdog_.take_alarm() && watchdog_dumps_) text += dump();
  return text;
}

std::string Engine::dump() const {
  std::vector<const Work*> works;
  for (const auto& [key, work] : works_.in_flight()) works.push_back(work.get());
  std::ranges::sort(works, {}, [](const Work* work) { return work->id; });
  const int64_t now = clock_.now_ns();
  const std::string me = "ringdl: rank " + std::to_string(rank_);
  std::string text = me + ": " + std::to_string(works.size()) + " works in flight\n";
  for (const Work* work : works) {
    text += me + ": " + work->label() + ", " +
            std::to_string((now - work->begin_ns) / kMillisecond) +
            " ms: " + work->collective->describe() + "\n";
  }
  return text;
}

bool Engine::is_busy() const {
  return !works_.is_empty() || !works_.is_drained() || !control_->idle();
}

void Engine::end_join(const std::shared_ptr<JoinSession::Session>& session) {
  for (const ControlMessage& query : joining_.end(session)) answer_query(query);
}

void Engine::set_segment_bytes(size_t bytes) {
  planning_.set_segment_bytes(bytes);
  works_.set_longest_message(longest_message(bytes));
}

void Engine::set_watchdog(int64_t after_ns, bool dumps) {
  watchdog_.set_after(after_ns);
  watchdog_dumps_ = dumps;
}

std::map<std::string, double> Engine::stats() const {
  const auto number = [](auto value) { return static_cast<double>(value); };
  const EngineCounters& counters = works_.counters();
  return {
      {"works", number(works_.ended())},
      {"works_in_flight", number(works_.in_flight().size())},
      {"messages_sent", number(control_->messages_sent() + counters.data_messages_sent)},
      {"bytes_sent", number(control_->bytes_sent() + counters.data_bytes_sent)},
      {"control_messages_sent", number(control_->messages_sent())},
      {"control_messages_received", number(control_->messages_received())},
      {"data_messages_sent", number(counters.data_messages_sent)},
      {"data_bytes_sent", number(counters.data_bytes_sent)},
      {"grants_sent", number(counters.grants_sent)},
      {"polls", number(polls_)},
      {"keys", number(matching_.keys())},
      {"parked_keys", number(matching_.parked_keys())},
  };
}

}  // namespace ringdl
