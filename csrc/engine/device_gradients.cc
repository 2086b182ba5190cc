#include "engine/device_gradients.h"

#include <algorithm>

namespace ringdl {
namespace {

constexpr size_t kAlignment = 256;  // as drivers allocate

}  // namespace

DeviceGradients::DeviceGradients(Driver& driver, const BucketPlan& plan, int device)
    : driver_(driver), device_(device) {
  for (const BucketLayout& bucket : plan.buckets) {
    begins_.push_back(bytes_);
    bytes_ += (bucket.bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  memory_ = driver.devices().allocate(device, bytes_);
}

std::vector<int64_t> DeviceGradients::place() const {
  const DevicePlace place = driver_.devices().place_of(device_, memory_.get(), bytes_);
  return {place.words.begin(), place.words.end()};
}

bool DeviceGradients::reach(std::span<const std::vector<int64_t>> places) {
  for (const auto& words : places) {
    DevicePlace place;
    std::ranges::copy(words, place.words.begin());
    reached_.push_back(driver_.reach_on(device_, place));
  }
  return std::ranges::find(reached_, nullptr) == reached_.end();
}

std::vector<std::byte*> DeviceGradients::buckets(size_t number) const {
  std::vector<std::byte*> all;
  for (std::byte* const memory : reached_) all.push_back(memory + begins_[number]);
  return all;
}

}  // namespace ringdl
