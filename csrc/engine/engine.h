#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collective/choice.h"
#include "collective/codec.h"
#include "collective/host_layout.h"
#include "collective/shared_counters.h"
#include "collective/slots.h"
#include "engine/call.h"
#include "engine/channels.h"
#include "engine/control.h"
#include "engine/departures.h"
#include "engine/diagnosis.h"
#include "engine/matching.h"
#include "engine/trace.h"
#include "engine/waiting.h"
#include "engine/watchdog.h"
#include "engine/work.h"
#include "transport/host/window.h"
#include "transport/transport.h"

namespace ringdl {

struct EngineOptions {
  /// What travels and is reduced at once. The same on all ranks.
  size_t segment_bytes = 256 << 10;
  /// Messages of at most so many bytes travel as control messages; at most kMaxPayloadBytes.
  size_t inline_bytes = kMaxPayloadBytes;
  /// Every rank of this host can have a core of its own.
  bool may_spin = false;
  /// Any thread may call, and a progress thread moves works while nobody waits. Otherwise only the
  /// thread that made the engine may call.
  bool threads = true;
};

/// Moves the works of one rank. All ranks of a communicator have one.
///
/// Works are matched by key: a name, the number of an unnamed call among its kind, or a bucket and
/// its launch. Ranks may submit in any order. Each public member may be called by any thread (but
/// see EngineOptions::threads), takes the engine's lock, and raises UsageError after shutdown() and
/// in a forked child.
class Engine final : private Diagnosis::Host {
 public:
  /// Collective.
  explicit Engine(std::unique_ptr<Transport> transport, EngineOptions options = {});

  /// Stops the progress thread. Works still in flight are given up and their buffers no longer
  /// touched; call shutdown() before.
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Starts a work on `data` (count of `call.shape` elements), which must stay alive and unmoved
  /// until the work is released (Work::released, take_ended()), and be neither read nor written
  /// until it has ended; what is only sent (a broadcast's source, an allgather's block) may be
  /// read. The same holds for `call.output`.
  /// @throws UsageError  a root that is no rank, splits that do not fit, too many works in flight,
  /// or in shutdown()
  std::shared_ptr<Work> submit(const Call& call, void* data);

  /// Allreduce of an array by all ranks, unnamed and matched as in submit(), for callers that
  /// wait at once: spends a few microseconds on it.
  /// @param before_waiting  called before it waits for another thread, or longer than a moment for
  /// another rank
  /// @returns null if it is done; else a work as from submit()
  std::shared_ptr<Work> allreduce_now(
      const Call& call, void* data, const std::function<void()>& before_waiting = [] {});
  /// Whether all ranks share memory, so that this is faster than submit().
  bool has_slots() const { return slots_ != nullptr && !wanted_; }

  /// Instead of submit(), for a call that cannot be right: the call counts as made, so that this
  /// rank's later calls are matched as if it had been, and fails on all other ranks of its group.
  /// @param call  its kind, name and group; the rest is not looked at
  /// @param why  a sentence, which they get as MismatchError
  void refuse(const Call& call, const std::string& why);

  /// Has the progress thread take notice of works that nobody is going to wait for at once.
  void wake();

  /// Waits until the work has ended.
  /// @param timeout_ns  StallError after that; the work stays in flight and can be waited for again
  /// @param interrupted  called every 100 ms without the lock; may throw
  /// @param for_good  whether the diagnosis may count on the calling thread not to submit anything
  /// before the work has ended: not so if it goes on to other things after the timeout
  /// @throws MismatchError, StallError
  void wait(const std::shared_ptr<Work>& work, int64_t timeout_ns,
            const std::function<void()>& interrupted = {}, bool for_good = true);

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
  /// @param seen  returns once news() is another number
  std::optional<Stalled> wait_any(const std::vector<Awaited>& awaited, uint64_t seen);
  /// How often tell_news() was called, which has wait_any() return.
  uint64_t news() const { return news_.load(); }
  void tell_news() { ++news_; }

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
  /// Whether all members of a group share memory.
  bool shares_memory(const Group& group) const;
  const std::shared_ptr<Window>& window() const { return window_; }
  /// Memory that the ranks of this host see, if they share any and there is so much of it, else
  /// ordinary; of any content.
  /// @throws OutOfMemory; UsageError  in a forked child: that memory is its parent's
  std::shared_ptr<std::byte> allocate(size_t bytes);
  /// The hosts of a group. Without shared memory each rank is on one of its own.
  SharedLayout layout_of(const Group& group);

  /// All ranks, as a group.
  const SharedGroup& group_of_all_ranks() const { return all_; }

  /// Registers the bucket number `bucket`, which all members of the group register with the same
  /// arguments.
  /// `data` holds `bytes` bytes; `memory` keeps them alive, also after remove_bucket() for as long
  /// as messages are under way. `shared` says where the members of this host have theirs, if they
  /// share memory.
  void add_bucket(int64_t bucket, std::shared_ptr<const void> memory, void* data, size_t bytes,
                  DType dtype, Reduction reduction, Codec codec, const std::string& label,
                  const SharedGroup& group, std::optional<SharedArrays> shared = std::nullopt);
  /// Starts the next allreduce of the bucket; the one before must have ended.
  std::shared_ptr<Work> launch_bucket(int64_t bucket);
  /// Forgets the bucket, waiting for nothing; a work of it in flight fails on all ranks.
  void remove_bucket(int64_t bucket);
  /// The largest number that a bucket may have on this transport.
  int64_t max_bucket() const { return tag_layout_.buckets - 1; }

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
  void look();

  /// Changes the segment size of works submitted from now on. Collective in effect; call it before
  /// buckets are made.
  void set_segment_bytes(size_t bytes);
  /// What algorithms are chosen by from now on. Collective in effect.
  /// @param wanted  taken wherever it is possible and the call names none; else the fastest by the
  /// model
  void set_choice(const CostModel& model, std::optional<Algorithm> wanted);
  /// See EngineOptions::may_spin.
  void set_may_spin(bool may_spin);
  /// After how long a work in flight is told of on stderr (0: never), and whether all ranks then
  /// print what they have in flight.
  void set_watchdog(int64_t after_ns, bool dumps);

  /// Waits for the works in flight (an error of one of them is dropped), tells the others that this
  /// rank submits nothing more, and waits until all have told the same. Then the transport is
  /// closed. Idempotent.
  void shutdown(const std::function<void()>& interrupted = {});
  bool is_shut_down() const { return closed_.load(); }

  /// Ends at once, without the others: works in flight are given up, and their buffers no longer
  /// touched. Idempotent; does nothing in a forked child.
  void abandon();

  /// Ids of works that have ended and whose messages have left since the last call: their buffers
  /// may be let go. A failed work may still be sending from its buffer when wait() raises.
  std::vector<uint64_t> take_ended();

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

  // A tag of a failed work on which messages may still come.
  struct Drain final : public Completion {
    Engine& engine;
    KeyedChannel::OpenTag open;
    Key key;
    Buffer buffer;
    std::optional<Ticket> receive;
    Drain(Engine& its_engine, KeyedChannel::OpenTag tag, const Key& its_key)
        : engine(its_engine), open(tag), key(its_key) {}
    void ended(Ticket) override;
    void receive_next();
    bool done() const { return open.sent >= 0 && open.received >= open.sent; }
  };

  struct Bucket {
    std::shared_ptr<const void> memory;
    std::byte* data;
    size_t bytes;
    DType dtype;
    Reduction reduction;
    Codec codec;
    std::string label;
    SharedGroup group;
    std::optional<SharedArrays> shared;
    std::shared_ptr<Work> prepared;  // the next instance, with receives posted
    std::shared_ptr<Work> running;
    std::string failure;              // set once a work of it failed: it cannot be used any more
    uint64_t launched_elsewhere = 0;  // instances, as far as a joined rank is told
  };

  // From the call of join() until all ranks have made it.
  struct Joining {
    std::vector<std::shared_ptr<Work>> own;  // works that were in flight before
    std::vector<int64_t> entry;              // what the ranks meet with: the greatest came last
    std::shared_ptr<Work> meeting;
    uint64_t number = 0;      // of the meeting
    int64_t answered_ns = 0;  // when a call was answered last
    bool is_answering = false;
    std::vector<ControlMessage> queries;  // of the diagnosis, to be answered later
  };

  // A receive that names no rank.
  struct AnyReceive {
    std::shared_ptr<Work> work;  // what the caller waits for
    Call call;
    void* data;
    std::vector<SharedGroup> pairs;  // with each member; null for this rank
    std::shared_ptr<Work> message;   // once one has come
  };

  using Lock = std::unique_lock<std::mutex>;

  // MPI libraries take one message per look, or show it only at the next one: so many looks without
  // a message mean that there is none.
  static constexpr int kQuietPolls = 3;

  static bool in_forked_child();
  static void refuse_forked_child();
  void refuse_closed() const;
  void look_at_peers(int64_t now);
  Lock lock_for_call(const std::function<void()>& before_waiting = {});
  void note_submitter();
  void refuse_joined_unlocked() const;
  ChannelContext context(const SharedGroup& group);

  bool is_ahead(const Key& key) const override {
    return matching_.is_ahead(key) && !matching_.is_known_to_fail(key);
  }
  bool may_submit() const override;
  const std::vector<bool>& left() const override { return departures_->left(); }
  SharedGroup group_in_flight(const Key& key) const override {
    const auto found = in_flight_.find(key);
    return found == in_flight_.end() ? nullptr : found->second->group;
  }
  void fail_for_left(const Key& key, int left_rank) override;
  void tell_verdict(int to, const Key& key, const std::string& why) override {
    tell_failure(to, MessageType::kVerdict, key, {why, false, next_meeting()});
  }

  SharedLayout find_layout(const Group& group);
  Algorithm choose(size_t bytes, const HostLayout& layout) const;
  Description header_of(const Call& call, const HostLayout& layout) const;
  uint32_t inline_bytes() const;
  Key key_of(const Call& call, const Group& group);
  std::shared_ptr<Work> make_work(const Description& description, const Key& key,
                                  const SharedGroup& group);
  std::shared_ptr<Work> submit_as(const Key& key, const Call& call, const Description& description,
                                  void* data, std::shared_ptr<const void> memory);
  void start(const std::shared_ptr<Work>& work);
  bool step(const std::shared_ptr<Work>& work);
  void touch(Work& work);
  void prepare_bucket(int64_t number, Bucket& bucket);
  std::unique_ptr<Collective> make_bucket_collective(const Bucket& bucket, uint64_t instance);
  void finish(const std::shared_ptr<Work>& work);
  void fail(const std::shared_ptr<Work>& work, const Failure& why);
  void release(Work& work);
  void record(const Work& work);
  static Trace::Event event_of(const Work& work, int64_t end_ns);
  int settle();
  int step_polled();

  int progress();
  void watch_over(int64_t now);
  std::string dump() const;
  void progress_in_background();
  std::string look_at_wait(Watch& watch, const Awaited& awaited, int64_t now) const;
  void progress_until(Lock& lock, const std::function<void()>& interrupted,
                      const std::function<bool()>& done, const std::function<void(int64_t)>& look);
  bool keyed_work_is_leaving() const;
  static void keep_for_good(std::shared_ptr<const void> memory);
  bool busy() const;
  bool is_time_to_poll();
  void stop_thread();
  void give_up() noexcept;

  void handle(const ControlMessage& message);
  void answer_query(const ControlMessage& message);
  void on_left(const std::vector<int>& ranks);
  void apply(Work& work, int from, const MessageHead& head, const Description& description,
             const std::byte* payload);
  void compare(Work& work, int from, const Description& theirs);
  void fail_key(const Key& key, const Failure& why, bool skip);
  void fail_everywhere(const Work& work, const Failure& why);
  void tell_failure(int to, MessageType type, const Key& key, const Failure& why);
  void check_previous_left(const std::shared_ptr<Work>& work);

  std::shared_ptr<Work> receive_from_any(const Call& call, void* data);
  int step_any_receives();
  bool find_message(AnyReceive& any);
  void fail_if_all_have_left(const Work& work);
  bool answers_later() const;

  std::shared_ptr<Work> launch(Bucket& bucket);
  void begin_join();
  bool all_have_joined(Joining& joining);
  const Work& awaited_in_join(const Joining& joining) const;
  void end_join();
  int answer_calls();
  void answer(const Matching::Header& header);
  SharedGroup find_group(uint64_t id) const;
  uint64_t next_meeting() const;
  void pass_next_in_slots();
  void tell_joined_ranks(const Work& work);
  void on_joined(int from, uint64_t meeting);
  void on_launched(const Key& key);

  std::unique_ptr<Transport> transport_;
  std::shared_ptr<Window> window_;
  std::vector<int> hosts_;  // by rank; empty: each rank is on one of its own
  std::unordered_map<uint64_t, SharedLayout> layouts_;  // by group
  std::shared_ptr<std::byte> slots_memory_;
  std::shared_ptr<Slots> slots_;  // null unless all ranks share memory
  std::weak_ptr<Work> in_slots_;  // the last work that has put something there
  EngineOptions options_;
  CostModel costs_ = default_costs();
  std::optional<Algorithm> wanted_;
  const int rank_;
  const int size_;
  const SharedGroup all_;
  const std::thread::id maker_;

  mutable std::mutex mutex_;
  EngineCounters counters_;
  const TagLayout tag_layout_;
  std::vector<TagPool> tags_;
  std::unique_ptr<ControlPlane> control_;
  Matching matching_;
  std::unordered_map<Key, std::shared_ptr<Work>, KeyHash> in_flight_;
  std::deque<std::shared_ptr<Work>> touched_;
  std::vector<std::shared_ptr<Work>> polled_;   // things happen to them without messages
  std::vector<std::shared_ptr<Work>> leaving_;  // ended, but messages of theirs have not
  std::vector<std::unique_ptr<Drain>> drains_;
  std::deque<AnyReceive> any_receives_;
  bool are_headers_new_ = false;  // some were parked since the receives looked last
  bool is_in_any_receives_ = false;
  int last_sender_ = -1;                 // the member that was received from last by one of them
  std::vector<ControlMessage> queries_;  // of the diagnosis, to be answered later
  std::map<int64_t, Bucket> buckets_;
  std::vector<uint64_t> ended_;
  std::unique_ptr<Departures> departures_;
  std::map<int, int> missed_;  // ranks without a process: at so many looks
  int64_t next_look_at_peers_ns_ = 0;
  std::map<uint64_t, SharedGroup> groups_;  // that this rank is, or was, a member of, by id
  std::shared_ptr<Joining> joining_;
  std::map<int, uint64_t> joined_;  // by rank: for which meeting, of those that may still wait
  std::unique_ptr<Diagnosis> diagnosis_;
  std::unique_ptr<Watchdog> watchdog_;
  bool answers_allreduces_only_ = false;
  bool watchdog_dumps_ = false;
  Trace trace_;
  int dumps_done_ = 0;  // of those that a signal asked for

  uint64_t next_id_ = 1;
  int64_t inline_works_ = 0;
  int waiters_ = 0;
  int64_t waiter_looked_ns_ = 0;  // when one of them last looked
  bool shutting_down_ = false;
  std::thread::id shuts_down_;
  std::optional<std::thread::id> submitter_;  // the first thread that did,
  bool one_submitter_ = true;                 // and whether it is the only one
  int64_t works_ended_ = 0;
  int64_t common_works_ended_ = 0;  // of all ranks
  int64_t works_before_join_ = 0;   // so many of them, when all ranks last joined
  int quiet_polls_ = 0;             // since the last message
  int64_t polls_ = 0;
  int64_t next_poll_ns_ = 0;  // of a caller that awaits no message
  int64_t wait_ns_ = 0;
  std::atomic<bool> closed_ = false;
  std::atomic<uint64_t> news_ = 0;

  std::condition_variable wake_;
  bool awake_ = false;
  bool stopping_ = false;
  std::string broken_;  // what the transport said when it failed in the background
  std::thread thread_;
};

/// Has every engine of this process print its works in flight to stderr, a line each, when it next
/// looks: within a tenth of a second where it has a progress thread. Safe in a signal handler.
void request_dumps();

/// An engine that a forked child leaves alone: the threads and messages are its parent's, and even
/// to destroy the locks that they hold would wait for them.
std::shared_ptr<Engine> make_engine(std::unique_ptr<Transport> transport, EngineOptions options);

}  // namespace ringdl
