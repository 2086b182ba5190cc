#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/collective.h"
#include "collective/operations.h"
#include "collective/sub_channel.h"

namespace ringdl {

/// A collective of an array that lies on a device, by way of the host's memory, slab by slab: a
/// slab is copied to a place of a stage there, another collective is carried out on it, and its
/// result is copied back. While one slab is on its way between the ranks, the next ones are copied
/// in and the ones before out:
///
///     in         |  0  |  1  |  2  |  3  |
///     ranks            |  0  |  1  |  2  |  3  |
///     out                    |  0  |  1  |  2  |  3  |
///
/// What the last slab's collective gathers stays in the host's memory.
class Staged final : public Collective {
 public:
  /// `bytes` from `from` to `into`.
  struct Copy {
    std::byte* into;
    const std::byte* from;
    size_t bytes;
  };
  struct Slab {
    Copy in;   // made before its collective begins; nothing, where a rank only receives
    Copy out;  // made after it is done
  };
  /// The collective of a slab, which works on the stage.
  using Make = std::function<std::unique_ptr<Collective>(size_t slab)>;
  /// The two directions; both outlive this. The same one may do both.
  struct Copiers {
    Executor& in;
    Executor& out;
  };

  /// Whether arrays may be read and written by now. Asked until it is so.
  using MayBegin = std::function<bool()>;

  /// @param slabs  at least one; a slab's place in the stage is that of the one `places` before
  /// @param stage  kept as long as this; longer, if this ends before the collective that others see
  /// the stage in
  /// @throws what `make` throws for the first slab
  Staged(MayBegin may_begin, Copiers copiers, std::vector<Slab> slabs, size_t places,
         std::shared_ptr<void> stage, Make make, int rank, int size);

  /// Waits for what was asked of the device: it must not touch the stage any more.
  ~Staged() override;

  void prepare(Channel& channel) override;
  bool step(Channel& channel) override;
  int64_t pieces() const override;
  bool has_met(int rank) const override { return current_ > 0 || inner_->has_met(rank); }
  Gathered* gathered() override { return inner_->gathered(); }
  void stop() noexcept override { inner_->stop(); }
  std::string describe() const override;

 private:
  void ask_in();

  const MayBegin may_begin_;
  const Copiers copiers_;
  const std::vector<Slab> slabs_;
  const size_t places_;
  std::shared_ptr<void> stage_;  // null in the end
  const Make make_;
  SubChannel between_ranks_;           // after the slabs before
  std::unique_ptr<Collective> inner_;  // of the current slab, or the last one
  bool may_copy_ = false;
  bool has_begun_ = false;  // the current slab's collective
  size_t current_ = 0;
  int64_t moved_ = 0;                       // pieces of the slabs before
  std::vector<Executor::Ticket> in_, out_;  // by slab
};

}  // namespace ringdl
