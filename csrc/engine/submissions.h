#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine/call.h"
#include "engine/join_session.h"
#include "engine/work.h"

namespace ringdl {

class Failures;
class Inbox;
struct Parts;

/// How calls and buckets become works in flight.
class Submissions final : public JoinSession::Owner {
 public:
  Submissions(Parts& parts, Inbox& inbox, Failures& failures)
      : parts_(parts), inbox_(inbox), failures_(failures) {}

  /// @throws UsageError  as many works are in flight as there may be
  void refuse_many() const;
  /// See Driver.
  std::shared_ptr<Work> submit(const Call& call, void* data);
  void refuse(const Call& call, const std::string& why);
  std::shared_ptr<Work> launch_bucket(int64_t number);

  Key next_key(const Call& call, const Group& group) override;
  Description header_of(const Call& call) override;
  uint32_t inline_bytes() const override;
  std::shared_ptr<Work> submit_as(const Key& key, const Call& call, const Description& description,
                                  void* data, std::shared_ptr<const void> memory) override;
  std::shared_ptr<Work> submit_begun(const Key& key, const Description& description,
                                     const SharedGroup& group,
                                     std::unique_ptr<Collective> collective,
                                     std::shared_ptr<const void> memory) override;
  void send_failure(int to, MessageType type, const Key& key, const Failure& why) override;
  void launch_bucket_for_others(int64_t number) override { launch_bucket(number); }

 private:
  void begin(const std::shared_ptr<Work>& work);

  Parts& parts_;
  Inbox& inbox_;
  Failures& failures_;
};

}  // namespace ringdl
