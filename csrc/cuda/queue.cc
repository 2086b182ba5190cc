#include "cuda/queue.h"

#include "base/error.h"

namespace ringdl::cuda {

Queue::Queue(Device& device) : device_(device) {
  const Device::Current current(device_);
  RINGDL_CUDA(device_.functions(), StreamCreateWithPriority, &stream_, kStreamNonBlocking, 0);
}

Queue::~Queue() {
  try {
    const Device::Current current(device_);
    for (const Event event : events_) device_.functions().EventDestroy(event);
    for (const Recorded& each : recorded_) device_.functions().EventDestroy(each.event);
    device_.functions().StreamDestroy(stream_);
  } catch (const Error&) {  // the context is lost, and these with it
  }
}

Event Queue::take_event() {
  Event event = nullptr;
  if (events_.empty()) {
    RINGDL_CUDA(device_.functions(), EventCreate, &event, kEventDisableTiming);
  } else {
    event = events_.back();
    events_.pop_back();
  }
  return event;
}

// In one stream, so an event covers all that was asked for before it.
bool Queue::is_done(Ticket ticket) {
  if (ticket <= done_) return true;
  const Device::Current current(device_);
  if (recorded_.empty() || recorded_.back().covers < ticket) {
    const Event event = take_event();
    RINGDL_CUDA(device_.functions(), EventRecord, event, stream_);
    recorded_.push_back({last_, event});
  }
  while (!recorded_.empty()) {
    const Recorded& first = recorded_.front();
    const Result result = device_.functions().EventQuery(first.event);
    if (result == kNotReady) break;
    check(device_.functions(), result, "cuEventQuery");
    done_ = first.covers;
    events_.push_back(first.event);
    recorded_.pop_front();
  }
  return ticket <= done_;
}

}  // namespace ringdl::cuda
