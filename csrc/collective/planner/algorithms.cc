#include "collective/planner/algorithms.h"

#include "collective/device/library_allreduce.h"
#include "collective/messages/barrier.h"
#include "collective/messages/recursive_doubling.h"
#include "collective/messages/ring_allreduce.h"
#include "collective/two_level/host_allreduce.h"

namespace ringdl {
namespace {

// By the value of their ids.
constexpr const AllreduceAlgorithm* kAlgorithms[] = {
    &kRingAlgorithm,   &kDoublingAlgorithm,     &kMpiAlgorithm,
    &kDirectAlgorithm, &kHierarchicalAlgorithm, &kNcclAlgorithm,
};

}  // namespace

std::span<const AllreduceAlgorithm* const> algorithms() { return kAlgorithms; }

const AllreduceAlgorithm& algorithm_of(Algorithm id) {
  return *kAlgorithms[static_cast<size_t>(id)];
}

std::string_view name_of(Algorithm id) { return algorithm_of(id).name; }

}  // namespace ringdl
