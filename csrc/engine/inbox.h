#pragma once

#include <cstddef>
#include <vector>

#include "engine/control.h"
#include "engine/work.h"

namespace ringdl {

class Failures;
struct Parts;

/// What arrives, and what is done about it: control messages are handed to the parts, works are
/// compared with those of other ranks.
class Inbox {
 public:
  Inbox(Parts& parts, Failures& failures) : parts_(parts), failures_(failures) {}

  /// Takes what has arrived. @returns how many messages
  int poll();
  /// Whether the last polls have found no message. MPI libraries take one message per poll, or show
  /// it only at the next one, and the transport may look for some messages only at its fourth poll:
  /// so many polls without a message mean that there is none.
  bool is_quiet() const { return quiet_polls_ >= kQuietPolls; }
  static constexpr int kQuietPolls = 6;

  void handle(const ControlMessage& message);
  /// What another rank has sent for a work: its header, payload, a grant, or how much it has sent.
  void apply(Work& work, int from, const MessageHead& head, const Description& description,
             const std::byte* payload);

  /// Whether the diagnosis' questions have to wait: who asks concludes from what is missing, and
  /// where a message is awaited from any rank, its header may arrive after the question; and a
  /// call that has come to a box is answered in the same poll.
  bool answers_later() const;
  /// Answers those that had to wait, once they need not.
  void answer_put_off();
  void answer(const ControlMessage& query);

 private:
  void compare(Work& work, int from, const Description& theirs);

  Parts& parts_;
  Failures& failures_;
  std::vector<ControlMessage> queries_;  // put off
  int quiet_polls_ = 0;                  // since the last message
};

}  // namespace ringdl
