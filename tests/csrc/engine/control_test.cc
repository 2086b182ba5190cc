// Control messages: in order per sender, whatever receives they arrive by and however these end.

#include "engine/control.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "transport/loopback/loopback.h"
#include "transport/ticket_table.h"

using namespace ringdl;

namespace {

// Reports operations late, and in another order than that in which they ended.
class Shuffling final : public Transport, public Completion {
 public:
  explicit Shuffling(std::unique_ptr<Transport> inner)
      : inner_(std::move(inner)), random_(static_cast<unsigned>(inner_->rank())) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  int max_tag() const override { return inner_->max_tag(); }

  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    return track(owner, inner_->send(to, tag, data, bytes, *this));
  }

  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    receives_from_one_ += from != kAnyRank ? 1 : 0;
    return track(owner, inner_->receive(from, tag, data, bytes, *this));
  }

  int poll() override {
    inner_->poll();
    std::shuffle(ended_.begin(), ended_.end(), random_);
    const size_t kept = random_() % 64;
    int told = 0;
    while (ended_.size() > kept) {
      const Ticket ticket = ended_.back();
      ended_.pop_back();
      operations_[ticket].owner->ended(ticket);
      operations_.remove(ticket);
      ++told;
    }
    return told;
  }

  bool withdraw(Ticket receive) override {
    ++withdrawn_;
    const bool has_ended = std::erase(ended_, receive) > 0;
    const Ticket inner = operations_[receive].inner;
    operations_.remove(receive);
    if (has_ended) return false;
    tickets_.erase(inner);
    return inner_->withdraw(inner);
  }

  void ended(Ticket inner) override {
    ended_.push_back(tickets_.at(inner));
    tickets_.erase(inner);
  }

  int receives_from_one() const { return receives_from_one_; }
  int withdrawn() const { return withdrawn_; }

 private:
  struct Operation {
    Completion* owner;
    Ticket inner;
  };

  Ticket track(Completion& owner, Ticket inner) {
    return tickets_[inner] = operations_.add({&owner, inner});
  }

  std::unique_ptr<Transport> inner_;
  std::minstd_rand random_;
  TicketTable<Operation> operations_;
  std::map<Ticket, Ticket> tickets_;  // by the inner transport's, of what has not ended there
  std::vector<Ticket> ended_;
  int receives_from_one_ = 0;
  int withdrawn_ = 0;
};

// Every rank writes to every other, in bursts, so that the frequent writers change: more ranks than
// have a receive of their own.
void test_order_per_sender() {
  constexpr int kRanks = 12;
  constexpr int kBursts = 40;
  constexpr int kBurst = 50;
  auto transports = make_loopback(kRanks);
  std::vector<std::thread> threads;
  std::atomic<int> ready{0};
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Shuffling transport(std::move(transports[static_cast<size_t>(rank)]));
      std::vector<uint64_t> read(kRanks, 0);
      int64_t all = 0;
      ControlPlane control(transport, [&](const ControlMessage& message) {
        CHECK(message.head.value == read[static_cast<size_t>(message.from)]++);
        ++all;
      });
      std::minstd_rand random(static_cast<unsigned>(rank));
      std::vector<uint64_t> written(kRanks, 0);
      std::vector<int> order;
      for (int i = 0; i < kBursts * (kRanks - 1); ++i) {
        order.push_back((rank + 1 + i % (kRanks - 1)) % kRanks);
      }
      std::shuffle(order.begin(), order.end(), random);
      for (const int to : order) {
        for (int k = 0; k < kBurst; ++k) {
          MessageHead head;
          head.value = written[static_cast<size_t>(to)]++;
          head.type = MessageType::kData;
          control.send(to, head);
        }
        if (random() % 2 == 0) transport.poll();
      }
      while (all < int64_t{kBursts} * kBurst * (kRanks - 1) || !control.idle()) transport.poll();
      ++ready;
      while (ready < kRanks) transport.poll();
      CHECK(transport.receives_from_one() > 100);
      CHECK(transport.withdrawn() > 0);
      control.close();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
  test_order_per_sender();
  return check::report();
}
