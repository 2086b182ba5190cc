#include "engine/gradient_buckets.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "reduce/finite.h"

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
                                 const BucketMemory::ByMember& places, Reduction reduction,
                                 int64_t first_number, const SharedGroup& group,
                                 std::optional<DType> compression)
    : driver_(std::move(driver)),
      gradients_(std::move(gradients)),
      plan_(std::move(plan)),
      first_number_(first_number),
      memory_(std::move(memory)),
      storage_(memory_->storage()) {
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
        {memory_->bucket(i), memory_->bucket(i).get(), layout.bytes, layout.dtype, reduction,
         shrinks ? Codec(*compression) : Codec(), label_of_bucket(layout, gradients_, i), group,
         memory_->connect(i, places), memory_->on_device(i)});
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
  if (where().is_on_device()) on_device_ = std::vector<RoundOnDevice>(plan_.buckets.size());
}

bool GradientBuckets::packs() const {
  return where().is_on_device() && driver_->devices().packs(where().device);
}

void GradientBuckets::count_non_finite() {
  const std::lock_guard guard(mutex_);
  if (!where().is_on_device()) {
    counter_ = std::make_shared<uint64_t>(0);
    return;
  }
  if (!packs()) throw UsageError("a device without kernels does not count what is not finite");
  counter_ = driver_->devices().counter(where().device);
}

void GradientBuckets::launch(int number, bool is_awaited) {
  Round& round = rounds_[static_cast<size_t>(number)];
  is_packing_ = false;
  const auto its_fill = [this, number] { fill(number); };  // no larger: it would be allocated
  try {
    round.work = driver_->launch_bucket(first_number_ + number, its_fill, is_awaited);
  } catch (const MismatchError& error) {  // known before this rank has launched it
    note_failure(error);
    throw;
  } catch (const DeviceError& error) {
    note_failure(error);
    if (is_packing_) driver_->fail_bucket(first_number_ + number, failure_);
    throw;
  }
}

void GradientBuckets::fill(int number) {
  Arrival* const arrival = memory_->arrival(static_cast<size_t>(number));
  if (arrival != nullptr) {
    is_packing_ = true;
    pack(number);
    is_packing_ = false;
    for (auto& [stream, mark] : on_device_[static_cast<size_t>(number)].marks) {
      arrival->add(std::move(mark));
    }
  }
  for (const int index : plan_.buckets[static_cast<size_t>(number)].gradients) {
    const auto at = static_cast<size_t>(index);
    storage_.set_produced(index, ready_[at]);
    if (ready_[at]) continue;
    if (arrival != nullptr) {
      arrival->add_missing(gradient(index), gradients_[at].bytes());
    } else {
      cpu_executor().zero(gradient(index), gradients_[at].bytes());
    }
  }
}

// In the streams in which the sources were computed.
void GradientBuckets::pack(int number) {
  RoundOnDevice& round = on_device_[static_cast<size_t>(number)];
  const DType into = plan_.buckets[static_cast<size_t>(number)].dtype;
  try {
    for (const auto& [how, items] : round.sources) {
      const auto& [stream, from, scale] = how;
      driver_->devices().pack(where().device, stream, {from, into, scale, counter_.get()}, items);
      round.marks[stream] = driver_->devices().mark(where().device, stream);
    }
  } catch (const Error& error) {
    throw DeviceError(error.what());
  }
  round.sources.clear();
}

void GradientBuckets::note_failure(const Error& error) {
  if (failure_.empty()) failure_ = error.what();
}

bool GradientBuckets::ready(int index, void* stream, const std::optional<Source>& source) {
  driver_->refuse_shut_down();
  std::lock_guard guard(mutex_);
  refuse_failed();
  refuse_index("ready", index);
  if (ready_[static_cast<size_t>(index)]) {
    throw UsageError("gradient '" + gradients_[static_cast<size_t>(index)].name +
                     "' is ready already; call wait() before the next round");
  }
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  Round& round = rounds_[static_cast<size_t>(number)];
  if (round.work) {
    throw UsageError(
        "gradient '" + gradients_[static_cast<size_t>(index)].name +
        "' comes too late: its bucket has been in flight since a wait() that timed out");
  }
  if (source) refuse_source(index, source->dtype);
  mark(number, stream);
  if (where().is_on_device()) {
    note_source(index, stream, source);
  } else if (counter_) {
    const GradientSpec& spec = gradients_[static_cast<size_t>(index)];
    *counter_ +=
        ringdl::count_non_finite(spec.dtype, gradient(index), static_cast<size_t>(spec.count()));
  }
  ready_[static_cast<size_t>(index)] = true;
  if (--round.missing > 0) return false;
  launch(number, false);
  return true;
}

// Also of a gradient that is in its place, if it is to be counted.
void GradientBuckets::note_source(int index, void* stream, const std::optional<Source>& source) {
  if (!source && !counter_) return;
  const GradientSpec& spec = gradients_[static_cast<size_t>(index)];
  const int number = plan_.placements[static_cast<size_t>(index)].bucket;
  const Source from = source.value_or(Source{gradient(index), spec.dtype});
  on_device_[static_cast<size_t>(number)].sources[{stream, from.dtype, from.scale}].push_back(
      {from.data, source ? gradient(index) : nullptr, static_cast<size_t>(spec.count())});
}

void GradientBuckets::refuse_source(int index, DType dtype) const {
  const DType into = gradients_[static_cast<size_t>(index)].dtype;
  if (packs() && can_pack(dtype, into)) return;
  throw UsageError("ready(" + std::to_string(index) + "): the gradient is " +
                   std::string(name_of(into)) + ", and its buckets do not pack " +
                   std::string(name_of(dtype)) + " as that");
}

void GradientBuckets::refuse_index(const char* call, int index) const {
  if (index >= 0 && index < static_cast<int>(gradients_.size())) return;
  throw UsageError(std::string(call) + "(" + std::to_string(index) + "): there are " +
                   std::to_string(gradients_.size()) + " gradients");
}

// What a device cannot do any more fails on all ranks.
void GradientBuckets::mark(int number, void* stream) {
  if (!where().is_on_device()) return;
  try {
    on_device_[static_cast<size_t>(number)].marks[stream] =
        driver_->devices().mark(where().device, stream);
  } catch (const DeviceError& error) {
    failure_ = error.what();
    driver_->fail_bucket(first_number_ + number, failure_);
    throw;
  }
}

// Without the lock while it waits: a signal handler may enter in the same thread.
std::vector<bool> GradientBuckets::wait(int64_t timeout_ns,
                                        const std::function<void()>& interrupted, bool for_good,
                                        void* stream) {
  std::vector<std::shared_ptr<Work>> works;
  try {
    {
      std::lock_guard guard(mutex_);
      refuse_failed();
      for (size_t i = 0; i < rounds_.size(); ++i) {
        if (!rounds_[i].work) {
          mark(static_cast<int>(i), stream);
          launch(static_cast<int>(i), true);
        }
        works.push_back(rounds_[i].work);
      }
    }
    for (const auto& work : works) driver_->wait(work, timeout_ns, interrupted, for_good);
  } catch (const MismatchError& error) {
    std::lock_guard guard(mutex_);
    note_failure(error);
    throw;
  } catch (const DeviceError& error) {
    std::lock_guard guard(mutex_);
    note_failure(error);
    throw;
  }
  std::lock_guard guard(mutex_);
  std::vector<bool> produced(gradients_.size());
  for (size_t i = 0; i < produced.size(); ++i) {
    produced[i] = storage_.is_produced(static_cast<int>(i));
  }
  if (counter_) non_finite_ = std::exchange(*counter_, 0);
  begin_round();
  return produced;
}

void GradientBuckets::unpack(void* stream, std::span<const Target> targets, double scale) {
  const std::lock_guard guard(mutex_);
  refuse_failed();
  if (!packs()) throw UsageError("unpack(): these buckets unpack nothing");
  std::map<std::tuple<DType, DType>, std::vector<PackItem>> items;
  for (const Target& target : targets) {
    refuse_index("unpack", target.index);
    const GradientSpec& spec = gradients_[static_cast<size_t>(target.index)];
    items[{spec.dtype, target.dtype}].push_back(
        {gradient(target.index), target.data, static_cast<size_t>(spec.count())});
  }
  for (const auto& [dtypes, its] : items) {
    const auto& [from, to] = dtypes;
    driver_->devices().pack(where().device, stream, {from, to, scale}, its);
  }
}

void GradientBuckets::refuse_failed() const {
  if (failure_.empty()) return;
  throw MismatchError("these buckets cannot be used any more, make new ones: " + failure_);
}

}  // namespace ringdl
