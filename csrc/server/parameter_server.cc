#include "server/parameter_server.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "engine/backoff.h"
#include "server/remote_visit.h"
#include "server/visit.h"

namespace ringdl {
namespace {

// Calls `step` until it says true. Each time that it says false, somebody else is awaited; now and
// then it is to find out whether they have ended.
// @param help  called meanwhile
void wait_until(const std::function<bool(bool looks_for_dead)>& step,
                const std::function<std::string()>& why_not, const std::function<void()>& help,
                const ParameterServer::Patience& patience) {
  if (step(false)) return;
  const int64_t begin_ns = now_ns();
  int64_t looked_ns = begin_ns;
  Backoff backoff(false);
  while (!step(false)) {
    help();
    backoff.pause();
    const int64_t now = now_ns();
    if (now - begin_ns >= patience.timeout_ns) {
      if (step(true)) return;
      throw StallError(why_not());
    }
    if (now - looked_ns < 100 * kMillisecond) continue;
    looked_ns = now;
    if (step(true)) return;
    patience.interrupted();
  }
}

// Longer than messages that are sent without being asked for, and would be kept in any number.
constexpr size_t kLeastSegment = 64 << 10;

size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }

// Calls of other hosts, given up unless they have ended: their arrays are the caller's.
struct Calls {
  Driver& driver;
  std::vector<std::pair<int, std::shared_ptr<Work>>> works;  // with the members that they are to

  ~Calls() {
    for (const auto& [member, work] : works) try {
        driver.give_up(work, "the caller does not wait for it any more");
      } catch (...) {  // shut down: nothing reads or writes their arrays
      }
  }
};

// Calls under way that tell one member of a clock: if it does not answer, it is told no more, but
// the newest one once it does.
constexpr size_t kMostTold = 16;

}  // namespace

ParameterServer::ParameterServer(std::shared_ptr<Driver> driver, std::string name,
                                 SharedGroup group, DType dtype, size_t count, Update::Rule rule,
                                 int servers, bool ends_with_members)
    : driver_(std::move(driver)),
      name_{std::move(name), group},
      group_(std::move(group)),
      layout_(driver_->layout_of(*group_)),
      window_(driver_->window()),
      count_(count),
      shard_count_(divide_up(divide_up(count, static_cast<size_t>(servers)), kMultiple) *
                   kMultiple),
      rule_(rule),
      dtype_(dtype),
      servers_(servers),
      ends_with_members_(ends_with_members),
      process_(getpid()),
      segment_bytes_(std::max(driver_->segment_bytes(), kLeastSegment)),
      clocks_(std::make_shared<Clocks>(group_->size())) {
  if (!is_updatable(dtype)) {
    throw UsageError("a parameter server holds float32 or float64, not " +
                     std::string(name_of(dtype)));
  }
  for (int member = 0; member < group_->size(); ++member) {
    if (is_remote(member)) remote_.push_back(member);
  }
  if (!remote_.empty() && !driver_->has_threads()) {
    throw UsageError(
        "other hosts are answered by a thread in the background, for which this MPI has to offer "
        "MPI_THREAD_MULTIPLE: start MPI with it, or train on one host");
  }
  const bool has_shard = group_->rank < servers_;
  if (!remote_.empty() && has_shard) {
    stage_ = Buffer(shape_of(group_->rank).count * item_bytes(dtype_));
  }
  const size_t bytes = Board::kBytes + (has_shard ? Shard::bytes(shape_of(group_->rank)) : 0);
  memory_ = window_ ? window_->allocate(bytes) : allocate(bytes);
  if (!memory_) {
    throw OutOfMemory("no " + std::to_string(bytes >> 20) +
                      " MiB are left of the memory that the ranks of this host share, for a shard "
                      "of the parameters; train a smaller model, or with fewer ranks per host");
  }
  std::memset(memory_.get(), 0, bytes);
  if (window_) place_ = static_cast<int64_t>(*window_->offset_of(memory_.get(), bytes));
}

bool ParameterServer::is_forked() const { return getpid() != process_; }

ParameterServer::~ParameterServer() {
  if (is_forked()) return;      // it is its parent's
  if (boards_.empty()) return;  // nobody has seen its memory
  if (service_) {
    service_->leave();
    for (const int member : remote_) try {
        call(member, {.what = Request::What::kLeave});
      } catch (...) {  // shut down, as they are or will be
      }
  }
  for (const Board& board : boards_) board.left().fetch_add(1, std::memory_order_acq_rel);
  if (!window_) return;
  const std::atomic<uint64_t>& left = Board(memory_.get()).left();
  window_->free_once(std::move(memory_), left, static_cast<uint64_t>(layout_->local_size()));
}

bool ParameterServer::is_remote(int member) const {
  return !std::ranges::binary_search(layout_->local_ranks(), member);
}

Shard::Shape ParameterServer::shape_of(int member) const {
  const auto [begin, end] = part(member);
  return {dtype_, begin, end - begin, rule_};
}

std::pair<size_t, size_t> ParameterServer::part(int member) const {
  if (member >= servers_) return {count_, count_};
  const size_t begin = static_cast<size_t>(member) * shard_count_;
  return {std::min(count_, begin), std::min(count_, begin + shard_count_)};
}

void ParameterServer::connect(const std::vector<int64_t>& places) {
  for (const int member : layout_->local_ranks()) {
    const auto place = static_cast<uint64_t>(places.at(static_cast<size_t>(member)));
    std::byte* const memory = window_ ? window_->at(rank_of(member), place) : memory_.get();
    boards_.emplace_back(memory);
    clocks_->connect(member, boards_.back());
    if (member >= servers_) continue;
    shards_.emplace(member, Shard(memory + Board::kBytes, shape_of(member)));
  }
  if (remote_.empty()) return;
  const auto own = shards_.find(group_->rank);
  service_ = std::make_shared<ShardService>(
      ShardService::Place{clocks_, own == shards_.end() ? std::nullopt : std::optional(own->second),
                          memory_, window_, rank_of(group_->rank), remote_, segment_bytes_},
      group_->size(), std::move(stage_));
  driver_->open_box(name_, service_);
}

std::shared_ptr<Work> ParameterServer::call(int member, const Request& request,
                                            const std::vector<Piece>& pieces) {
  return driver_->call_box(
      name_, member,
      std::make_unique<RemoteVisit>(request, pieces, shape_of(member), segment_bytes_));
}

// All of them, unless one is named.
std::vector<int> ParameterServer::servers_or(std::optional<int> member) const {
  if (member) return {*member};
  std::vector<int> servers(static_cast<size_t>(servers_));
  std::iota(servers.begin(), servers.end(), 0);
  std::ranges::rotate(servers, servers.begin() + group_->rank % servers_);
  return servers;
}

// Of the shards those of other hosts are visited meanwhile; of this host's, this rank's first.
void ParameterServer::visit(const Request& request, const std::vector<Piece>& pieces,
                            const std::vector<int>& servers, const Patience& patience) {
  refuse_forked();
  look_for_failures();
  Calls calls{*driver_, {}};
  std::vector<Shard> here;
  for (const int member : servers) {
    if (const auto shard = shards_.find(member); shard != shards_.end()) {
      here.push_back(shard->second);
    } else {
      calls.works.emplace_back(member, call(member, request, pieces));
    }
  }
  Visit visit(here, pieces, rank_of(group_->rank), window_.get(), action_of(request));
  while (!visit.is_done()) {
    wait_until([&](bool looks_for_dead) { return visit.step(looks_for_dead); },
               [&] {
                 return "rank " + std::to_string(visit.awaited()) +
                        " has held a block of the parameters for " +
                        seconds_text(patience.timeout_ns) + "; was it stopped?";
               },
               [&] { help(); }, patience);
  }
  for (const auto& [member, work] : calls.works) {
    wait_for_answer(member, work, patience);
  }
}

// A block of this host may be held by a call that this process answers.
void ParameterServer::help() {
  look_for_failures();
  if (!service_) return;
  driver_->help();
  tell_late();
}

// Calls in this host's memory send nothing, by which they would notice.
void ParameterServer::look_for_failures() {
  if (!ends_with_members_) return;
  const int64_t now = now_ns();
  if (now - looked_ns_ < 100 * kMillisecond) return;
  looked_ns_ = now;
  driver_->help();
  driver_->refuse_failed(*group_);
}

void ParameterServer::refuse_forked() const {
  if (is_forked()) throw UsageError("a parameter server is used by the process that made it");
}

void ParameterServer::wait_for_answer(int member, const std::shared_ptr<Work>& work,
                                      const Patience& patience) {
  try {
    driver_->wait(work, patience.timeout_ns, patience.interrupted, false);
  } catch (const StallError&) {
    const std::string what = member < servers_ ? ", which has a shard of the parameters," : "";
    throw StallError("rank " + std::to_string(rank_of(member)) + what + " has not answered for " +
                     seconds_text(patience.timeout_ns) +
                     "; was it stopped, or another rank while it sent to that one?");
  }
}

void ParameterServer::fill(const std::vector<Piece>& pieces, int member, const Patience& patience) {
  visit({.what = Request::What::kFill}, pieces, {member}, patience);
}

void ParameterServer::push(const std::vector<Piece>& gradient, const Update& how,
                           const Patience& patience, std::optional<int> member) {
  visit({.what = Request::What::kPush, .update = how}, gradient, servers_or(member), patience);
}

void ParameterServer::fetch(const std::vector<Piece>& into, const Patience& patience,
                            std::optional<int> member) {
  visit({.what = Request::What::kFetch}, into, servers_or(member), patience);
}

void ParameterServer::pull(const std::vector<Piece>& parameters, double share,
                           const Patience& patience, std::optional<int> member) {
  visit({.what = Request::What::kPull, .share = share}, parameters, servers_or(member), patience);
}

void ParameterServer::set_clock(uint64_t steps) {
  refuse_forked();
  clocks_->set(group_->rank, steps);
  ++clocks_told_;
  for (const int member : remote_) tell(member);
}

void ParameterServer::end_clock(int member) {
  refuse_forked();
  clocks_->set(member, kEnded);
}

// Nobody who has ended has to be told.
void ParameterServer::tell(int member) {
  Told& told = told_[member];
  while (!told.calls.empty() && told.calls.front()->ended()) {
    const std::shared_ptr<Work> call = told.calls.front();
    told.calls.pop_front();
    if (call->state.load() == Work::State::kFailed && !has_ended(member)) call->failure.raise();
  }
  told.is_late = told.calls.size() >= kMostTold;
  if (told.is_late || has_ended(member)) return;
  const Request request{
      .what = Request::What::kClock, .clock = clock(group_->rank), .number = clocks_told_};
  told.calls.push_back(call(member, request));
}

void ParameterServer::tell_late() {
  for (auto& [member, told] : told_) {
    if (told.is_late) tell(member);
  }
}

void ParameterServer::flush_clock(const Patience& patience) {
  for (auto& [member, told] : told_) {
    while (told.is_late || !told.calls.empty()) {
      if (has_ended(member)) break;
      if (!told.calls.empty()) wait_for_answer(member, told.calls.front(), patience);
      if (told.is_late) {
        tell(member);
      } else {
        told.calls.pop_front();
      }
    }
  }
}

bool ParameterServer::has_ended(int member) const {
  if (member == group_->rank) return false;
  return is_remote(member) ? driver_->is_gone(rank_of(member))
                           : window_->has_ended(rank_of(member));
}

void ParameterServer::wait_for(uint64_t steps, const Patience& patience) {
  look_for_failures();
  int behind = 0;
  wait_until(
      [&](bool looks_for_dead) {
        for (behind = 0; behind < group_->size(); ++behind) {
          if (clock(behind) >= steps) continue;
          if (!looks_for_dead || !has_ended(behind)) return false;
          end_clock(behind);
        }
        return true;
      },
      [&] {
        return "rank " + std::to_string(rank_of(behind)) + " has pushed " +
               std::to_string(clock(behind)) + " steps, and this rank waits for " +
               std::to_string(steps) + " since " + seconds_text(patience.timeout_ns) +
               "; is it stuck, or has it no batch left?";
      },
      [&] { help(); }, patience);
}

}  // namespace ringdl
