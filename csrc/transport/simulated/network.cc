#include "transport/simulated/network.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "transport/ticket_table.h"

namespace ringdl {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);
constexpr size_t kMostOfHeader = 8 << 10;
constexpr int kNobody = -2;  // whom a receive waits for whose message is lost

struct Posted {
  int from;
  std::byte* into;
  size_t bytes;
  Ticket ticket;
};

// A message on its way. A short one is copied, and its send ends at once. A long one is announced
// first; its bytes travel once a receive has met it, and its send ends when they have come.
struct Message {
  int from = 0;
  int to = 0;
  int tag = 0;
  size_t bytes = 0;
  const std::byte* source = nullptr;  // of a long one; null: in `copy`, or phantom
  std::vector<std::byte> copy;
  bool is_long = false;
  bool has_send = false;  // that has not ended
  Ticket send = 0;
  bool is_met = false;  // by this receive:
  Posted receive{};
  bool is_dropped = false;  // one of its ends is gone

  // A long one is announced before it is met.
  size_t bytes_on_way() const { return is_long && !is_met ? 0 : bytes; }
};

struct Inbox {
  std::deque<Posted> posted;
  std::deque<size_t> unexpected;  // messages, in the order in which they have come
};

struct Operation {
  Completion* owner = nullptr;
  int tag = 0;
  size_t message = kNone;  // that a receive has met, and that has not come yet
};

struct Event {
  enum Kind { kLeaves, kEnters, kComes, kWake, kCall };
  int64_t time_ns;
  uint64_t order;
  Kind kind;
  size_t what;  // a message (the first three), a rank, or the key of a call

  bool operator>(const Event& other) const {
    return std::tie(time_ns, order) > std::tie(other.time_ns, other.order);
  }
};

struct Rank {
  bool is_alive = true;
  bool is_paused = false;
  bool is_awake = false;  // is named soon, unless nothing has ended and it was not called
  bool is_called = false;
  TicketTable<Operation> operations;
  std::unordered_map<int, Inbox> inboxes;  // by tag
  std::deque<Ticket> ended;
};

class VirtualClock final : public Clock {
 public:
  int64_t now_ns() const override { return now_ns_; }
  void set(int64_t now_ns) { now_ns_ = now_ns; }

 private:
  int64_t now_ns_ = kSecond;
};

}  // namespace

struct SimulatedNetwork::State {
  explicit State(SimulatedNetworkOptions its)
      : options(std::move(its)),
        links(options.hosts, options.link, options.memory, options.message_ns),
        ranks(options.hosts.size()),
        is_cut(static_cast<size_t>(links.hosts())),
        random(options.jitter_seed) {}

  Rank& rank(int number) { return ranks[static_cast<size_t>(number)]; }
  bool is_between_cut(int from, int to) const {
    const auto is_off = [this](int number) {
      return is_cut[static_cast<size_t>(links.host_of(number))];
    };
    return !links.are_together(from, to) && (is_off(from) || is_off(to));
  }

  void schedule(int64_t time_ns, Event::Kind kind, size_t what) {
    events.push({std::max(time_ns, clock.now_ns()), order++, kind, what});
  }

  size_t new_message() {
    if (free_messages.empty()) {
      messages.emplace_back();
      return messages.size() - 1;
    }
    const size_t index = free_messages.back();
    free_messages.pop_back();
    messages[index] = Message();
    return index;
  }
  void forget(size_t index) {
    messages[index].copy = {};
    free_messages.push_back(index);
  }

  void rouse(Rank& its, int number) {
    if (std::exchange(its.is_awake, true)) return;
    awake.push_back(number);
  }
  void wake(int number) {
    Rank& its = rank(number);
    its.is_called = true;
    rouse(its, number);
  }

  void end(int number, Ticket ticket) {
    Rank& its = rank(number);
    its.ended.push_back(ticket);
    rouse(its, number);
  }
  void end_send(Message& message) {
    if (std::exchange(message.has_send, false)) end(message.from, message.send);
  }

  bool is_phantom(const void* data) const {
    const auto* const at = static_cast<const std::byte*>(data);
    return !options.phantom.empty() && at >= options.phantom.data() &&
           at < options.phantom.data() + options.phantom.size();
  }

  bool has_content(const void* data, size_t bytes) const {
    if (bytes == 0 || is_phantom(data)) return false;
    return options.phantom.empty() || bytes <= kMostOfHeader;
  }

  void write(std::byte* into, const std::byte* from, size_t bytes) const {
    if (bytes > 0 && !is_phantom(into)) std::memcpy(into, from, bytes);
  }

  // A message, or its announcement, is sent, and comes some time.
  void travel(size_t index) {
    const Message& its = messages[index];
    const int64_t latency = jittered(links.latency_ns(its.from, its.to));
    int64_t at_ns = links.leave(its.from, its.to, its.bytes_on_way(), clock.now_ns(), latency);
    if (options.jitter_seed != 0) {  // messages with the same tag do not overtake one another
      int64_t& last = last_on_channels[{its.from, its.to, its.tag}];
      at_ns = last = std::max(at_ns, last + 1);
    }
    ++messages_sent;
    const bool is_inside = links.are_together(its.from, its.to);
    schedule(at_ns, is_inside ? Event::kComes : Event::kEnters, index);
  }

  void enter(size_t index) {
    const Message& its = messages[index];
    schedule(links.enter(its.from, its.to, its.bytes_on_way(), clock.now_ns()), Event::kComes,
             index);
  }

  int64_t jittered(int64_t latency_ns) {
    if (options.jitter_seed == 0) return latency_ns;
    return std::uniform_int_distribution<int64_t>(latency_ns, 3 * latency_ns)(random);
  }

  Ticket send(int from, int to, int tag, const void* data, size_t bytes, Completion& owner) {
    const size_t index = new_message();
    Message& message = messages[index];
    message.from = from;
    message.to = to;
    message.tag = tag;
    message.bytes = bytes;
    message.has_send = true;
    message.send = rank(from).operations.add({&owner, tag, kNone});
    message.is_long = bytes > options.eager_bytes;
    const auto* const first = static_cast<const std::byte*>(data);
    const bool is_carried = has_content(data, bytes);
    if (is_carried && message.is_long) message.source = first;
    if (is_carried && !message.is_long) message.copy.assign(first, first + bytes);
    const Ticket ticket = message.send;
    travel(index);
    if (!message.is_long) end_send(messages[index]);
    return ticket;
  }

  Ticket receive(int number, int from, int tag, void* data, size_t bytes, Completion& owner) {
    Rank& its = rank(number);
    const Ticket ticket = its.operations.add({&owner, tag, kNone});
    Posted posted{from, static_cast<std::byte*>(data), bytes, ticket};
    Inbox& inbox = its.inboxes[tag];
    const auto found = std::ranges::find_if(inbox.unexpected, [&](size_t index) {
      return from == Transport::kAnyRank || messages[index].from == from;
    });
    if (found == inbox.unexpected.end()) {
      inbox.posted.push_back(posted);
      return ticket;
    }
    const size_t index = *found;
    inbox.unexpected.erase(found);
    meet(index, posted);
    return ticket;
  }

  // A message that has come, or was announced, and a receive.
  void meet(size_t index, const Posted& posted) {
    Message& message = messages[index];
    if (message.bytes > posted.bytes) {
      throw Error("simulated network: a message was longer than its receive");
    }
    if (!message.is_long) {
      write(posted.into, message.copy.data(), message.copy.size());
      end(message.to, posted.ticket);
      forget(index);
      return;
    }
    message.is_met = true;
    message.receive = posted;
    rank(message.to).operations[posted.ticket].message = index;
    // The sender hears of it first.
    const int64_t latency = links.latency_ns(message.from, message.to);
    schedule(clock.now_ns() + latency + options.message_ns, Event::kLeaves, index);
  }

  void deliver(size_t index) {
    Message& message = messages[index];
    if (message.source != nullptr) write(message.receive.into, message.source, message.bytes);
    rank(message.to).operations[message.receive.ticket].message = kNone;
    end(message.to, message.receive.ticket);
    end_send(message);
  }

  void on_comes(size_t index) {
    Message& message = messages[index];
    if (is_between_cut(message.from, message.to)) {
      held.push_back(index);
      return;
    }
    const bool is_behind = lost_channels.contains({message.from, message.to, message.tag});
    if (message.is_dropped || is_behind || !rank(message.to).is_alive) {
      // The sender of a long one hears of it later.
      message.is_dropped = true;
      if (!message.has_send) forget(index);
      return;
    }
    links.took(message.to, clock.now_ns());
    if (message.is_long && message.is_met) {
      deliver(index);
      forget(index);
      return;
    }
    Inbox& inbox = rank(message.to).inboxes[message.tag];
    const auto first_from = [&](int from) {
      return std::ranges::find_if(inbox.posted,
                                  [from](const Posted& each) { return each.from == from; });
    };
    auto found = first_from(message.from);
    if (found == inbox.posted.end()) found = first_from(Transport::kAnyRank);
    if (found == inbox.posted.end()) {
      inbox.unexpected.push_back(index);
      return;
    }
    const Posted posted = *found;
    inbox.posted.erase(found);
    meet(index, posted);
  }

  bool withdraw(int number, Ticket ticket, std::deque<Ticket>& ending) {
    Rank& its = rank(number);
    const Operation operation = its.operations[ticket];
    Inbox& inbox = its.inboxes[operation.tag];
    const bool was_posted = std::erase_if(inbox.posted, [ticket](const Posted& each) {
                              return each.ticket == ticket;
                            }) > 0;
    if (operation.message != kNone) {  // its bytes come at once: there is no time to wait for them
      deliver(operation.message);
      messages[operation.message].is_dropped = true;
    }
    std::erase(its.ended, ticket);
    std::erase(ending, ticket);
    its.operations.remove(ticket);
    return was_posted;
  }

  // What a rank has sent, but whose bytes are its own, is never received, nor what it has sent with
  // the same tag after it; nor is what it awaits.
  void let_go(int number) {
    for (Message& message : messages) {
      if (message.is_dropped) continue;
      if (message.to == number && message.is_met) {
        message.is_dropped = true;
        if (message.is_long) rank(number).operations[message.receive.ticket].message = kNone;
      }
      if (message.from != number || !std::exchange(message.has_send, false)) continue;
      if (!message.is_long) continue;
      message.is_dropped = true;
      lost_channels.insert({message.from, message.to, message.tag});
      if (message.is_met) {  // the receive goes on to wait
        Rank& receiver = rank(message.to);
        receiver.operations[message.receive.ticket].message = kNone;
        message.receive.from = kNobody;
        receiver.inboxes[message.tag].posted.push_front(message.receive);
      }
    }
    for (Rank& each : ranks) {
      for (auto& [tag, inbox] : each.inboxes) {
        bool is_behind = false;  // one that is lost
        std::erase_if(inbox.unexpected, [&](size_t index) {
          Message& message = messages[index];
          is_behind |= message.is_dropped && message.from == number;
          message.is_dropped |= is_behind && message.from == number;
          return message.is_dropped;
        });
      }
    }
    Rank& its = rank(number);
    its.inboxes.clear();
    its.ended.clear();
  }

  void notice(int number) {
    lost.push_back({number, ""});
    for (Message& message : messages) {
      if (message.to == number) end_send(message);
    }
    for (int each = 0; each < static_cast<int>(ranks.size()); ++each) wake(each);
  }

  const SimulatedNetworkOptions options;
  VirtualClock clock;
  Links links;
  std::vector<Rank> ranks;
  std::vector<bool> is_cut;  // by host
  std::deque<Message> messages;
  std::vector<size_t> free_messages;
  std::vector<size_t> held;  // by a link that is cut
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events;
  uint64_t order = 0;
  uint64_t messages_sent = 0;
  std::map<uint64_t, std::function<void()>> calls;
  std::vector<int> awake;
  std::vector<Transport::Lost> lost;
  using Channel = std::tuple<int, int, int>;  // from, to, tag
  std::map<Channel, int64_t> last_on_channels;
  std::set<Channel> lost_channels;  // on which a message is lost, so that no other comes
  std::minstd_rand random;
};

class SimulatedNetwork::End final : public Transport {
 public:
  End(std::shared_ptr<State> state, int rank) : state_(std::move(state)), rank_(rank) {}
  ~End() override { state_->let_go(rank_); }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(state_->ranks.size()); }
  int max_tag() const override { return 32767; }
  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    return state_->send(rank_, to, tag, data, bytes, owner);
  }
  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    return state_->receive(rank_, from, tag, data, bytes, owner);
  }
  int poll() override {
    Rank& its = state_->rank(rank_);
    ending_.swap(its.ended);
    int count = 0;
    while (!ending_.empty()) {
      const Ticket ticket = ending_.front();
      ending_.pop_front();
      its.operations[ticket].owner->ended(ticket);
      its.operations.remove(ticket);
      ++count;
    }
    return count;
  }
  bool withdraw(Ticket receive) override { return state_->withdraw(rank_, receive, ending_); }
  const std::vector<Lost>& lost() const override { return state_->lost; }

 private:
  const std::shared_ptr<State> state_;
  const int rank_;
  std::deque<Ticket> ending_;
};

SimulatedNetwork::SimulatedNetwork(SimulatedNetworkOptions options)
    : state_(std::make_shared<State>(std::move(options))) {}

SimulatedNetwork::~SimulatedNetwork() = default;

bool SimulatedNetwork::has_ended(int rank) const { return !state_->rank(rank).ended.empty(); }

int SimulatedNetwork::size() const { return static_cast<int>(state_->ranks.size()); }

int SimulatedNetwork::hosts() const { return state_->links.hosts(); }

const Clock& SimulatedNetwork::clock() const { return state_->clock; }

std::unique_ptr<Transport> SimulatedNetwork::transport(int rank) {
  return std::make_unique<End>(state_, rank);
}

std::vector<int> SimulatedNetwork::take_awake() {
  std::vector<int> named;
  for (const int number : std::exchange(state_->awake, {})) {
    Rank& its = state_->rank(number);
    const bool has_cause = std::exchange(its.is_called, false) || !its.ended.empty();
    if (has_cause && its.is_alive && !its.is_paused) named.push_back(number);
    its.is_awake = false;
  }
  return named;
}

void SimulatedNetwork::wake_at(int rank, int64_t time_ns) {
  state_->schedule(time_ns, Event::kWake, static_cast<size_t>(rank));
}

void SimulatedNetwork::compute(int rank, int64_t duration_ns) {
  state_->links.compute(rank, state_->clock.now_ns(), duration_ns);
}

int64_t SimulatedNetwork::free_ns(int rank) const { return state_->links.free_ns(rank); }

int64_t SimulatedNetwork::busy_ns(int rank) const { return state_->links.busy_ns(rank); }

void SimulatedNetwork::call_at(int64_t time_ns, std::function<void()> what) {
  state_->calls.emplace(state_->order, std::move(what));
  state_->schedule(time_ns, Event::kCall, state_->order);
}

bool SimulatedNetwork::advance() {
  State& its = *state_;
  if (its.events.empty()) return false;
  const int64_t now = its.events.top().time_ns;
  its.clock.set(now);
  while (!its.events.empty() && its.events.top().time_ns == now) {
    const Event event = its.events.top();
    its.events.pop();
    switch (event.kind) {
      case Event::kLeaves:
        its.travel(event.what);
        break;
      case Event::kEnters:
        its.enter(event.what);
        break;
      case Event::kComes:
        its.on_comes(event.what);
        break;
      case Event::kWake:
        its.wake(static_cast<int>(event.what));
        break;
      case Event::kCall:
        its.calls.extract(event.what).mapped()();
        break;
    }
  }
  return true;
}

void SimulatedNetwork::kill(int rank, int64_t notice_ns) {
  if (!std::exchange(state_->rank(rank).is_alive, false)) return;
  state_->let_go(rank);
  call_at(state_->clock.now_ns() + notice_ns, [this, rank] { state_->notice(rank); });
}

bool SimulatedNetwork::is_alive(int rank) const { return state_->rank(rank).is_alive; }

void SimulatedNetwork::pause(int rank) { state_->rank(rank).is_paused = true; }

void SimulatedNetwork::resume(int rank) {
  state_->rank(rank).is_paused = false;
  state_->wake(rank);
}

bool SimulatedNetwork::is_paused(int rank) const { return state_->rank(rank).is_paused; }

void SimulatedNetwork::cut(int host) { state_->is_cut[static_cast<size_t>(host)] = true; }

void SimulatedNetwork::mend(int host) {
  state_->is_cut[static_cast<size_t>(host)] = false;
  // At once, before any that have not come yet.
  for (const size_t index : std::exchange(state_->held, {})) state_->on_comes(index);
}

void SimulatedNetwork::slow(int host, double times) { state_->links.slow(host, times); }

uint64_t SimulatedNetwork::bytes_sent(int host) const { return state_->links.bytes_sent(host); }

uint64_t SimulatedNetwork::messages_sent() const { return state_->messages_sent; }

}  // namespace ringdl
