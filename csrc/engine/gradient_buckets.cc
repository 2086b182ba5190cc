#include "engine/gradient_buckets.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/buffer.h"
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
                                 Reduction reduction, int64_t first_number,
                                 const SharedGroup& group, std::optional<DType> compression)
    : driver_(std::move(driver)),
      gradients_(std::move(gradients)),
      plan_(std::move(plan)),
      first_number_(first_number),
      reduction_(reduction),
      compression_(compression),
      group_(group),
      layout_(driver_->layout_of(*group)),
      shares_(layout_->hosts.size() < group->ranks.size()),
      window_(shares_ && layout_->local_size() > 1 ? driver_->window() : nullptr),
      storage_(std::make_shared<BucketStorage>(plan_, [this](size_t bytes) {
        return window_ ? driver_->allocate(bytes) : allocate(bytes);
      })) {
  if (reduction != Reduction::kSum && reduction != Reduction::kAverage) {
    throw UsageError("buckets reduce gradients by Sum or Average, not " +
                     std::string(name_of(reduction)));
  }
  if (first_number + static_cast<int64_t>(plan_.buckets.size()) > driver_->max_bucket()) {
    throw UsageError(
        "too many buckets were made with this communicator; make them once, not in "
        "each step, or use larger ones");
  }
  if (shares_) {
    tell_places();
  } else {
    for (size_t i = 0; i < plan_.buckets.size(); ++i) register_bucket(i, std::nullopt);
  }
  begin_round();
}

int64_t GradientBuckets::place_of(const std::byte* data) const {
  const auto offset = window_ ? window_->offset_of(data, 1) : std::nullopt;
  return offset ? static_cast<int64_t>(*offset) : -1;
}

void GradientBuckets::tell_places() {
  const size_t bytes = SharedCounters::bytes(layout_->local_size());
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    places_.push_back(place_of(storage_->bucket(static_cast<int>(i))));
    places_.push_back(-1);
    if (layout_->local_rank != 0) continue;
    own_counters_.push_back(window_ ? window_->allocate_stage(bytes) : allocate(bytes));
    std::memset(own_counters_.back().get(), 0, bytes);
    places_.back() = place_of(own_counters_.back().get());
  }
}

void GradientBuckets::connect(const std::vector<std::vector<int64_t>>& places) {
  const auto at = [&](int member, size_t place) {
    const auto number = static_cast<size_t>(member);
    return window_->at(group_->ranks[number], static_cast<uint64_t>(places[number][place]));
  };
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    counters_.emplace_back();
    if (!is_reached(i, places)) {
      register_bucket(i, std::nullopt);
      continue;
    }
    SharedArrays shared;
    if (window_) {
      for (const int member : layout_->local_ranks()) shared.arrays.push_back(at(member, 2 * i));
    } else {
      shared.arrays.push_back(storage_->bucket(static_cast<int>(i)));
    }
    shared.counters =
        SharedCounters(window_ ? at(layout_->local_ranks()[0], 2 * i + 1) : own_counters_[i].get(),
                       layout_->local_size());
    counters_.back() = shared.counters;
    register_bucket(i, std::move(shared));
  }
}

bool GradientBuckets::is_reached(size_t number,
                                 const std::vector<std::vector<int64_t>>& places) const {
  return std::ranges::all_of(layout_->hosts, [&](const std::vector<int>& members) {
    return members.size() == 1 || std::ranges::all_of(members, [&](int member) {
             return places[static_cast<size_t>(member)][2 * number] >= 0;
           });
  });
}

void GradientBuckets::register_bucket(size_t number, std::optional<SharedArrays> shared) {
  const bool shrinks = compression_ && plan_.buckets[number].dtype == DType::kFloat32;
  const Codec codec = shrinks ? Codec(*compression_) : Codec();
  driver_->add_bucket(
      first_number_ + static_cast<int64_t>(number),
      {storage_, storage_->bucket(static_cast<int>(number)), plan_.buckets[number].bytes,
       plan_.buckets[number].dtype, reduction_, codec,
       label_of_bucket(plan_.buckets[number], gradients_, number), group_, std::move(shared)});
}

// Counters go once all members of the host have left them: others may look at them after this one
// has dropped its buckets. Those that were told of and then not used are kept for good.
GradientBuckets::~GradientBuckets() {
  for (size_t i = 0; i < plan_.buckets.size(); ++i) {
    try {
      driver_->remove_bucket(first_number_ + static_cast<int64_t>(i));
    } catch (...) {  // a forked child, or a broken transport: nothing to give back to
      new auto(std::move(own_counters_));
      return;
    }
    if (i < counters_.size() && counters_[i]) {
      counters_[i].left().fetch_add(1, std::memory_order_release);
    }
    if (i >= own_counters_.size() || !window_) continue;
    const SharedCounters own(own_counters_[i].get(), layout_->local_size());
    const auto all = static_cast<uint64_t>(layout_->local_size());
    const uint64_t needed = counters_.empty() ? std::numeric_limits<uint64_t>::max() : all;
    if (counters_.empty() || counters_[i]) {
      window_->free_once(std::move(own_counters_[i]), own.left(), needed);
    }
  }
}

void GradientBuckets::begin_round() {
  ready_.assign(gradients_.size(), false);
  rounds_.clear();
  for (const BucketLayout& bucket : plan_.buckets) {
    rounds_.push_back({static_cast<int>(bucket.gradients.size()), nullptr});
  }
}

void GradientBuckets::launch(int number) {
  driver_->refuse_joined();  // others may be reducing what is there
  const BucketLayout& layout = plan_.buckets[static_cast<size_t>(number)];
  for (const int index : layout.gradients) {
    storage_->set_produced(index, gradients_[static_cast<size_t>(index)].bytes(),
                           ready_[static_cast<size_t>(index)]);
  }
  rounds_[static_cast<size_t>(number)].work = driver_->launch_bucket(first_number_ + number);
}

void GradientBuckets::ready(int index) {
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
  if (--round.missing == 0) {
    launch(number);
    driver_->wake();
  }
}

// Without the lock while it waits: a signal handler may come in by the same thread.
std::vector<bool> GradientBuckets::wait(int64_t timeout_ns,
                                        const std::function<void()>& interrupted, bool for_good) {
  std::vector<std::shared_ptr<Work>> works;
  try {
    {
      std::lock_guard guard(mutex_);
      refuse_failed();
      for (size_t i = 0; i < rounds_.size(); ++i) {
        if (!rounds_[i].work) launch(static_cast<int>(i));
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
    produced[i] = storage_->is_produced(static_cast<int>(i));
  }
  begin_round();
  return produced;
}

void GradientBuckets::refuse_failed() const {
  if (failure_.empty()) return;
  throw MismatchError("these buckets cannot be used any more, make new ones: " + failure_);
}

}  // namespace ringdl
