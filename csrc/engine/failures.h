#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/diagnosis.h"
#include "engine/failure.h"
#include "engine/membership.h"
#include "engine/wire.h"
#include "engine/work.h"
#include "engine/work_table.h"

namespace ringdl {

struct Parts;

/// The rules by which works fail: which ones, and on which ranks.
///
/// A work fails on all ranks of its group, or on none, so a rank that finds a reason notifies the
/// others. Works of groups that are not concerned go on.
class Failures final : public Diagnosis::Owner {
 public:
  explicit Failures(Parts& parts) : parts_(parts) {}

  /// The work of a key fails on this rank, now or once it is submitted.
  /// @param skip  if this rank never meant to submit it, it counts as submitted
  void fail(const Key& key, const Failure& why, bool skip);
  /// A work of this rank fails on all ranks of its group.
  void fail_everywhere(const Work& work, const Failure& why);
  /// A work that a device of this rank has broken fails on all ranks.
  void fail_broken(const WorkTable::Broken& broken);
  /// Notifies a rank, perhaps this one, that a key fails.
  /// @param type  kMismatch, or kVerdict: skip it
  void send(int to, MessageType type, const Key& key, const Failure& why);

  /// A rank is no more: what it takes part in fails.
  void fail_rank(const Membership::Failed& failed);
  /// Finds such ranks, now and then, and notifies the others.
  void find_failed_ranks(int64_t now_ns);

  /// These ranks submit nothing more: works that need them fail, if they were not submitted there.
  void on_left(const std::vector<int>& ranks);
  /// The same for one work that has begun.
  void check_previous_left(const std::shared_ptr<Work>& work);
  /// The same for a receive that names no sender, where no rank is left that could send.
  void check_senders(const Work& work);

  bool is_ahead(const Key& key) const override;
  const std::vector<bool>& left() const override;
  SharedGroup group_in_flight(const Key& key) const override;
  void fail_for_left(const Key& key, int left_rank) override;
  void send_verdict(int to, const Key& key, const std::string& why) override;

 private:
  Parts& parts_;
};

}  // namespace ringdl
