#include "collective/messages/in_order.h"

#include <algorithm>
#include <utility>

namespace ringdl {

// The messages after the greetings, addressed by place.
class InOrder::Places final : public Channel {
 public:
  Places(Channel& channel, const std::vector<int>& order, int place)
      : channel_(channel), order_(order), place_(place) {}

  int rank() const override { return place_; }
  int size() const override { return static_cast<int>(order_.size()); }
  int next() const { return (place_ + 1) % size(); }
  int previous() const { return (place_ + size() - 1) % size(); }

  void send(int to, const void* data, size_t bytes) override {
    channel_.send(rank_at(to), data, bytes);
  }
  void receive(int from, void* data, size_t bytes) override {
    channel_.receive(rank_at(from), data, bytes);
  }
  int64_t sent(int to) const override {
    return std::max<int64_t>(channel_.sent(rank_at(to)) - (to == next() ? 1 : 0), 0);
  }
  int64_t received(int from) const override {
    return std::max<int64_t>(channel_.received(rank_at(from)) - (from == previous() ? 1 : 0), 0);
  }
  bool agreed() const override { return channel_.received(rank_at(previous())) > 0; }
  bool has_greeted() const { return channel_.sent(rank_at(next())) > 0; }

 private:
  int rank_at(int place) const { return order_[static_cast<size_t>(place)]; }

  Channel& channel_;
  const std::vector<int>& order_;
  const int place_;
};

InOrder::InOrder(std::vector<int> order, int rank, std::unique_ptr<Collective> inner)
    : order_(std::move(order)),
      place_(static_cast<int>(std::find(order_.begin(), order_.end(), rank) - order_.begin())),
      inner_(std::move(inner)) {}

bool InOrder::step(Channel& channel) {
  Places places(channel, order_, place_);
  if (!has_greeted_) {
    has_greeted_ = true;
    places.send(places.next(), nullptr, 0);
    places.receive(places.previous(), nullptr, 0);
  }
  if (!is_done_) is_done_ = inner_->step(places);
  return is_done_ && places.agreed() && places.has_greeted();
}

}  // namespace ringdl
