#include "engine/departures.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "engine/group.h"

namespace ringdl {
namespace {

// Four children: seven hops between any two of 64 ranks, some of which poll ten times a second.
constexpr int kChildren = 4;

// Ranks that leave together do so within this; a neighbour just notified waits longer.
constexpr int64_t kTogetherNs = 50 * kMillisecond;
constexpr int64_t kOftenNs = 100 * kMillisecond;

// The most ranks that one message reports.
constexpr int kRanksPerMessage = 8 * static_cast<int>(kMaxPayloadBytes);

int parent_of(int rank) { return (rank - 1) / kChildren; }

bool is_below(int rank, int ancestor) {
  while (rank > ancestor) rank = parent_of(rank);
  return rank == ancestor;
}

}  // namespace

Departures::Departures(ControlPlane& control, int rank, int size)
    : control_(control),
      rank_(rank),
      size_(size),
      left_(static_cast<size_t>(size), false),
      reported_(left_),
      previous_has_reported_(are_neighbours(previous(), rank)) {
  const auto add = [&](int neighbour) {
    std::vector<bool> behind(left_.size());
    for (int other = 0; other < size; ++other) {
      behind[static_cast<size_t>(other)] =
          neighbour < rank ? !is_below(other, rank) : is_below(other, neighbour);
    }
    neighbours_.push_back({neighbour, std::move(behind), left_});
  };
  if (rank > 0) add(parent_of(rank));
  for (int child = kChildren * rank + 1; child <= kChildren * (rank + 1) && child < size; ++child) {
    add(child);
  }
}

bool Departures::are_neighbours(int a, int b) const {
  return size_ == 1 || (a > 0 && parent_of(a) == b) || (b > 0 && parent_of(b) == a);
}

void Departures::leave(int64_t now) {
  if (has_left(rank_)) return;
  std::vector<int> newly_left;
  learn({rank_}, now, newly_left);
  if (are_neighbours(rank_, next())) {
    for (Neighbour& neighbour : neighbours_) {
      if (neighbour.rank == next()) neighbour.due_ns = now;
    }
  } else {
    MessageHead head;
    head.type = MessageType::kLeaving;
    control_.send(next(), head);
  }
  check(now);
}

std::vector<int> Departures::on_leaving(const ControlMessage& message, int64_t now) {
  std::vector<int> newly_left;
  if (message.head.payload_bytes == 0) {
    previous_has_reported_ = true;
    if (!has_left(message.from)) newly_left.push_back(message.from);
    left_[static_cast<size_t>(message.from)] = true;
    return newly_left;
  }
  std::vector<int> ranks;
  for (int i = 0; i < 8 * static_cast<int>(message.head.payload_bytes); ++i) {
    const int rank = static_cast<int>(message.head.value) + i;
    if (rank < size_ && (std::to_integer<int>(message.payload[i / 8]) >> i % 8 & 1) != 0) {
      ranks.push_back(rank);
    }
  }
  for (Neighbour& neighbour : neighbours_) {
    if (neighbour.rank != message.from) continue;
    for (const int rank : ranks) neighbour.knows[static_cast<size_t>(rank)] = true;
  }
  learn(ranks, now, newly_left);
  check(now);
  return newly_left;
}

void Departures::learn(const std::vector<int>& ranks, int64_t now, std::vector<int>& newly_left) {
  for (const int rank : ranks) {
    const auto at = static_cast<size_t>(rank);
    if (!left_[at]) newly_left.push_back(rank);
    left_[at] = reported_[at] = true;
    for (Neighbour& neighbour : neighbours_) {
      if (neighbour.knows[at] || neighbour.is_pending) continue;
      neighbour.is_pending = true;
      neighbour.due_ns = std::max(now + kTogetherNs, neighbour.sent_ns + kOftenNs);
    }
  }
}

void Departures::check(int64_t now) {
  for (Neighbour& neighbour : neighbours_) {
    if (!neighbour.is_pending) continue;
    bool is_complete = true;
    for (size_t rank = 0; rank < left_.size(); ++rank) {
      is_complete &= reported_[rank] || neighbour.behind[rank];
    }
    if (is_complete || now >= neighbour.due_ns) notify(neighbour, now);
  }
  send_quiet();
}

// To the parent, once all children are quiet; the root notifies all.
void Departures::send_quiet() {
  const bool all_below_are = std::ranges::all_of(neighbours_, [this](const Neighbour& neighbour) {
    return neighbour.rank < rank_ || neighbour.is_quiet;
  });
  if (is_quiet_ || !all_below_are || !is_over() || !control_.idle()) return;
  is_quiet_ = true;
  if (rank_ == 0) {
    send_all_quiet();
  } else {
    MessageHead head;
    head.type = MessageType::kQuiet;
    control_.send(parent_of(rank_), head);
  }
}

void Departures::send_all_quiet() {
  are_all_quiet_ = true;
  MessageHead head;
  head.type = MessageType::kQuiet;
  for (const Neighbour& neighbour : neighbours_) {
    if (neighbour.rank > rank_) control_.send(neighbour.rank, head);
  }
}

void Departures::on_quiet(int from) {
  for (Neighbour& neighbour : neighbours_) {
    if (neighbour.rank != from || std::exchange(neighbour.is_quiet, true)) continue;
    if (from < rank_) {
      send_all_quiet();
    } else {
      send_quiet();
    }
  }
}

void Departures::notify(Neighbour& neighbour, int64_t now) {
  MessageHead head;
  head.type = MessageType::kLeaving;
  for (int begin = 0; begin < size_; begin += kRanksPerMessage) {
    const int end = std::min(size_, begin + kRanksPerMessage);
    std::vector<uint8_t> bits(static_cast<size_t>(end - begin + 7) / 8);
    bool has_more = false;
    for (int rank = begin; rank < end; ++rank) {
      const auto at = static_cast<size_t>(rank);
      if (!reported_[at]) continue;
      bits[static_cast<size_t>(rank - begin) / 8] |= static_cast<uint8_t>(1u << (rank - begin) % 8);
      has_more |= !neighbour.knows[at];
      neighbour.knows[at] = true;
    }
    head.value = static_cast<uint64_t>(begin);
    if (has_more) control_.send(neighbour.rank, head, nullptr, bits.data(), bits.size());
  }
  neighbour.is_pending = false;
  neighbour.sent_ns = now;
}

bool Departures::is_over() const {
  return previous_has_reported_ && std::ranges::find(reported_, false) == reported_.end() &&
         std::ranges::none_of(neighbours_, &Neighbour::is_pending);
}

std::string Departures::awaited() const {
  std::vector<int> missing;
  std::vector<int> untold;  // reported to have left on one of two ways only
  const auto first = std::ranges::find(left_, true) - left_.begin();
  for (int rank = 0; rank < size_; ++rank) {
    if (!has_left(rank)) {
      missing.push_back(rank);
    } else if (!reported_[static_cast<size_t>(rank)] ||
               (rank == previous() && !previous_has_reported_)) {
      untold.push_back(rank);
    }
  }
  if (!missing.empty()) {
    return first == rank_ ? ranks_text(missing) + ", which did not call it yet" : "";
  }
  const std::string here = ", on rank " + std::to_string(rank_);
  if (!untold.empty()) return "a message that " + ranks_text(untold) + " called it" + here;
  return is_over() ? "" : "its own messages to leave" + here;
}

}  // namespace ringdl
