#include "simulation/executor.h"

#include <algorithm>

namespace ringdl {

Executor::Ticket SimulatedExecutor::spend(size_t bytes, double bytes_per_second) {
  network_.compute(rank_,
                   static_cast<int64_t>(static_cast<double>(bytes) / bytes_per_second * kSecond));
  return kDone;
}

Executor::Ticket SimulatedExecutor::copy(std::byte* into, const std::byte* from, size_t bytes,
                                         bool streams) {
  if (its_.computes) cpu_executor().copy(into, from, bytes, streams);
  return spend(bytes, its_.copy_bytes_per_second);
}

Executor::Ticket SimulatedExecutor::zero(std::byte* into, size_t bytes) {
  if (its_.computes) cpu_executor().zero(into, bytes);
  return spend(bytes, its_.copy_bytes_per_second);
}

Executor::Ticket SimulatedExecutor::combine(const Reducer& reducer, std::byte* into,
                                            const std::byte* from, size_t bytes) {
  if (its_.computes) cpu_executor().combine(reducer, into, from, bytes);
  return spend(bytes, its_.reduce_bytes_per_second);
}

Executor::Ticket SimulatedExecutor::finish(const Reducer& reducer, std::byte* into,
                                           const std::byte* from, size_t bytes) {
  if (its_.computes) cpu_executor().finish(reducer, into, from, bytes);
  return spend(bytes, its_.reduce_bytes_per_second);
}

Executor::Ticket SimulatedExecutor::reduce(const ReduceMany& reduce_many,
                                           std::span<const std::byte* const> sources,
                                           std::span<std::byte* const> targets, size_t bytes,
                                           bool streams) {
  if (its_.computes) cpu_executor().reduce(reduce_many, sources, targets, bytes, streams);
  // A copy reads an array and writes one, an addition reads two and writes one: so what each takes
  // says what reading and writing do, where memory is the limit, and what is left is adding.
  const double copy = 1 / its_.copy_bytes_per_second;
  const double add = 1 / its_.reduce_bytes_per_second;
  const double read = std::clamp(add - copy, 0.0, copy);
  const double write = copy - read;
  const double compute = std::max(0.0, add - 2 * read - write);
  const auto count = static_cast<double>(sources.size());
  const auto into = static_cast<double>(targets.size());
  return spend(bytes, 1 / (count * read + into * write + (count - 1) * compute));
}

Executor::Ticket SimulatedExecutor::pack(const Codec& codec, std::byte* wire,
                                         const std::byte* array, size_t bytes) {
  if (its_.computes) cpu_executor().pack(codec, wire, array, bytes);
  return spend(bytes, its_.copy_bytes_per_second);
}

Executor::Ticket SimulatedExecutor::unpack(const Codec& codec, std::byte* array,
                                           const std::byte* wire, size_t bytes) {
  if (its_.computes) cpu_executor().unpack(codec, array, wire, bytes);
  return spend(bytes, its_.copy_bytes_per_second);
}

}  // namespace ringdl
