#include "engine/gradient_buckets.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace ringdl {
namespace {

std::string label_of_bucket(const BucketLayout& bucket, const std::vector<GradientSpec>& gradients,
                            size_t number) {
  const std::string& first = gradients[static_cast<size_t>(bucket.gradients.front())].name;
  const std::string& last = gradients[static_cast<size_t>(bucket.gradients.back())].name;
  std::string label = "gradient bucket " + std::to_string(number) + " ('" + first + "'";
  if (bucket.gradients.size() > 1) label += " to '" + last + "'";
  return label + ")";
}

}  // namespace

GradientBuckets::GradientBuckets(std::shared_ptr<Driver> driver,
                                 std::vector<GradientSpec> gradients, BucketPlan plan,
                                 std::unique_ptr<BucketMemory> memory,
                                 const BucketMemory::Places& places, Reduction reduction,
                                 int64_t first_number, const SharedGroup& group,
                                 std::optional<DType> compression)
    : driver_(std::move(driver)),
      gradients_(std::move(gradients)),
      plan_(std::move(plan)),
      first_number_(first_number),
      memory_(std::move(memory)),
      storage_(*memory_->storage()) {
  if (reduction != Reduction::kSum && reduction != Reduction::kAverage) {
    throw UsageError("buckets reduce gradients by Sum or Average, not " +
                     std::string(name_of(reduction)));
  }
  if (first_number + static_cast<int64_t>(plan_.buckets.size()) > driver_->max_bucket()) {
    throw UsageError(
        "too many buckets were made with this communicator; make them once, not in "
        "each step, or use larger ones");
  }
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    const BucketLayout& layout = plan_.buckets[i];
    const bool shrinks = compression && layout.dtype == DType::kFloat32;
    driver_->add_bucket(
        first_number_ + static_cast<int64_t>(i),
        {memory_->storage(), storage_.bucket(static_cast<int>(i)), layout.bytes, layout.dtype,
         reduction, shrinks ? Codec(*compression) : Codec(), label_of_bucket(layout, gradients_, i),
         group, memory_->connect(i, places)});
  }
  begin_round();
}

GradientBuckets::~GradientBuckets() {
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    try {
      driver_->remove_bucket(first_number_ + static_cast<int64_t>(i));
    } catch (...) {  // a forked child, or a broken transport: nothing to give back to
      memory_->keep_for_good();
      return;
    }
    memory_->leave(i);
  }
}

void GradientBuckets::begin_round() {
  ready_.assign(gradients_.size(), false);
  rounds_.clear();
  for (const BucketLayout& bucket : plan_.buckets) {
    rounds_.push_back({static_cast<int>(bucket.gradients.size()), nullptr});
  }
}

void GradientBuckets::launch(int number, bool is_awaited) {
  const auto note_produced = [&] {
    for (const int index : plan_.buckets[static_cast<size_t>(number)].gradients) {
      const auto at = static_cast<size_t>(index);
      storage_.set_produced(index, gradients_[at].bytes(), ready_[at]);
    }
  };
  rounds_[static_cast<size_t>(number)].work =
      driver_->launch_bucket(first_number_ + number, note_produced, is_awaited);
}

void GradientBuckets::ready(int index) {
  driver_->refuse_shut_down();
  std::lock_guard guard(mutex_);
  refuse_failed();
  if (index < 0 || index >= static_cast<int>(gradients_.size())) {
    throw UsageError("ready(" + std::to_string(index) + "): there are " +
                     std::to_string(gradients_.size()) + " gradients");
  }
  if (ready_[static_cast<size_t>(index)]) {
    throw UsageError("gradient '" + gradients_[static_cast<size_t>(index)].name +
                     "' is ready already; call wait() before the next round");
  }
  ready_[static_cast<size_t>(index)] = true;
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  Round& round = rounds_[static_cast<size_t>(number)];
  if (round.work) {
    throw UsageError(
        "gradient '" + gradients_[static_cast<size_t>(index)].name +
        "' comes too late: its bucket has been in flight since a wait() that timed out");
  }
  if (--round.missing == 0) launch(number, false);
}

// Without the lock while it waits: a signal handler may enter in the same thread.
std::vector<bool> GradientBuckets::wait(int64_t timeout_ns,
                                        const std::function<void()>& interrupted, bool for_good) {
  std::vector<std::shared_ptr<Work>> works;
  try {
    {
      std::lock_guard guard(mutex_);
      refuse_failed();
      for (size_t i = 0; i < rounds_.size(); ++i) {
        if (!rounds_[i].work) launch(static_cast<int>(i), true);
        works.push_back(rounds_[i].work);
      }
    }
    for (const auto& work : works) driver_->wait(work, timeout_ns, interrupted, for_good);
  } catch (const MismatchError& error) {
    std::lock_guard guard(mutex_);
    if (failure_.empty()) failure_ = error.what();
    throw;
  }
  std::lock_guard guard(mutex_);
  std::vector<bool> produced(gradients_.size());
  for (size_t i = 0; i < produced.size(); ++i) {
    produced[i] = storage_.is_produced(static_cast<int>(i));
  }
  begin_round();
  return produced;
}

void GradientBuckets::refuse_failed() const {
  if (failure_.empty()) return;
  throw MismatchError("these buckets cannot be used any more, make new ones: " + failure_);
}

}  // namespace ringdl
