#include "transport/loopback/loopback.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <random>
#include <string>

#include "base/error.h"
#include "transport/ticket_table.h"

namespace ringdl {
namespace {

// A message that found no posted receive. Short ones carry a copy and their send has ended; long
// ones point into the sender's buffer, and the receiver ends the send.
struct Unexpected {
  int from;
  int tag;
  size_t bytes;
  std::vector<std::byte> copy;
  const void* source = nullptr;
  Ticket send = 0;
};

struct Posted {
  int from;
  int tag;
  void* data;
  size_t bytes;
  Ticket receive;
};

struct Inbox {
  std::mutex lock;
  std::deque<Unexpected> unexpected;
  std::list<Posted> posted;
  std::deque<Ticket> ended;
  bool truncated = false;
};

struct Hub {
  explicit Hub(int size) : inboxes(static_cast<size_t>(size)) {}
  std::vector<Inbox> inboxes;
};

class Loopback final : public Transport {
 public:
  Loopback(std::shared_ptr<Hub> hub, int rank, LoopbackOptions options)
      : hub_(std::move(hub)), rank_(rank), options_(options), random_(options.delay_seed + rank) {}

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(hub_->inboxes.size()); }
  int max_tag() const override { return 32767; }
  bool reads_on() const override { return true; }  // what others have not received yet

  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    const Ticket ticket = owners_.add(&owner);
    bool ended = true;
    {
      Inbox& inbox = hub_->inboxes[to];
      std::lock_guard guard(inbox.lock);
      const auto first_from = [&](int from) {
        return std::find_if(inbox.posted.begin(), inbox.posted.end(), [=](const Posted& each) {
          return each.tag == tag && each.from == from;
        });
      };
      auto posted = first_from(rank_);
      if (posted == inbox.posted.end()) posted = first_from(kAnyRank);
      if (posted != inbox.posted.end()) {
        copy(inbox, *posted, data, bytes);
        inbox.posted.erase(posted);
      } else {
        Unexpected message{rank_, tag, bytes, {}, data, ticket};
        if (bytes <= options_.eager_bytes) {
          const auto* first = static_cast<const std::byte*>(data);
          message.copy.assign(first, first + bytes);
          message.source = nullptr;
        } else {
          ended = false;
        }
        inbox.unexpected.push_back(std::move(message));
      }
    }
    if (ended) end(rank_, ticket);
    return ticket;
  }

  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    const Ticket ticket = owners_.add(&owner);
    Posted posted{from, tag, data, bytes, ticket};
    Unexpected message;
    {
      Inbox& inbox = hub_->inboxes[rank_];
      std::lock_guard guard(inbox.lock);
      auto found = inbox.unexpected.begin();
      while (found != inbox.unexpected.end() &&
             !(found->tag == tag && (from == kAnyRank || found->from == from))) {
        ++found;
      }
      if (found == inbox.unexpected.end()) {
        inbox.posted.push_back(posted);
        return ticket;
      }
      message = std::move(*found);
      inbox.unexpected.erase(found);
      copy(inbox, posted, message.source ? message.source : message.copy.data(), message.bytes);
    }
    if (message.source) end(message.from, message.send);
    return ticket;
  }

  int poll() override {
    if (options_.delay_seed != 0 && random_() % 4 != 0) return 0;
    {
      Inbox& inbox = hub_->inboxes[rank_];
      std::lock_guard guard(inbox.lock);
      if (inbox.truncated) throw Error("loopback: a message was longer than its receive");
      ending_.swap(inbox.ended);
    }
    int count = 0;
    while (!ending_.empty()) {
      const Ticket ticket = ending_.front();
      ending_.pop_front();
      owners_[ticket]->ended(ticket);
      owners_.remove(ticket);
      ++count;
    }
    return count;
  }

  bool withdraw(Ticket receive) override {
    Inbox& inbox = hub_->inboxes[rank_];
    std::lock_guard guard(inbox.lock);
    owners_.remove(receive);
    for (auto posted = inbox.posted.begin(); posted != inbox.posted.end(); ++posted) {
      if (posted->receive != receive) continue;
      inbox.posted.erase(posted);
      return true;
    }
    std::erase(inbox.ended, receive);
    std::erase(ending_, receive);  // an owner may withdraw while poll() notifies it of another end
    return false;
  }

 private:
  // Both with the lock of `inbox` held.
  static void copy(Inbox& inbox, const Posted& posted, const void* data, size_t bytes) {
    if (bytes > posted.bytes) inbox.truncated = true;
    if (bytes > 0 && bytes <= posted.bytes) std::memcpy(posted.data, data, bytes);
    inbox.ended.push_back(posted.receive);
  }

  void end(int rank, Ticket ticket) {
    Inbox& inbox = hub_->inboxes[rank];
    std::lock_guard guard(inbox.lock);
    inbox.ended.push_back(ticket);
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  LoopbackOptions options_;
  std::minstd_rand random_;
  TicketTable<Completion*> owners_;
  std::deque<Ticket> ending_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_loopback(int size, LoopbackOptions options) {
  if (size < 1) throw UsageError("loopback needs at least one rank, not " + std::to_string(size));
  auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) {
    transports.push_back(std::make_unique<Loopback>(hub, rank, options));
  }
  return transports;
}

}  // namespace ringdl
