#pragma once

#include <deque>
#include <vector>

#include "cuda/device.h"
#include "reduce/executor.h"

namespace ringdl::cuda {

/// A stream of ringdl's own on a device, whose operations have tickets: their numbers. An event is
/// recorded when a ticket is asked for that no event covers yet; so operations that nobody asks for
/// cost none.
class Queue {
 public:
  using Ticket = Executor::Ticket;

  explicit Queue(Device& device);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  Device& device() const { return device_; }
  Stream stream() const { return stream_; }

  /// Something was queued in the stream.
  Ticket add() { return ++last_; }
  Ticket last() const { return last_; }
  /// Whether it has been carried out.
  /// @throws DeviceError
  bool is_done(Ticket ticket);

 private:
  struct Recorded {
    Ticket covers;  // this operation and all before it
    Event event;
  };

  Event take_event();

  Device& device_;
  Stream stream_ = nullptr;
  std::vector<Event> events_;  // not in use
  std::deque<Recorded> recorded_;
  Ticket last_ = 0;
  Ticket done_ = 0;
};

}  // namespace ringdl::cuda
