#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/collective.h"
#include "engine/mailbox.h"

namespace ringdl::check {

/// A caller's side: brings numbers, and gets their sum with what its callers brought before.
class Question final : public Collective {
 public:
  Question(std::vector<int64_t> numbers, int64_t& sum) : numbers_(std::move(numbers)), sum_(sum) {}
  bool greets_next() const override { return true; }
  bool step(Channel& channel) override {
    if (!std::exchange(has_asked_, true)) {
      channel.send(1, numbers_.data(), numbers_.size() * sizeof(int64_t));
      channel.receive(1, &sum_, sizeof(sum_));
    }
    return channel.sent(1) == 1 && channel.received(1) == 1;
  }
  std::string describe() const override { return "question"; }

 private:
  const std::vector<int64_t> numbers_;
  int64_t& sum_;
  bool has_asked_ = false;
};

/// Sums what each member has brought so far, until it has answered so many calls.
class Sums final : public Box {
 public:
  Sums(size_t count, int callers)
      : count_(count), sums_(static_cast<size_t>(callers)), most_(callers) {}

  std::unique_ptr<Collective> answer(int from) override {
    return std::make_unique<Answer>(*this, from);
  }
  bool is_over(const std::function<bool(int)>&) const override { return answered_ == most_; }
  void end_after(int64_t answers) { most_ = answers; }
  int64_t answered() const { return answered_; }

 private:
  class Answer final : public Collective {
   public:
    Answer(Sums& its, int from) : its_(its), from_(static_cast<size_t>(from)) {}
    bool step(Channel& channel) override {
      if (numbers_.empty()) {
        numbers_.resize(its_.count_);
        channel.receive(0, numbers_.data(), numbers_.size() * sizeof(int64_t));
      }
      if (channel.received(0) == 1 && !is_summed_) {
        is_summed_ = true;
        for (const int64_t number : numbers_) its_.sums_[from_] += number;
        sum_ = its_.sums_[from_];
        channel.send(0, &sum_, sizeof(sum_));
      }
      if (!is_summed_ || channel.sent(0) != 1) return false;
      ++its_.answered_;
      return true;
    }
    std::string describe() const override { return "answer"; }

   private:
    Sums& its_;
    const size_t from_;
    std::vector<int64_t> numbers_;
    int64_t sum_ = 0;
    bool is_summed_ = false;
  };

  const size_t count_;
  std::vector<int64_t> sums_;
  int64_t most_;
  int64_t answered_ = 0;
};

}  // namespace ringdl::check
