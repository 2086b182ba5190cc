#include "server/parameter_server.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "engine/backoff.h"

namespace ringdl {
namespace {

// Calls `step` until it says true. Each time that it says false, somebody else is awaited; now and
// then it is to find out whether they have ended.
void wait_until(const std::function<bool(bool looks_for_dead)>& step,
                const std::function<std::string()>& why_not,
                const ParameterServer::Patience& patience) {
  if (step(false)) return;
  const int64_t begin_ns = now_ns();
  int64_t looked_ns = begin_ns;
  Backoff backoff(false);
  while (!step(false)) {
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

std::string seconds_text(int64_t ns) {
  std::string text = std::to_string(static_cast<double>(ns) / kSecond);
  return text.substr(0, text.find('.') + 2) + " s";
}

size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }

}  // namespace

ParameterServer::ParameterServer(std::shared_ptr<Driver> driver, SharedGroup group, DType dtype,
                                 size_t count, Update::Rule rule, int servers)
    : driver_(std::move(driver)),
      group_(std::move(group)),
      window_(driver_->window()),
      count_(count),
      shard_count_(divide_up(divide_up(count, static_cast<size_t>(servers)), 64) * 64),
      rule_(rule),
      dtype_(dtype),
      servers_(servers),
      process_(getpid()) {
  if (!is_updatable(dtype)) {
    throw UsageError("a parameter server holds float32 or float64, not " +
                     std::string(name_of(dtype)));
  }
  if (!window_ || driver_->layout_of(*group_)->host_count() > 1) {
    throw UsageError(
        "a parameter server is for ranks that share memory, and these are on several hosts, or "
        "share none");
  }
  if (group_->rank >= servers_) return;
  const auto [begin, end] = part(group_->rank);
  const Shard::Shape shape{dtype_, end - begin, group_->size(), rule_};
  const size_t bytes = Shard::bytes(shape);
  memory_ = window_->allocate(bytes);
  if (!memory_) {
    throw OutOfMemory("no " + std::to_string(bytes >> 20) +
                      " MiB are left of the memory that the ranks of this host share, for a shard "
                      "of the parameters; train a smaller model, or with fewer ranks per host");
  }
  std::memset(memory_.get(), 0, bytes);
  place_ = static_cast<int64_t>(*window_->offset_of(memory_.get(), bytes));
}

bool ParameterServer::is_forked() const { return getpid() != process_; }

ParameterServer::~ParameterServer() {
  if (is_forked()) return;  // it is its parent's
  for (const Shard& shard : shards_) shard.left().fetch_add(1, std::memory_order_acq_rel);
  if (!memory_) return;
  const auto& left = *reinterpret_cast<std::atomic<uint64_t>*>(memory_.get());
  window_->free_once(std::move(memory_), left, static_cast<uint64_t>(group_->size()));
}

std::pair<size_t, size_t> ParameterServer::part(int member) const {
  if (member >= servers_) return {count_, count_};
  const size_t begin = static_cast<size_t>(member) * shard_count_;
  return {std::min(count_, begin), std::min(count_, begin + shard_count_)};
}

void ParameterServer::connect(const std::vector<int64_t>& places) {
  for (int member = 0; member < servers_; ++member) {
    const auto [begin, end] = part(member);
    const int64_t place = places.at(static_cast<size_t>(member));
    if (place < 0) throw UsageError("all ranks have to agree on how many of them have shards");
    shards_.emplace_back(window_->at(rank_of(member), static_cast<uint64_t>(place)),
                         Shard::Shape{dtype_, end - begin, group_->size(), rule_});
  }
}

void ParameterServer::visit(std::vector<Piece> pieces, const Visit::Action& action,
                            const Patience& patience) {
  if (is_forked()) throw UsageError("a parameter server is used by the process that made it");
  Visit visit(shards_, shard_count_, std::move(pieces),
              static_cast<size_t>(group_->rank % servers_), rank_of(group_->rank), window_.get(),
              action);
  while (!visit.is_done()) {
    wait_until([&](bool looks_for_dead) { return visit.step(looks_for_dead); },
               [&] {
                 return "rank " + std::to_string(visit.awaited()) +
                        " has held a block of the parameters for " +
                        seconds_text(patience.timeout_ns) + "; was it stopped?";
               },
               patience);
  }
}

void ParameterServer::fill(const std::vector<Piece>& pieces, int member) {
  const auto [shard_begin, shard_end] = part(member);
  for (const Piece& piece : pieces) {
    const size_t begin = std::max(shard_begin, piece.begin);
    const size_t end = std::min(shard_end, piece.begin + piece.count);
    if (begin >= end) continue;
    const size_t item = item_bytes(dtype_);
    std::memcpy(shards_[static_cast<size_t>(member)].values(begin - shard_begin),
                piece.data + (begin - piece.begin) * item, (end - begin) * item);
  }
}

void ParameterServer::push(const std::vector<Piece>& gradient, const Update& how,
                           const Patience& patience) {
  visit(
      gradient,
      [&](const Shard& shard, size_t begin, std::byte* data, size_t count, bool is_last) {
        shard.update(how, begin, data, count, is_last);
      },
      patience);
}

void ParameterServer::fetch(const std::vector<Piece>& into, const Patience& patience) {
  visit(
      into,
      [&](const Shard& shard, size_t begin, std::byte* data, size_t count, bool) {
        std::memcpy(data, shard.values(begin), count * item_bytes(dtype_));
      },
      patience);
}

void ParameterServer::pull(const std::vector<Piece>& parameters, double share,
                           const Patience& patience) {
  visit(
      parameters,
      [&](const Shard& shard, size_t begin, std::byte* data, size_t count, bool) {
        pull_together(dtype_, share, shard.values(begin), data, count);
      },
      patience);
}

void ParameterServer::set_clock(int member, uint64_t steps) const {
  shards_[0].clock(member).store(steps, std::memory_order_release);
}

uint64_t ParameterServer::clock(int member) const {
  return shards_[0].clock(member).load(std::memory_order_acquire);
}

bool ParameterServer::has_ended(int member) const {
  return member != group_->rank && window_->has_ended(rank_of(member));
}

void ParameterServer::wait_for(uint64_t steps, const Patience& patience) const {
  int behind = 0;
  wait_until(
      [&](bool looks_for_dead) {
        for (behind = 0; behind < group_->size(); ++behind) {
          if (clock(behind) >= steps) continue;
          if (!looks_for_dead || !has_ended(behind)) return false;
          shards_[0].clock(behind).store(kEnded, std::memory_order_release);
        }
        return true;
      },
      [&] {
        return "rank " + std::to_string(rank_of(behind)) + " has pushed " +
               std::to_string(clock(behind)) + " steps, and this rank waits for " +
               std::to_string(steps) + " since " + seconds_text(patience.timeout_ns) +
               "; is it stuck, or has it no batch left?";
      },
      patience);
}

}  // namespace ringdl
