#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"

namespace ringdl {

/// Runs a collective among ranks that are counted in another order: those of a host one after the
/// other, so that what goes from neighbour to neighbour crosses each host's link once.
///
/// Each rank first tells the next one in that order that it is there, with an empty message. The
/// inner collective may so count on `agreed()`, and what it promises about ranks that disagree
/// holds here, too.
class InOrder final : public Collective {
 public:
  /// @param order  the rank at each place, each rank once
  /// @param rank  this one
  /// @param inner  to which ranks are their places
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
