#include "transport/tcp/tcp.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "transport/tcp/connection.h"
#include "transport/ticket_table.h"

namespace ringdl {
namespace {

using tcp::check_call;
using tcp::Connection;

// Connections that one poll reads; others wait for the next poll.
constexpr int kEventsPerPoll = 64;

constexpr int64_t kCloseNs = kSecond;

// As long as it takes the system's keep-alive (ringdl/_sockets.py): a cable may be out for less.
constexpr int64_t kSilenceNs = 90 * kSecond;
constexpr int64_t kLookEveryNs = 5 * kSecond;

// Sockets that a forked child must not keep open.
std::mutex open_mutex;
std::set<int>& open_descriptors() {
  static auto* const descriptors = new std::set<int>;
  return *descriptors;
}

void close_in_forked_children(int descriptor) {
  static const int registered =
      pthread_atfork([] { open_mutex.lock(); }, [] { open_mutex.unlock(); },
                     [] {
                       for (const int open : open_descriptors()) {
                         close(open);
                       }
                       open_mutex.unlock();
                     });
  if (registered != 0) throw Error("pthread_atfork failed");
  const std::lock_guard guard(open_mutex);
  open_descriptors().insert(descriptor);
}

void forget_descriptor(int descriptor) {
  const std::lock_guard guard(open_mutex);
  open_descriptors().erase(descriptor);
}

class TcpTransport final : public Transport, private tcp::Receiver {
 public:
  TcpTransport(int rank, const std::vector<int>& sockets)
      : rank_(rank), peers_(sockets.size()), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
    for (size_t peer = 0; peer < sockets.size(); ++peer) {
      if (sockets[peer] < 0) continue;
      Receiver& receiver = *this;
      peers_[peer].connection =
          std::make_unique<Connection>(receiver, static_cast<int>(peer), sockets[peer]);
    }
    check_call(epoll_, "epoll_create1");
    close_in_forked_children(epoll_);
    for (size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!peers_[peer].connection) continue;
      close_in_forked_children(peers_[peer].connection->socket());
      watch(EPOLL_CTL_ADD, static_cast<int>(peer), EPOLLIN);
    }
  }

  ~TcpTransport() override {
    for (const Peer& peer : peers_) {
      if (peer.connection) forget_descriptor(peer.connection->socket());
    }
    forget_descriptor(epoll_);
    try {
      await_ends();
    } catch (const Error&) {  // the connections are broken: there is nothing left to wait for
    }
    close(epoll_);
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(peers_.size()); }
  int max_tag() const override { return 0x7fffffff; }

  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    const Ticket ticket = slots_.add({&owner, State::kSending, to, tag, nullptr, bytes});
    const auto* const first = static_cast<const std::byte*>(data);
    if (to == rank_) {
      deliver(rank_, tag, first, bytes);
      sent(ticket);
      return ticket;
    }
    Peer& peer = peers_[static_cast<size_t>(to)];
    if (!peer.connection) {
      sent(ticket);
      return ticket;
    }
    peer.connection->send(tag, first, bytes, ticket);
    watch_for_room(to);
    return ticket;
  }

  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    auto* const into = static_cast<std::byte*>(data);
    const Ticket ticket = slots_.add({&owner, State::kPosted, from, tag, into, bytes});
    if (const auto of_tag = unexpected_.find(tag); of_tag != unexpected_.end()) {
      for (auto each = of_tag->second.begin(); each != of_tag->second.end(); ++each) {
        if (each->is_taken || (from != kAnyRank && from != each->from)) continue;
        check_length(slots_[ticket], each->data.size());
        each->is_taken = true;
        if (each->is_whole) {
          end_with(ticket, each->data.data(), each->data.size());
          forget(of_tag->first, each);
        } else {
          slots_[ticket].state = State::kFilling;
          slots_[ticket].rank = each->from;
          each->taker = ticket;
        }
        return ticket;
      }
    }
    posted_[{from, tag}].push_back(ticket);
    return ticket;
  }

  int poll() override {
    read_ready();
    find_silent(now_ns());
    int count = 0;
    while (!ending_.empty()) {
      const Ticket ticket = ending_.front();
      ending_.pop_front();
      slots_[ticket].owner->ended(ticket);
      slots_.remove(ticket);
      ++count;
    }
    return count;
  }

  bool withdraw(Ticket receive) override {
    const Slot slot = slots_[receive];
    if (slot.state == State::kPosted) {
      std::erase(posted_[{slot.rank, slot.tag}], receive);
    } else if (slot.state == State::kFilling) {
      let_go(peers_[static_cast<size_t>(slot.rank)], receive);
    } else {  // an owner withdraws while poll() notifies it of another end
      std::erase(ending_, receive);
    }
    slots_.remove(receive);
    return slot.state == State::kPosted;
  }

  const std::vector<Lost>& lost() const override { return lost_; }

 private:
  enum class State { kSending, kPosted, kFilling, kEnded };

  struct Slot {
    Completion* owner;
    State state;
    int rank;  // the other end's; once a message is matched, its sender
    int tag;
    std::byte* data;
    size_t bytes;
  };

  // A message that arrived before its receive was posted.
  struct Unexpected {
    int from;
    std::vector<std::byte> data;
    bool is_whole;
    bool is_taken = false;        // by a receive, which may have been withdrawn
    std::optional<Ticket> taker;  // that receive, while it waits for the rest
  };
  using Messages = std::list<Unexpected>;

  struct Peer {
    std::unique_ptr<Connection> connection;  // null: this rank itself, or lost
    bool is_watched_for_room = false;
    // Where the large message under way goes: into a receive's buffer, or among the unexpected ones
    // of a tag; nowhere, if that receive was withdrawn.
    std::optional<Ticket> filling;
    int unexpected_tag = 0;
    std::optional<Messages::iterator> unexpected;
  };

  struct Source {
    int from;
    int tag;
    bool operator==(const Source&) const = default;
  };
  struct SourceHash {
    size_t operator()(const Source& source) const {
      return std::hash<uint64_t>()(static_cast<uint64_t>(static_cast<uint32_t>(source.from)) << 32 |
                                   static_cast<uint32_t>(source.tag));
    }
  };

  static void check_length(const Slot& receive, size_t bytes) {
    if (bytes > receive.bytes) {
      throw Error("a message of " + std::to_string(bytes) + " bytes with the tag " +
                  std::to_string(receive.tag) + " is longer than its receive of " +
                  std::to_string(receive.bytes));
    }
  }

  void watch(int operation, int peer, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = peer;
    check_call(epoll_ctl(epoll_, operation, peers_[static_cast<size_t>(peer)].connection->socket(),
                         &event),
               "epoll_ctl");
  }

  // Has epoll report when more can be written, only while there is more.
  void watch_for_room(int rank) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    const bool wanted = peer.connection->has_more_to_write();
    if (wanted == peer.is_watched_for_room) return;
    peer.is_watched_for_room = wanted;
    watch(EPOLL_CTL_MOD, rank, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }

  void read_ready() {
    std::array<epoll_event, kEventsPerPoll> events;
    const int count = epoll_wait(epoll_, events.data(), kEventsPerPoll, 0);
    if (count < 0 && errno != EINTR) check_call(count, "epoll_wait");
    for (int i = 0; i < count; ++i) {
      const int rank = events[static_cast<size_t>(i)].data.fd;
      const uint32_t what = events[static_cast<size_t>(i)].events;
      Peer& peer = peers_[static_cast<size_t>(rank)];
      if (!peer.connection) continue;
      if ((what & EPOLLOUT) != 0) peer.connection->write();
      if ((what & ~static_cast<uint32_t>(EPOLLOUT)) != 0 && !peer.connection->read()) {
        lose(rank, peer.connection->why_lost());
        continue;
      }
      watch_for_room(rank);
    }
  }

  // Nothing can be read from a host that has lost its power, or its cable.
  void find_silent(int64_t now) {
    if (now < next_look_ns_) return;
    next_look_ns_ = now + kLookEveryNs;
    for (size_t rank = 0; rank < peers_.size(); ++rank) {
      Connection* const connection = peers_[rank].connection.get();
      if (connection == nullptr || !connection->is_unanswered_for(kSilenceNs)) continue;
      connection->give_up("its host has not answered for " + seconds_text(kSilenceNs));
      lose(static_cast<int>(rank), connection->why_lost());
    }
  }

  void lose(int rank, std::string why) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    forget_descriptor(peer.connection->socket());
    // A child that was forked this moment may have the socket, too: epoll would not forget it.
    epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.connection->socket(), nullptr);
    peer.connection.reset();
    lost_.push_back({rank, std::move(why)});
  }

  std::optional<Ticket> take_posted(int from, int tag) {
    for (const int wanted : {from, kAnyRank}) {
      const auto found = posted_.find({wanted, tag});
      if (found == posted_.end() || found->second.empty()) continue;
      const Ticket ticket = found->second.front();
      found->second.pop_front();
      return ticket;
    }
    return std::nullopt;
  }

  Messages::iterator keep(int from, int tag, size_t bytes, bool is_whole) {
    Messages& messages = unexpected_[tag];
    messages.push_back({from, std::vector<std::byte>(bytes), is_whole, false, std::nullopt});
    return std::prev(messages.end());
  }

  void forget(int tag, Messages::iterator message) {
    const auto of_tag = unexpected_.find(tag);
    of_tag->second.erase(message);
    if (of_tag->second.empty()) unexpected_.erase(of_tag);
  }

  void end(Ticket ticket) {
    slots_[ticket].state = State::kEnded;
    ending_.push_back(ticket);
  }

  void end_with(Ticket receive, const std::byte* data, size_t bytes) {
    if (bytes > 0) std::memcpy(slots_[receive].data, data, bytes);
    end(receive);
  }

  void sent(Ticket send) override { end(send); }

  void deliver(int from, int tag, const std::byte* data, size_t bytes) override {
    if (const std::optional<Ticket> receive = take_posted(from, tag)) {
      check_length(slots_[*receive], bytes);
      end_with(*receive, data, bytes);
    } else {
      const auto message = keep(from, tag, bytes, true);
      std::copy_n(data, bytes, message->data.begin());
    }
  }

  std::byte* begin_message(int from, int tag, size_t bytes) override {
    Peer& peer = peers_[static_cast<size_t>(from)];
    peer.filling = take_posted(from, tag);
    if (peer.filling) {
      Slot& slot = slots_[*peer.filling];
      check_length(slot, bytes);
      slot.state = State::kFilling;
      slot.rank = from;
      return slot.data;
    }
    peer.unexpected_tag = tag;
    peer.unexpected = keep(from, tag, bytes, false);
    return (*peer.unexpected)->data.data();
  }

  void end_message(int from) override {
    Peer& peer = peers_[static_cast<size_t>(from)];
    if (const auto receive = std::exchange(peer.filling, std::nullopt)) end(*receive);
    if (const auto message = std::exchange(peer.unexpected, std::nullopt)) {
      Unexpected& unexpected = **message;
      unexpected.is_whole = true;
      if (unexpected.taker) {
        end_with(*unexpected.taker, unexpected.data.data(), unexpected.data.size());
      }
      if (unexpected.is_taken) forget(peer.unexpected_tag, *message);
    }
  }

  // A receive is withdrawn while its message arrives: the rest is dropped.
  void let_go(Peer& peer, Ticket receive) {
    if (peer.filling == receive) {
      peer.filling.reset();
      if (peer.connection) peer.connection->discard_message();
    } else if (peer.unexpected && (*peer.unexpected)->taker == receive) {
      (*peer.unexpected)->taker.reset();
    }
  }

  void await_ends() {
    std::vector<pollfd> open;
    std::vector<std::byte> dropped(64 << 10);
    for (const Peer& peer : peers_) {
      if (!peer.connection) continue;
      peer.connection->close_for_sending();
      open.push_back({peer.connection->socket(), POLLIN, 0});
    }
    const int64_t until = now_ns() + kCloseNs;
    while (!open.empty()) {
      const int64_t rest = until - now_ns();
      if (rest <= 0) return;
      if (::poll(open.data(), open.size(), static_cast<int>(rest / kMillisecond + 1)) < 0) continue;
      std::erase_if(open, [&](const pollfd& each) {
        if (each.revents == 0) return false;
        const ssize_t result = ::read(each.fd, dropped.data(), dropped.size());
        return result == 0 || (result < 0 && errno != EAGAIN && errno != EINTR);
      });
    }
  }

  const int rank_;
  std::vector<Peer> peers_;
  const int epoll_;
  TicketTable<Slot> slots_;
  std::unordered_map<Source, std::deque<Ticket>, SourceHash> posted_;  // kept: tags are reused
  std::unordered_map<int, Messages> unexpected_;                       // by tag, as they arrived
  std::deque<Ticket> ending_;
  std::vector<Lost> lost_;
  int64_t next_look_ns_ = now_ns() + kLookEveryNs;
};

}  // namespace

std::unique_ptr<Transport> make_tcp_transport(int rank, std::vector<int> sockets) {
  if (rank < 0 || static_cast<size_t>(rank) >= sockets.size()) {
    throw UsageError("rank " + std::to_string(rank) + " is not one of the " +
                     std::to_string(sockets.size()) + " that there are sockets for");
  }
  return std::make_unique<TcpTransport>(rank, sockets);
}

}  // namespace ringdl
