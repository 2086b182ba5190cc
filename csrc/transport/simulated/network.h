#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "transport/simulated/links.h"
#include "transport/transport.h"

namespace ringdl {

struct SimulatedNetworkOptions {
  /// The number of each rank's host; numbers from 0 on. Their count is that of the ranks.
  std::vector<int> hosts;
  /// As those of Links, like the next two.
  SimulatedLink link{125e6, 20 * kMicrosecond};
  SimulatedLink memory{8e9, kMicrosecond};
  int64_t message_ns = 500;
  /// Longer messages begin to travel once they are received, and after another latency.
  size_t eager_bytes = 16 << 10;
  /// If not 0: messages with different tags, or between different ranks, may overtake one another,
  /// as each takes up to twice the latency longer, by chance; and what ranks of a host write for
  /// one another is seen late now and then.
  uint64_t jitter_seed = 0;
  /// Payload from here stands for bytes that nobody has: only its size travels. Where there is
  /// such, so it is with all payload that is longer than any header.
  std::span<const std::byte> phantom;
};

/// A cluster in one process: what travels between its ranks takes time on a virtual clock, as Links
/// say.
///
/// The owner polls those ranks that awake() names, then moves the clock to the next event:
///
///     while (!done) { for (rank : network.awake()) engines[rank].poll(); network.advance(); }
///
/// Faults: a rank that is killed or paused is not named, and what was sent before arrives. What
/// passes a link that is cut waits until it is mended.
///
/// Threads: one.
class SimulatedNetwork {
 public:
  explicit SimulatedNetwork(SimulatedNetworkOptions options);
  ~SimulatedNetwork();
  SimulatedNetwork(const SimulatedNetwork&) = delete;
  SimulatedNetwork& operator=(const SimulatedNetwork&) = delete;

  int size() const;
  int hosts() const;
  const Clock& clock() const;
  /// A rank's end; once for each. The network outlives them.
  std::unique_ptr<Transport> transport(int rank);

  /// Ranks for which something has ended, or whose wake-up has come, each once. Not those that are
  /// dead or paused.
  std::vector<int> take_awake();
  /// Whether something has ended for a rank since it was polled.
  bool has_ended(int rank) const;
  /// Names a rank in take_awake() at some time.
  void wake_at(int rank, int64_t time_ns);
  /// A rank's processor is busy for so long: what it sends leaves later.
  void compute(int rank, int64_t duration_ns);
  /// When it is not busy any more; perhaps long ago.
  int64_t free_ns(int rank) const;
  /// For how long it has been busy so far, in all.
  int64_t busy_ns(int rank) const;
  /// Calls something at some time; what is asked for at the same time comes in that order.
  void call_at(int64_t time_ns, std::function<void()> what);
  /// Moves the clock to the next event, and lets all happen that happens then.
  /// @returns  false: nothing will ever happen
  bool advance();

  /// A process ends; `notice_ns` later the others know: see Transport::lost().
  void kill(int rank, int64_t notice_ns);
  bool is_alive(int rank) const;
  void pause(int rank);
  void resume(int rank);
  bool is_paused(int rank) const;
  void cut(int host);
  void mend(int host);
  /// A host's link is so many times slower from now on.
  void slow(int host, double times);

  /// Bytes that a host's link has carried away from it.
  uint64_t bytes_sent(int host) const;
  uint64_t messages_sent() const;

 private:
  class End;
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace ringdl
