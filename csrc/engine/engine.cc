#include "engine/engine.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "base/keep_for_good.h"

namespace ringdl {

Engine::Engine(std::unique_ptr<Transport> transport, EngineOptions options, const Clock& clock)
    : parts_(
          std::move(transport), options, clock,
          [this](const ControlMessage& message) { inbox_.handle(message); }, submissions_,
          submissions_, failures_) {}

Engine::~Engine() { close(); }

void Engine::close() {
  if (!parts_.transport) return;
  give_up();
  parts_.joining.forget_groups();
  parts_.works.let_go();
  parts_.transport.reset();
}

void Engine::give_up() noexcept try {
  parts_.buckets.clear();
  while (!parts_.works.is_empty()) {
    const std::shared_ptr<Work> work = parts_.works.in_flight().begin()->second;
    parts_.works.fail(work,
                      {"the communicator was destroyed while " + work->label() + " was in flight"});
  }
  parts_.any_receives.give_up();
  parts_.mailbox.give_up();
  parts_.works.withdraw();
  parts_.control->close();
  if (!parts_.control->idle() && parts_.transport->reads_on()) keep_for_good(parts_.control);
} catch (...) {  // the transport is broken: there is nothing left to withdraw from
}

// Works are begun without polling, as parts begin some while they are polled.
std::shared_ptr<Work> Engine::submit(const Call& call, void* data) {
  const std::shared_ptr<Work> work = submissions_.submit(call, data);
  if (work->ended()) return work;
  poll_beside();
  failures_.check_senders(*work);
  return work;
}

std::shared_ptr<Work> Engine::call_box(const BoxName& name, int to,
                                       std::unique_ptr<Collective> caller) {
  submissions_.refuse_many();
  auto work = parts_.mailbox.call(name, to, std::move(caller));
  if (!work->ended()) poll_beside();
  return work;
}

void Engine::refuse(const Call& call, const std::string& why) {
  submissions_.refuse(call, why);
  poll();
}

std::shared_ptr<Work> Engine::launch_bucket(int64_t number) {
  const std::shared_ptr<Work> work = submissions_.launch_bucket(number);
  if (!work->ended()) poll_beside();
  return work;
}

void Engine::fail_bucket(int64_t number, const std::string& why) {
  const std::shared_ptr<Work> work = parts_.buckets.take_prepared(number);
  parts_.matching.advance(work->key);
  parts_.works.begin(work);
  failures_.fail_broken({work, why});
  poll();
}

void Engine::give_up(const Work& work, const std::string& why) {
  failures_.fail_everywhere(
      work, {work.label() + " was given up on rank " + std::to_string(parts_.rank) + ": " + why,
             FailureKind::kMismatch, work.description.joins});
  poll();
}

void Engine::remove_bucket(int64_t number) {
  const std::shared_ptr<Work> running = parts_.buckets.remove(number);
  if (!running) return;
  failures_.fail_everywhere(
      *running, {running->label() + " was dropped on rank " + std::to_string(parts_.rank) +
                 " while in flight; keep the buckets until wait() has returned"});
}

// Whoever has begun a work has to get it, so what goes wrong meanwhile is raised by the next poll.
void Engine::poll_beside() {
  try {
    poll();
  } catch (const std::exception&) {
    put_off_ = std::current_exception();
  }
}

int Engine::poll() {
  if (put_off_) std::rethrow_exception(std::exchange(put_off_, nullptr));
  ++polls_;
  const int messages = inbox_.poll();
  const int answered = parts_.joining.answer_calls();
  const int settled = parts_.works.settle();
  const int others = parts_.any_receives.step() + parts_.mailbox.step();
  if (parts_.works.has_broken()) {
    for (const WorkTable::Broken& broken : parts_.works.take_broken())
      failures_.fail_broken(broken);
  }
  inbox_.answer_put_off();
  other_moves_ += static_cast<uint64_t>(answered + others);
  return messages + answered + settled + others;
}

std::string Engine::watch_over(int64_t now) {
  const bool may_know_of_calls =
      (!parts_.joining.is_joined() || is_quiet()) && !inbox_.answers_later();
  if (parts_.rank == 0 && may_know_of_calls) parts_.diagnosis.detect_stuck(now);
  parts_.diagnosis.check_counts(now);
  parts_.membership.departures().check(now);
  std::string text = parts_.watchdog.check(parts_.works.in_flight(), now);
  if (parts_.watchdog.take_alarm()) text += dump();
  return text;
}

std::string Engine::dump() const {
  std::vector<const Work*> works;
  for (const auto& [key, work] : parts_.works.in_flight()) works.push_back(work.get());
  std::ranges::sort(works, {}, [](const Work* work) { return work->id; });
  const int64_t now = parts_.clock.now_ns();
  const std::string me = "ringdl: rank " + std::to_string(parts_.rank);
  std::string text = me + ": " + std::to_string(works.size()) + " works in flight\n";
  for (const Work* work : works) {
    text += me + ": " + work->label() + ", " +
            std::to_string((now - work->begin_ns) / kMillisecond) +
            " ms: " + work->collective->describe() + "\n";
  }
  return text;
}

bool Engine::is_busy() const {
  return !parts_.works.is_empty() || !parts_.works.is_drained() || !parts_.control->idle() ||
         parts_.mailbox.open_boxes() > 0;
}

void Engine::end_join(const std::shared_ptr<JoinSession::Session>& session) {
  for (const ControlMessage& query : parts_.joining.end(session)) inbox_.answer(query);
}

bool Engine::have_all_left() const {
  return parts_.membership.departures().are_all_quiet() && parts_.control->idle();
}

std::map<std::string, double> Engine::stats() const {
  const auto number = [](auto value) { return static_cast<double>(value); };
  const EngineCounters& counters = parts_.works.counters();
  return {
      {"works", number(parts_.works.ended())},
      {"works_in_flight", number(parts_.works.in_flight().size())},
      {"messages_sent", number(parts_.control->messages_sent() + counters.data_messages_sent)},
      {"bytes_sent", number(parts_.control->bytes_sent() + counters.data_bytes_sent)},
      {"control_messages_sent", number(parts_.control->messages_sent())},
      {"control_messages_received", number(parts_.control->messages_received())},
      {"data_messages_sent", number(counters.data_messages_sent)},
      {"data_bytes_sent", number(counters.data_bytes_sent)},
      {"grants_sent", number(counters.grants_sent)},
      {"polls", number(polls_)},
      {"keys", number(parts_.matching.keys())},
      {"parked_keys", number(parts_.matching.parked_keys())},
      {"open_boxes", number(parts_.mailbox.open_boxes())},
  };
}

}  // namespace ringdl
