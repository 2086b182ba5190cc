// Which algorithm carries an allreduce out.

#include <set>
#include <string_view>
#include <vector>

#include "check.h"
#include "collective/planner/algorithms.h"
#include "collective/planner/choice.h"
#include "collective/planner/plan.h"
#include "collective/shared/slots.h"

using namespace ringdl;

namespace {

const std::vector<std::vector<int>> kLayouts = {
    {0}, {0, 0}, {0, 1}, {0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 0, 1}, {0, 1, 1, 2, 2}};

// Headers name an algorithm by its id, and costs are kept by it.
void ids_are_places_in_the_list() {
  std::set<std::string_view> names;
  for (size_t i = 0; i < algorithms().size(); ++i) {
    CHECK(static_cast<size_t>(algorithms()[i]->id) == i);
    CHECK(name_of(algorithms()[i]->id) == algorithms()[i]->name);
    names.insert(algorithms()[i]->name);
  }
  CHECK(names.size() == algorithms().size());
}

void the_fastest_possible_one_is_chosen() {
  const CostModel costs = default_costs();
  for (const std::vector<int>& hosts : kLayouts) {
    const HostLayout layout = HostLayout::of(hosts, 0);
    for (const size_t segment_bytes : {size_t{1}, size_t{32} << 10, size_t{256} << 10}) {
      for (size_t bytes = 1; bytes <= size_t{1} << 32; bytes *= 2) {
        const Algorithm chosen = choose_allreduce(costs, bytes, layout, segment_bytes);
        CHECK(is_possible(chosen, bytes, layout, segment_bytes));
        for (const AllreduceAlgorithm* other : algorithms()) {
          if (!is_possible(other->id, bytes, layout, segment_bytes)) continue;
          CHECK(predicted_seconds(costs, chosen, bytes, layout) <=
                predicted_seconds(costs, other->id, bytes, layout));
        }
      }
    }
  }
}

// What has no cost where ranks are is not possible there, or would seem to take no time.
void what_is_possible_has_a_cost() {
  for (const std::vector<int>& hosts : kLayouts) {
    const HostLayout layout = HostLayout::of(hosts, 0);
    for (const AllreduceAlgorithm* algorithm : algorithms()) {
      if (!is_possible(algorithm->id, 1, layout, 1)) continue;
      const Cost& cost = layout.host_count() == 1 ? algorithm->inside : algorithm->between;
      CHECK(cost.step_seconds > 0 && cost.byte_seconds > 0);
    }
  }
}

void which_one_by_memory_and_size() {
  const auto choose = [](const std::vector<int>& hosts, size_t bytes) {
    return choose_allreduce(default_costs(), bytes, HostLayout::of(hosts, 0), 32 << 10);
  };
  CHECK(choose({0, 0, 0, 0}, 1 << 20) == Algorithm::kDirect);
  CHECK(choose({0, 0, 1, 1}, 1 << 20) == Algorithm::kHierarchical);
  CHECK(choose({0, 1, 2, 3}, 64) == Algorithm::kDoubling);
  CHECK(choose({0, 1, 2, 3}, 1 << 20) == Algorithm::kRing);
  for (const std::vector<int>& hosts : kLayouts) {
    CHECK(!is_possible(Algorithm::kMpi, 0, HostLayout::of(hosts, 0), 1));
  }
}

bool is(const Plan& plan, Meeting meeting, Algorithm algorithm) {
  return plan.meeting == meeting && plan.algorithm == algorithm;
}

void how_ranks_meet() {
  PlanningTable table;
  table.segment_bytes = 32 << 10;
  const HostLayout one = HostLayout::of({0, 0}, 0);
  const HostLayout two = HostLayout::of({0, 0, 1, 1}, 0);
  const size_t small = Slots::most_bytes(2);
  CHECK(is(plan_allreduce({small, {}, true}, one, table), Meeting::kArraysInSlots,
           Algorithm::kDirect));
  CHECK(is(plan_allreduce({small + 1, {}, true}, one, table), Meeting::kPlacesInSlots,
           Algorithm::kDirect));
  CHECK(is(plan_allreduce({small, {}, false}, one, table), Meeting::kHeaders, Algorithm::kDirect));
  CHECK(is(plan_allreduce({small, Algorithm::kRing, true}, one, table), Meeting::kHeaders,
           Algorithm::kRing));
  CHECK(is(plan_bucket(small, true, one, table), Meeting::kBeforehand, Algorithm::kDirect));
  CHECK(is(plan_bucket(small, true, two, table), Meeting::kBeforehand, Algorithm::kHierarchical));
  CHECK(is(plan_bucket(small, false, two, table), Meeting::kBeforehand, Algorithm::kRing));
  table.wanted = Algorithm::kRing;
  CHECK(is(plan_allreduce({small, {}, true}, one, table), Meeting::kHeaders, Algorithm::kRing));
  CHECK(is(plan_bucket(small, true, two, table), Meeting::kBeforehand, Algorithm::kRing));
  table.wanted = Algorithm::kHierarchical;  // which is not possible on one host
  CHECK(is(plan_allreduce({small + 1, {}, false}, one, table), Meeting::kHeaders,
           Algorithm::kDirect));
  CHECK(is(plan_bucket(small, true, one, table), Meeting::kBeforehand, Algorithm::kDirect));
}

}  // namespace

int main() {
  ids_are_places_in_the_list();
  the_fastest_possible_one_is_chosen();
  what_is_possible_has_a_cost();
  which_one_by_memory_and_size();
  how_ranks_meet();
  return check::report();
}
