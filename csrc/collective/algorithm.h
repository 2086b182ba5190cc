#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "collective/collective.h"
#include "collective/host_layout.h"
#include "reduce/executor.h"
#include "transport/window.h"

namespace ringdl {

struct SharedArrays;
struct SlotCall;

/// How an allreduce is computed. The values travel in headers, so they never change.
enum class Algorithm : uint8_t {
  kRing = 0,
  kDoubling = 1,
  kMpi = 2,
  kDirect = 3,
  kHierarchical = 4,
  kNccl = 5
};

/// So many bytes travel as one message, however short segments are, where messages that follow one
/// another are what makes an algorithm slow.
inline constexpr size_t kOneMessageBytes = 16 << 10;

/// What an algorithm takes: for a step, in which a rank waits for another, and for a byte that
/// passes through a rank.
struct Cost {
  double step_seconds = 0;
  double byte_seconds = 0;
};

/// What an algorithm has to do: steps that follow one another, and bytes that pass through the
/// busiest rank or, between hosts, through the busiest link.
struct Effort {
  double steps;
  double bytes_moved;
};

/// What an allreduce is made from, whichever algorithm carries it out.
struct AllreduceArguments {
  Executor& executor;
  std::byte* data;  // `bytes` bytes, this rank's contribution and then the result
  size_t bytes;
  Reducer reducer;         // of two arrays
  ReduceMany reduce_many;  // of those of a host
  Codec codec;             // between hosts
  size_t segment_bytes;    // what travels and is reduced at once
  int rank;
  int size;
  const std::vector<int>& ranks;          // the transport's numbers
  const std::shared_ptr<Window>& window;  // null if this rank shares no memory
  const SharedLayout& layout;
  const SlotCall* slot_call = nullptr;   // where ranks of one host meet, if they do so in slots
  const SharedArrays* agreed = nullptr;  // where the arrays of this host are, if that is known,
  uint64_t instance = 0;                 // and how often these were used before
};

/// All that is to be known of an algorithm. Each is defined beside its state machine, and listed in
/// planner/algorithms.cc.
struct AllreduceAlgorithm {
  Algorithm id;
  std::string_view name;
  std::string_view ranks;  // that it is for, for people
  bool uses_agreed_memory = false;
  bool (*can_run)(const HostLayout& layout);
  /// The largest array that it is chosen for; null: it is never chosen, and has to be asked for.
  size_t (*most_bytes)(size_t segment_bytes);
  Effort (*effort)(double bytes, const HostLayout& layout);
  /// What it takes inside a host and between hosts, unless that was measured; 0: it is not run
  /// there. Measured on two cores of an AMD EPYC, and on simulated hosts with links of 1 Gbit/s.
  Cost inside;
  Cost between;
  std::unique_ptr<Collective> (*make)(const AllreduceArguments& arguments);
};

}  // namespace ringdl
