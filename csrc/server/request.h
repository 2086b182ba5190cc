#pragma once

#include <cstdint>
#include <type_traits>

#include "reduce/update.h"
#include "server/visit.h"

namespace ringdl {

/// What is to be done with shards: by a visit where they are reached, and by the first message of a
/// call where they are on another host.
struct Request {
  enum class What : uint8_t {
    kPush,   // a gradient is brought
    kFetch,  // the parameters are got
    kPull,   // parameters are brought, and got: see pull_together()
    kFill,   // parameters are brought, and are the shard from now on
    kClock,  // the caller has pushed so many steps
    kLeave,  // the caller makes no more calls
  };
  What what = What::kFetch;
  Update update = {};   // of kPush
  double share = 0;     // of kPull
  uint64_t clock = 0;   // of kClock
  uint64_t number = 0;  // of kClock: the caller's last one counts

  bool brings() const { return what == What::kPush || what == What::kPull || what == What::kFill; }
  bool gets() const { return what == What::kFetch || what == What::kPull; }
};
static_assert(std::is_trivially_copyable_v<Request>);

/// What a visit does for one that brings or gets.
Visit::Action action_of(const Request& request);

}  // namespace ringdl
