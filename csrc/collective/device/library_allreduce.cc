#include "collective/device/library_allreduce.h"

#include <array>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collective/algorithm.h"

namespace ringdl {
namespace {

using Member = DeviceLibrary::Member;

std::vector<int> numbers(int count) {
  std::vector<int> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::string why_not(int64_t state) {
  switch (state) {
    case Member::kMissing:
      return "has no NCCL (libnccl.so.2, 2.14 or later); `python -m ringdl doctor` says why";
    case Member::kOtherDevice:
      return "uses NCCL with another device already, and with one alone";
    default:
      return "has aborted NCCL, as a rank or a device had failed; call shutdown() and init()";
  }
}

}  // namespace

std::string why_no_library(std::span<const Member> members) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const std::string who = std::to_string(rank);
    if (members[rank].state != Member::kReady) {
      return "rank " + who + " " + why_not(members[rank].state);
    }
    for (size_t other = 0; other < rank; ++other) {
      if (members[other].device != members[rank].device) continue;
      return "ranks " + std::to_string(other) + " and " + who +
             " share a CUDA device, and NCCL needs one for each rank; take another algorithm, or "
             "start fewer ranks";
    }
  }
  return {};
}

LibraryAllreduce::LibraryAllreduce(DeviceLibrary& library, int device,
                                   const DeviceLibrary::Array& array, int rank, int size,
                                   MayBegin may_begin, bool is_asked_for, Fallback fallback)
    : library_(library),
      array_(array),
      rank_(rank),
      size_(size),
      may_begin_(std::move(may_begin)),
      fallback_(std::move(fallback)),
      here_(cpu_executor(), std::vector<size_t>(static_cast<size_t>(size), sizeof(Here)), rank,
            std::array{Here{library.member(device), is_asked_for ? 1 : 0}}.data()),
      messages_(numbers(size), rank) {}

bool LibraryAllreduce::step(Channel& channel) {
  if (!meet(channel)) return false;
  messages_.use(channel);
  if (otherwise_) return otherwise_->step(messages_);
  if (!take_turn()) return false;
  may_touch_ = may_touch_ || may_begin_();
  if (!may_touch_) return false;
  if (!ticket_) ticket_ = library_.call(turn_.number, turn_.id, array_);
  return ticket_ && library_.is_done(*ticket_);
}

bool LibraryAllreduce::meet(Channel& channel) {
  if (has_met_) return true;
  if (!here_.step(channel)) return false;
  messages_.begin(channel);
  std::vector<Member> members;
  bool all_ask_for_it = true;
  for (int rank = 0; rank < size_; ++rank) {
    Here its;
    std::memcpy(&its, here_.block(rank), sizeof its);
    members.push_back(its.member);
    all_ask_for_it = all_ask_for_it && its.is_asked_for != 0;
  }
  const std::string why_not = why_no_library(members);
  if (!why_not.empty()) {
    if (all_ask_for_it) throw UsageError(why_not);
    otherwise_ = fallback_();
  } else {
    if (rank_ == 0) turn_.id = library_.id();
    has_met_ = true;  // a number that is not used holds up those after it: see stop()
    if (rank_ == 0) turn_.number = library_.take_number();
    broadcast_.emplace(reinterpret_cast<std::byte*>(&turn_), sizeof turn_, 0, rank_, size_,
                       sizeof turn_);
  }
  has_met_ = true;
  return true;
}

bool LibraryAllreduce::take_turn() {
  has_turn_ = has_turn_ || broadcast_->step(messages_);
  return has_turn_;
}

// Once it has met, the others may be told its number, which is never used then.
void LibraryAllreduce::stop() noexcept {
  if (otherwise_) {
    otherwise_->stop();
  } else if (has_met_) {
    library_.abort();
  }
}

// The device moves without messages.
int64_t LibraryAllreduce::pieces() const {
  if (otherwise_) return otherwise_->pieces();
  return has_turn_ ? (ticket_ ? 1 : 0) : -1;
}

std::string LibraryAllreduce::describe() const {
  if (otherwise_) return otherwise_->describe();
  const std::string what = "nccl allreduce: ";
  if (!has_met_) return what + here_.describe();
  if (!has_turn_) return what + "waits for its number from rank 0";
  const std::string number = "call " + std::to_string(turn_.number);
  if (!may_touch_) return what + number + " waits for the array's stream";
  return what + number + (ticket_ ? " is on the device" : " waits for those before it");
}

namespace {

std::unique_ptr<Collective> refuse_array_of_cpu(const AllreduceArguments&) {
  throw UsageError(
      "NCCL reduces arrays on CUDA devices, and this one lies in the CPU's memory; take another "
      "algorithm");
}

}  // namespace

constinit const AllreduceAlgorithm kNcclAlgorithm = {
    .id = Algorithm::kNccl,
    .name = "nccl",
    .ranks = "ranks with a CUDA device of their own",
    .can_run = [](const HostLayout&) { return true; },
    .most_bytes = nullptr,
    .effort = [](double, const HostLayout&) { return Effort{0, 0}; },
    .inside = {},
    .between = {},
    .make = refuse_array_of_cpu};

}  // namespace ringdl
