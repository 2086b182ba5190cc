#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace ringdl::check {

/// Lets a test hold back a rank's messages, see its sends, and act in the middle of its
/// withdrawals.
struct Hooks {
  std::function<bool()> may_poll = [] { return true; };
  std::function<void(int to, int tag)> sent = [](int, int) {};
  std::function<void()> withdrawn = [] {};
};

class Hooked final : public Transport {
 public:
  Hooked(std::unique_ptr<Transport> below, Hooks hooks)
      : below_(std::move(below)), hooks_(std::move(hooks)) {}
  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  int max_tag() const override { return below_->max_tag(); }
  Ticket send(int to, int tag, const void* data, size_t bytes, Completion& owner) override {
    const Ticket ticket = below_->send(to, tag, data, bytes, owner);
    hooks_.sent(to, tag);
    return ticket;
  }
  Ticket receive(int from, int tag, void* data, size_t bytes, Completion& owner) override {
    return below_->receive(from, tag, data, bytes, owner);
  }
  int poll() override { return hooks_.may_poll() ? below_->poll() : 0; }
  bool withdraw(Ticket receive) override {
    const bool free = below_->withdraw(receive);
    hooks_.withdrawn();
    return free;
  }
  const std::vector<Lost>& lost() const override { return below_->lost(); }
  bool reads_on() const override { return below_->reads_on(); }

 private:
  std::unique_ptr<Transport> below_;
  Hooks hooks_;
};

}  // namespace ringdl::check
