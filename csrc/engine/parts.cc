#include "engine/parts.h"

#include <algorithm>
#include <utility>

namespace ringdl {
namespace {

EngineOptions within_limits(EngineOptions options) {
  options.inline_bytes = std::min(options.inline_bytes, kMaxPayloadBytes);
  return options;
}

}  // namespace

Parts::Parts(std::unique_ptr<Transport> its_transport, EngineOptions its_options,
             const Clock& its_clock, ControlPlane::OnMessage on_message, Submitter& submitter,
             JoinSession::Owner& joining_owner, Diagnosis::Owner& diagnosis_owner)
    : clock(its_clock),
      transport(std::move(its_transport)),
      options(within_limits(its_options)),
      rank(transport->rank()),
      size(transport->size()),
      all(group_of_all(rank, size)),
      tags(transport->max_tag()),
      control(std::make_shared<ControlPlane>(*transport, std::move(on_message))),
      hosts(rank, size),
      planning(hosts, *options.executor, options.devices, options.segment_bytes,
               options.slab_bytes),
      works(*transport, *control, *options.executor, clock,
            [this](const Work& work, const Failure& why) {
              if (work.key.space == KeySpace::kBucket) buckets.on_end(work.key, why);
            }),
      buckets(works, matching, planning, tags),
      immediate(all, *options.executor, hosts, planning, matching, works, submitter),
      membership(*transport, *control, hosts),
      any_receives(works, matching, membership, submitter),
      mailbox(matching, membership, submitter),
      joining(works, matching, planning, buckets, hosts, *control, clock, joining_owner, all),
      diagnosis(diagnosis_owner, *transport, *control),
      watchdog(diagnosis, rank) {
  planning.set_segment_bytes(options.segment_bytes);
}

}  // namespace ringdl
