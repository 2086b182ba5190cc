#include "engine/census.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"

namespace ringdl {
namespace {

// A count of this age is begun anew.
constexpr int64_t kFreshNs = kSecond / 2;

// A count that nobody keeps is forgotten after this time.
constexpr int64_t kForgetNs = 5 * kSecond;

// After this time without an answer, more members are asked. A waiting rank answers within some
// milliseconds, an idle one within a tenth of a second.
constexpr int64_t kAskMoreNs = 40 * kMillisecond;

// The standings of all members, two bits each, fit into a message. All of a larger group are asked.
constexpr int kMostMembers = 4 * (static_cast<int>(kMaxPayloadBytes) - 8);

// As the level of a question: only whether the receiver has submitted the key.
constexpr int kStandingOnly = -1;

// Of an answer, in MessageHead::flag.
constexpr uint8_t kSubmittedFlag = 1;
constexpr uint8_t kTakesPartFlag = 2;

}  // namespace

int Census::Count::offset_of(int rank) const {
  const int member = group->index_of(rank);
  return member < 0 ? 0 : (member - group->rank + group->size()) % group->size();
}

// A rank that is asked takes over the time of the beginning: else a question asked late, after a
// wait for a silent rank, would make all begin anew, again and again.
void Census::begin(const Key& key, const SharedGroup& group, int64_t patience, int64_t age,
                   int64_t now) {
  Count& count = counts_[key];
  count.touched_ns = now;
  if (count.group && now - age - count.begun_ns < kFreshNs) return;
  const auto size = static_cast<size_t>(group->size());
  count.group = group;
  count.begun_ns = now - age;
  count.patience_ns = patience;
  count.number = next_number_++;
  count.standings.resize(size, Standing::kUnknown);
  count.standings[static_cast<size_t>(group->rank)] = Standing::kSubmitted;
  count.members.assign(size, {});
  count.asked = count.passed = 0;
  count.ends.clear();
  count.pulled_ns = 0;
  if (size == 1) {
    count.ends.push_back(0);
    return;
  }
  advance(key, count, now);
}

void Census::release(const Key& key) {
  const auto found = counts_.find(key);
  if (found != counts_.end()) --found->second.kept;
}

std::vector<Standing> Census::standings(const Key& key) const {
  const auto found = counts_.find(key);
  return found == counts_.end() ? std::vector<Standing>() : found->second.standings;
}

void Census::note(Count& count, int member, Standing standing) {
  Standing& known = count.standings[static_cast<size_t>(member)];
  if (known != Standing::kSubmitted) known = standing;
}

void Census::ask(const Key& key, Count& count, int offset, int level, int64_t now) {
  MessageHead head;
  head.type = MessageType::kCount;
  head.key = key;
  head.sequence = count.number;
  head.tag = level;
  head.value = static_cast<uint64_t>(count.patience_ns);
  head.age_ms = static_cast<uint16_t>(
      std::clamp<int64_t>((now - count.begun_ns) / kMillisecond, 0, UINT16_MAX));
  control_.send(count.rank_at(offset), head);
  Member& member = count.members[static_cast<size_t>(offset)];
  if (member.asked_ns == 0) member.asked_ns = now;
}

void Census::ask_more(const Key& key, Count& count, int64_t now) {
  const int behind = count.asked - count.accounted();  // twice as many as before
  const int more = count.group->size() > kMostMembers ? count.last() : behind + 1;
  const int until = std::min(count.last(), count.asked + more);
  while (count.asked < until) ask(key, count, ++count.asked, kStandingOnly, now);
}

// Accounts for further members. Returns whether it has found one that takes part, or the last one.
bool Census::find_next(const Key& key, Count& count, int64_t now) {
  while (count.passed < count.last()) {
    const int offset = count.passed + 1;
    if (offset > count.asked) ask_more(key, count, now);
    const Member& member = count.members[static_cast<size_t>(offset)];
    if (member.has_answered && member.takes_part) {
      count.passed = offset;
      return true;
    }
    if (!member.has_answered && now - member.asked_ns < count.patience_ns) {
      const Member& newest = count.members[static_cast<size_t>(count.asked)];
      if (now - newest.asked_ns >= kAskMoreNs) ask_more(key, count, now);
      return false;
    }
    count.passed = offset;
  }
  return true;
}

// `passed` is beyond the members accounted for only while the next one that takes part is searched
// for; once that one has been asked what it has found, both are the same.
void Census::advance(const Key& key, Count& count, int64_t now) {
  while (!count.is_complete()) {
    if (count.pulled_ns == 0) {
      if (!find_next(key, count, now)) return;
      count.ends.push_back(count.passed);
      answer_held(key, count);
      if (count.is_complete()) return;
      count.pulled_ns = now;
      ask(key, count, count.accounted(), static_cast<int>(count.ends.size()) - 1, now);
      return;
    }
    if (now - count.pulled_ns < 2 * count.patience_ns + kAskMoreNs) return;
    // It no longer takes part, or has stopped: all others are asked.
    count.pulled_ns = 0;
    while (count.asked < count.last()) ask(key, count, ++count.asked, kStandingOnly, now);
  }
}

void Census::on_query(const ControlMessage& message, int64_t now) {
  const Key& key = message.head.key;
  const SharedGroup group = owner_.group_in_flight(key);
  const Held from{message.from, message.head.sequence, message.head.tag};
  if (group) {
    begin(key, group, static_cast<int64_t>(message.head.value), message.head.age_ms * kMillisecond,
          now);
  }
  const auto found = counts_.find(key);
  Count* const count = group ? &found->second : nullptr;
  const bool is_there = count == nullptr || from.level == kStandingOnly || count->is_complete() ||
                        static_cast<int>(count->ends.size()) > from.level;
  if (!is_there) {
    count->held.push_back(from);
    return;
  }
  static const Count none;
  answer(key, count == nullptr ? none : *count, from);
}

void Census::answer(const Key& key, const Count& count, const Held& to) {
  MessageHead head;
  head.type = MessageType::kCounted;
  head.key = key;
  head.sequence = to.number;
  head.tag = to.level;
  if (!owner_.is_ahead(key)) head.flag |= kSubmittedFlag;
  const bool takes_part = count.group && count.group->size() <= kMostMembers;
  if (takes_part) head.flag |= kTakesPartFlag;
  if (!takes_part || to.level == kStandingOnly) {
    control_.send(to.rank, head);
    return;
  }
  const auto level = static_cast<size_t>(to.level);
  head.value = static_cast<uint64_t>(level < count.ends.size() ? count.ends[level] : count.last());
  std::vector<uint8_t> bits((count.standings.size() + 3) / 4);
  for (size_t member = 0; member < count.standings.size(); ++member) {
    bits[member / 4] |=
        static_cast<uint8_t>(static_cast<unsigned>(count.standings[member]) << member % 4 * 2);
  }
  control_.send(to.rank, head, nullptr, bits.data(), bits.size());
}

void Census::answer_held(const Key& key, Count& count) {
  std::erase_if(count.held, [&](const Held& held) {
    if (!count.is_complete() && static_cast<int>(count.ends.size()) <= held.level) return false;
    answer(key, count, held);
    return true;
  });
}

void Census::on_answer(const ControlMessage& message, int64_t now) {
  const Key& key = message.head.key;
  const auto found = counts_.find(key);
  if (found == counts_.end() || !found->second.group) return;
  Count& count = found->second;
  const int offset = count.offset_of(message.from);
  if (offset == 0) return;
  const bool submitted = (message.head.flag & kSubmittedFlag) != 0;
  note(count, count.member_at(offset), submitted ? Standing::kSubmitted : Standing::kMissing);
  if (message.head.sequence == count.number) {
    Member& member = count.members[static_cast<size_t>(offset)];
    member.has_answered = true;
    member.takes_part = (message.head.flag & kTakesPartFlag) != 0;
    const auto level = static_cast<size_t>(message.head.tag);
    const bool is_awaited = message.head.tag != kStandingOnly && count.pulled_ns != 0 &&
                            level + 1 == count.ends.size() && offset == count.accounted();
    const size_t bytes = (count.standings.size() + 3) / 4;
    if (is_awaited && message.head.payload_bytes == bytes) {
      for (size_t other = 0; other < count.standings.size(); ++other) {
        const auto bits = std::to_integer<unsigned>(message.payload[other / 4]) >> other % 4 * 2;
        if ((bits & 3) != 0) note(count, static_cast<int>(other), static_cast<Standing>(bits & 3));
      }
      const int end = std::min(count.last(), offset + static_cast<int>(message.head.value));
      count.pulled_ns = 0;
      count.ends.push_back(end);
      count.passed = count.asked = end;
      answer_held(key, count);
      if (!count.is_complete()) {
        count.pulled_ns = now;
        ask(key, count, end, static_cast<int>(count.ends.size()) - 1, now);
      }
    } else if (is_awaited) {
      count.pulled_ns = 0;  // its work has ended: search for the next one
    }
  }
  advance(key, count, now);
  if (!submitted) owner_.on_missing(key, message.from);
}

void Census::on_left(const std::vector<int>& ranks, int64_t now) {
  for (auto& [key, count] : counts_) {
    if (!count.group || !owner_.group_in_flight(key)) continue;  // nobody wants to know any more
    for (const int rank : ranks) {
      const int offset = count.offset_of(rank);
      if (offset == 0 || count.members[static_cast<size_t>(offset)].asked_ns == 0) continue;
      const auto member = static_cast<size_t>(count.member_at(offset));
      if (count.standings[member] != Standing::kSubmitted) {
        ask(key, count, offset, kStandingOnly, now);
      }
    }
  }
}

void Census::check(int64_t now) {
  for (auto& [key, count] : counts_) {
    if (count.group) advance(key, count, now);
  }
  std::erase_if(counts_, [now](const auto& entry) {
    return entry.second.kept <= 0 && now - entry.second.touched_ns > kForgetNs;
  });
}

}  // namespace ringdl
