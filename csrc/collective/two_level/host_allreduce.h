#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/algorithm.h"
#include "collective/collective.h"
#include "collective/messages/bruck.h"
#include "collective/shared/in_memory.h"
#include "collective/shared/slot_allreduce.h"
#include "collective/sub_channel.h"
#include "collective/two_level/hierarchical_allreduce.h"
#include "reduce/executor.h"
#include "transport/window.h"

namespace ringdl {

/// Allreduce among ranks that share memory with the others of their hosts: those of a host tell one
/// another where their arrays are, in slots or by messages (Bruck), and reduce them there if all
/// are in shared memory, otherwise through stages; between hosts, around rings.
class HostAllreduce final : public Collective {
 public:
  /// The window may be null if there is no other rank on this host.
  explicit HostAllreduce(const AllreduceArguments& its);
  ~HostAllreduce() override;

  bool step(Channel& channel) override;

  /// The same without messages, where all ranks are on one host and meet in slots. After
  /// kElsewhere, as at any time before, step() goes on.
  Polled step_in_memory();

  int64_t pieces() const override;
  bool has_met(int rank) const override {
    return exchange_ && (chosen_ || exchange_->has_put(rank));
  }
  std::string describe() const override;

 private:
  // What a rank says of itself: offsets in its memory, or -1.
  struct Place {
    int64_t array = -1;
    int64_t stage = -1;
    int64_t counters = -1;  // of the first rank of a host
  };

  int size() const { return layout_->local_size(); }
  void find_places();
  bool meet(Channel& channel);
  Polled meet_in_slots();
  bool meet_by_messages(Channel& channel);
  bool send_places(Channel& channel);
  void choose();
  void leave();
  int local(int place) const { return layout_->local_ranks()[static_cast<size_t>(place)]; }
  int64_t place_of(const std::byte* data, size_t bytes) const;
  std::byte* at(int place, int64_t offset) const;

  Executor& executor_;
  const std::shared_ptr<Window> window_;
  const std::vector<int> ranks_;
  const SharedLayout layout_;
  std::byte* const data_;
  const size_t bytes_;
  const ReduceMany reduce_many_;
  const Reducer reducer_;
  const size_t segment_bytes_;
  const Codec codec_;
  const int rank_;  // on this host
  std::optional<SlotExchange> exchange_;
  std::vector<Place> places_;  // by place on the host
  std::optional<Bruck> places_by_messages_;
  SubChannel on_host_;
  std::shared_ptr<std::byte> stage_;
  std::shared_ptr<std::byte> counters_;  // on the first rank of a host; if alone, ordinary memory
  SharedCounters shared_;
  std::unique_ptr<Collective> chosen_;
  InMemory* in_memory_ = nullptr;  // chosen_, if it needs no messages
};

extern const AllreduceAlgorithm kDirectAlgorithm;
extern const AllreduceAlgorithm kHierarchicalAlgorithm;

}  // namespace ringdl
