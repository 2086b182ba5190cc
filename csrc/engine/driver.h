#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/mapped_file.h"
#include "bucket/plan.h"
#include "engine/engine.h"
#include "reduce/device_library.h"

namespace ringdl {

/// An engine that threads may call and wait for.
///
/// Works are matched by key: a name, the number of an unnamed call among its kind, or a bucket and
/// its launch. Ranks may submit in any order. Each public member may be called by any thread (but
/// see the constructor), takes the lock, and raises UsageError after shutdown() and in a forked
/// child.
class Driver {
 public:
  /// Collective.
  /// @param threads  any thread may call, and a progress thread moves works while nobody waits.
  /// Otherwise only the thread that made this may call
  explicit Driver(std::unique_ptr<Transport> transport, EngineOptions options = {},
                  bool threads = true);

  /// Stops the progress thread. Works still in flight are given up and their buffers no longer
  /// touched; call shutdown() before.
  ~Driver();

  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  int rank() const { return engine_.rank(); }
  int size() const { return engine_.size(); }

  /// Starts a work on `data` (count of `call.shape` elements), which must stay alive and unmoved
  /// until the work is released (Work::released, take_ended()), and be neither read nor written
  /// until it has ended; what is only sent (a broadcast's source, an allgather's block) may be
  /// read. The same holds for `call.output`.
  /// @param is_named  whether take_ended() names it
  /// @throws UsageError  a root that is no rank, splits that do not fit, too many works in flight,
  /// or in shutdown()
  std::shared_ptr<Work> submit(const Call& call, void* data, bool is_named = true);

  /// Allreduce of an array by all ranks, unnamed and matched as in submit(), for callers that
  /// wait at once: spends a few microseconds on it.
  /// @param before_waiting  called before it waits for another thread, or longer than a moment for
  /// another rank
  /// @returns null if it is done; else a work as from submit()
  std::shared_ptr<Work> allreduce_now(
      const Call& call, void* data, const std::function<void()>& before_waiting = [] {});

  /// Instead of submit(), for a call that cannot be right: the call counts as made, so that this
  /// rank's later calls are matched as if it had been, and fails on all other ranks of its group.
  /// @param call  its kind, name and group; the rest is not looked at
  /// @param why  a sentence, which they get as MismatchError
  void refuse(const Call& call, const std::string& why);

  /// Whether what the calling thread submits counts as submitted by another one, which waits for it
  /// in a framework meanwhile: autograd and TensorFlow have threads of their own. So the diagnosis
  /// goes on to know who may submit something. For a scope.
  /// @returns  what it was before
  static bool submit_for_caller(bool does);

  /// Has the progress thread take notice of works that nobody is going to wait for at once.
  void wake();

  /// Waits until the work has ended.
  /// @param timeout_ns  StallError after that; the work stays in flight and can be waited for again
  /// @param interrupted  called every 100 ms without the lock; may throw
  /// @param for_good  whether the diagnosis may count on the calling thread not to submit anything
  /// before the work has ended: not so if it goes on to other things after the timeout
  /// @throws MismatchError, StallError, RankFailedError
  void wait(const std::shared_ptr<Work>& work, int64_t timeout_ns,
            const std::function<void()>& interrupted = {}, bool for_good = true);

  /// For a caller that cannot keep its buffer: a work that has not ended fails on all ranks. When
  /// this returns nothing reads or writes its buffer.
  /// @param why  what the others get to know
  void give_up(const std::shared_ptr<Work>& work, const std::string& why);

  /// A work that a thread waits for among others.
  struct Awaited {
    std::shared_ptr<Work> work;
    int64_t begin_ns;  // of the wait for it
    int64_t timeout_ns;
  };
  struct Stalled {
    size_t index;
    std::string why;
  };
  /// Waits until one of these works has ended, there is news, or the time of one is over: which,
  /// and what StallError would say of it.
  /// @param seen  returns once notifications() is another number
  std::optional<Stalled> wait_any(const std::vector<Awaited>& awaited, uint64_t seen);
  /// How often notify() was called, which has wait_any() return.
  uint64_t notifications() const { return notifications_.load(); }
  void notify() { ++notifications_; }

  /// Waits for some milliseconds at most, in which nobody looks whether something is wrong.
  /// @returns whether the work has ended well
  bool wait_briefly(const std::shared_ptr<Work>& work);

  /// Has the diagnosis forget which threads have submitted something: for init(), whose caller need
  /// not be the thread that works.
  void forget_submitters();

  /// Has ranks that share memory reduce arrays there. Collective in effect; call it before anything
  /// is in flight, on all ranks or on none, with new windows, from which nothing was allocated,
  /// that reach the same ranks both ways.
  /// @param window  reaches the ranks of this one's host; may be null if there is no other
  /// @param hosts  the number of each rank's host; a rank that shares no memory is on one of its
  /// own. The same on all ranks
  void set_window(std::shared_ptr<Window> window, std::vector<int> hosts);
  const std::shared_ptr<Window>& window() const { return engine_.parts().hosts.window(); }
  /// Memory that the ranks of this host see, if they share any and there is so much of it, else
  /// ordinary; of any content.
  /// @throws OutOfMemory; UsageError  in a forked child: that memory is its parent's
  std::shared_ptr<std::byte> allocate(size_t bytes);
  /// The hosts of a group. Without shared memory each rank is on one of its own.
  SharedLayout layout_of(const Group& group);

  /// Their executors are for the calls below that say so, which hold the lock.
  /// @throws UsageError  there are none
  DeviceExecutors& devices() const;
  /// See DeviceExecutors::reached().
  std::byte* reach_on(int device, const DevicePlace& place);
  /// What the others are told of this rank if buckets are to be reduced by another library, whose
  /// largest is given: see Planning::chooses_library(). Nothing, on all members, if they are not.
  std::optional<DeviceLibrary::Member> library_member(int device, const BucketLayout& largest,
                                                      const Group& group);

  /// All ranks, as a group.
  const SharedGroup& group_of_all_ranks() const { return engine_.parts().all; }

  /// Registers the bucket number `number`, which all members of its group register alike.
  /// @throws UsageError  the number is taken
  void add_bucket(int64_t number, BucketSpec spec);
  /// Starts the next allreduce of the bucket; the one before must have ended.
  /// @param fill  called before, once it is known that nobody else uses the bucket
  /// @param is_awaited  whether the caller waits at once; else the progress thread is woken
  /// @throws UsageError  this rank is in join(), so that others may be reducing what is there
  std::shared_ptr<Work> launch_bucket(int64_t number, const std::function<void()>& fill,
                                      bool is_awaited);
  /// Instead: it fails on all ranks, for a reason of this one.
  void fail_bucket(int64_t number, const std::string& why);
  /// Forgets the bucket, waiting for nothing; a work of it in flight fails on all ranks.
  void remove_bucket(int64_t number);
  /// The largest number that a bucket may have on this transport.
  int64_t max_bucket() const { return engine_.parts().buckets.most(); }

  /// Until all ranks have called this, takes part in whatever the others submit, as if this rank
  /// had nothing to add. Works that it has in flight end before it counts as come.
  /// @param timeout_ns  StallError after so long without a call to take part in; it goes on to
  /// answer calls, refuses calls of its own, and waits again if this is called again
  /// @returns  the rank that came last, the same everywhere: of those for which most works had been
  /// submitted until then, the highest
  /// @throws MismatchError  a rank has shut down instead
  int join(int64_t timeout_ns, const std::function<void()>& interrupted = {});
  /// Whether join() answers allreduces alone, and has all other calls fail: with no rows or zeros
  /// of a joined rank their results may not mean what the caller thinks. The same on all ranks.
  void set_join_answers_allreduces_only(bool only);
  /// A group that this rank is a member of: join() answers calls of those that are known, which are
  /// kept for good.
  void know_group(const SharedGroup& group);
  /// @throws UsageError  this rank is in join()
  void refuse_joined();
  /// Looks once for what has happened, where no thread does so in the background.
  void poll();

  /// Whether works move while nobody waits.
  bool has_threads() const { return threads_; }
  /// Calls of other ranks that this one answers, by the progress thread if there is one: see
  /// Mailbox.
  void open_box(const BoxName& name, std::shared_ptr<Box> box);
  /// Puts a call in the box of another member. Waits for it may time out while others are answered,
  /// so pass `for_good = false` to wait().
  std::shared_ptr<Work> call_box(const BoxName& name, int to, std::unique_ptr<Collective> caller);
  /// For who waits for what others do unasked: polls once, and looks for ranks that have failed.
  void help();
  /// @throws RankFailedError  it is known that a member has failed
  void refuse_failed(const Group& group);
  /// Whether a rank answers no message any more.
  bool is_gone(int rank);
  /// What travels at once.
  size_t segment_bytes();

  /// Changes the segment size of works submitted from now on. Collective in effect; call it before
  /// buckets are made.
  void set_segment_bytes(size_t bytes);
  /// What algorithms are chosen by from now on. Collective in effect.
  /// @param wanted  taken wherever it is possible and the call names none; else the fastest by the
  /// model
  /// @param library_bytes  as Planning::choose_by()
  void set_choice(const CostModel& model, std::optional<Algorithm> wanted, size_t library_bytes);
  std::optional<Algorithm> wanted() const { return engine_.parts().planning.wanted(); }
  /// Whether every rank of this host can have a core of its own: then waits begin by spinning.
  void set_may_spin(bool may_spin);
  /// After how long a work in flight is told of on stderr (0: never), and whether all ranks then
  /// print what they have in flight.
  void set_watchdog(int64_t after_ns, bool dumps);

  /// Waits for the works in flight (an error of one of them is dropped), tells the others that this
  /// rank submits nothing more, and waits until all have told the same. Then the transport is
  /// closed. Idempotent.
  void shutdown(const std::function<void()>& interrupted = {});
  bool is_shut_down() const { return closed_.load(); }
  /// @throws UsageError  after shutdown()
  void refuse_shut_down() const;

  /// Ends at once, without the others: works in flight are given up, and their buffers no longer
  /// touched. Idempotent; does nothing in a forked child.
  void abandon();

  /// Ids of works that have ended and whose messages have left since the last call: their buffers
  /// may be let go. A failed work may still be sending from its buffer when wait() raises.
  std::vector<uint64_t> take_ended();

  /// Keeps the last works in a file from now on: see FlightRecorder.
  /// @throws Error  there can be no such file
  void start_flight_recorder(const std::string& path, const std::string& host,
                             const std::string& version);
  /// For who reads that file: this process ends by an error. Any thread, at any time.
  void note_end(const std::string& why);

  /// Records works and waits from now on.
  void start_trace();
  /// What has ended since the last call, and what has begun since and is in flight. Any thread,
  /// whatever MPI offers; nothing if nothing is recorded.
  std::vector<Trace::Event> take_trace();
  /// The end of it: what has ended since the last call.
  std::vector<Trace::Event> stop_trace();

  /// Counters since the start, by name.
  std::map<std::string, double> stats() const;

 private:
  class Watch;
  using Lock = std::unique_lock<std::mutex>;

  static bool in_forked_child();
  static void refuse_forked_child();
  void refuse_closed() const;
  Lock lock_for_call(const std::function<void()>& before_waiting = {});
  std::shared_ptr<Work> named(std::shared_ptr<Work> work);
  void note_submitter();
  bool may_submit() const;
  template <typename Step>
  bool poll_for_a_moment(Step step, size_t bytes, const std::function<void()>& before_waiting);
  bool is_time_to_poll();
  void watch_over(int64_t now_ns);
  void stop_thread();

  void progress_in_background();
  void progress_until(Lock& lock, const std::function<void()>& interrupted,
                      const std::function<bool()>& done, const std::function<void(int64_t)>& check);
  std::string check_wait(Watch& watch, const Awaited& awaited, int64_t now);
  void finish_works(Lock& lock, const std::function<void()>& interrupted);
  void warn_of_shutdown(const std::string& what, int64_t now_ns);

  mutable std::mutex mutex_;
  std::unique_ptr<MappedFile> flights_;  // where the engine's recorder writes
  Engine engine_;
  const bool threads_;
  const std::thread::id maker_;
  bool may_spin_ = false;

  int waiters_ = 0;
  int64_t waiter_polled_ns_ = 0;  // when one of them last looked
  int64_t wait_ns_ = 0;
  int64_t next_poll_ns_ = 0;  // of a caller that awaits no message
  bool shutting_down_ = false;
  std::thread::id shuts_down_;
  std::optional<std::thread::id> submitter_;  // the first thread that did,
  bool one_submitter_ = true;                 // and whether it is the only one
  int dumps_done_ = 0;                        // of those that a signal asked for
  std::atomic<bool> closed_ = false;
  std::atomic<uint64_t> notifications_ = 0;

  std::condition_variable wake_;
  bool awake_ = false;
  bool stopping_ = false;
  std::string broken_;  // what the transport said when it failed in the background
  std::thread thread_;
};

/// Has every engine of this process print its works in flight to stderr, a line each, when it is
/// polled next: within a tenth of a second where it has a progress thread. Safe in a signal
/// handler.
void request_dumps();

/// A driver that a forked child leaves alone: the threads and messages are its parent's, and even
/// to destroy the locks that they hold would wait for them.
std::shared_ptr<Driver> make_driver(std::unique_ptr<Transport> transport,
                                    EngineOptions options = {}, bool threads = true);

}  // namespace ringdl
