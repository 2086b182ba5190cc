#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"

namespace ringdl {

/// Runs a collective with the ranks in another order: those of a host are consecutive, so that
/// messages between neighbours cross each host's link once.
///
/// Each rank first announces itself to the next one in that order with an empty message. So the
/// inner collective may rely on `agreed()`, and its promises about ranks that disagree hold here,
/// too.
class InOrder final : public Collective {
 public:
  /// @param order  the rank at each place, each rank once
  /// @param rank  this one
  /// @param inner  takes places for ranks
  InOrder(std::vector<int> order, int rank, std::unique_ptr<Collective> inner);

  bool step(Channel& channel) override;
  int64_t pieces() const override { return inner_->pieces(); }
  Gathered* gathered() override { return inner_->gathered(); }
  std::string describe() const override { return inner_->describe(); }

 private:
  class Places;

  const std::vector<int> order_;
  int place_ = 0;
  const std::unique_ptr<Collective> inner_;
  bool has_greeted_ = false;
  bool is_done_ = false;
};

}  // namespace ringdl
