#pragma once

#include <utility>
#include <vector>

#include "collective/channel.h"

namespace ringdl {

/// Messages among some of the ranks, after those that they have exchanged before.
class SubChannel final : public Channel {
 public:
  /// @param ranks  the members, as the channel numbers them
  /// @param member  which of them this rank is
  SubChannel(std::vector<int> ranks, int member)
      : ranks_(std::move(ranks)),
        member_(member),
        sent_before_(ranks_.size(), 0),
        received_before_(ranks_.size(), 0) {}

  /// Messages go through here from now on; all earlier ones have ended.
  void begin(Channel& channel) {
    use(channel);
    for (size_t i = 0; i < ranks_.size(); ++i) {
      sent_before_[i] = channel.sent(ranks_[i]);
      received_before_[i] = channel.received(ranks_[i]);
    }
  }
  /// The channel to be used until the next call of this.
  void use(Channel& channel) { channel_ = &channel; }

  int rank() const override { return member_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void send(int to, const void* data, size_t bytes) override {
    channel_->send(rank_of(to), data, bytes);
  }
  void receive(int from, void* data, size_t bytes) override {
    channel_->receive(rank_of(from), data, bytes);
  }
  int64_t sent(int to) const override {
    return channel_->sent(rank_of(to)) - sent_before_[static_cast<size_t>(to)];
  }
  int64_t received(int from) const override {
    return channel_->received(rank_of(from)) - received_before_[static_cast<size_t>(from)];
  }
  bool agreed() const override { return channel_->agreed(); }

 private:
  int rank_of(int member) const { return ranks_[static_cast<size_t>(member)]; }

  const std::vector<int> ranks_;
  const int member_;
  Channel* channel_ = nullptr;
  std::vector<int64_t> sent_before_;
  std::vector<int64_t> received_before_;
};

}  // namespace ringdl
