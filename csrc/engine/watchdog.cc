#include "engine/watchdog.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"

namespace ringdl {
namespace {

constexpr int64_t kLookEveryNs = kSecond / 2;
constexpr int64_t kAnswerNs = kSecond;  // after which ranks count as silent
constexpr size_t kMostWorks = 10;       // the oldest: the others mostly wait for the same

}  // namespace

std::string Watchdog::check(const Works& works, int64_t now) {
  if (after_ns_ == 0 || now < next_check_ns_) return "";
  next_check_ns_ = now + std::min(kLookEveryNs, after_ns_ / 2);
  std::vector<const Work*> old;
  for (const auto& [key, work] : works) {
    if (now - work->begin_ns >= after_ns_) old.push_back(work.get());
  }
  const size_t kept = std::min(old.size(), kMostWorks);
  std::partial_sort(old.begin(), old.begin() + static_cast<std::ptrdiff_t>(kept), old.end(),
                    [](const Work* a, const Work* b) { return a->id < b->id; });
  const size_t others = old.size() - kept;
  old.resize(kept);
  std::erase_if(watched_, [&](const auto& entry) {
    const bool is_old = std::any_of(old.begin(), old.end(),
                                    [&](const Work* work) { return work->id == entry.first; });
    if (!is_old) diagnosis_.forget(entry.second.question);
    return !is_old;
  });

  std::string text;
  for (const Work* work : old) {
    const int64_t age = now - work->begin_ns;
    Watched& watched = watched_[work->id];
    if (watched.question == 0 && now >= watched.ask_at_ns) {
      watched.question = diagnosis_.ask_all(work->key, work->group, kAnswerNs, now);
      watched.ask_at_ns = now;
      alarm_ = true;
    } else if (watched.question != 0 && now - watched.ask_at_ns >= kAnswerNs) {
      if (diagnosis_.first_submitted(watched.question) == rank_) {
        text += "ringdl: " + work->label() + " has been in flight for " +
                std::to_string(age / kSecond) + " s: " + diagnosis_.answers(watched.question, now) +
                " (" + work->collective->describe() + " on rank " + std::to_string(rank_) + ")\n";
      }
      diagnosis_.forget(std::exchange(watched.question, 0));
      watched.ask_at_ns = now + age;
    }
  }
  if (!text.empty() && others > 0) {
    text += "ringdl: and " + std::to_string(others) + " later works on rank " +
            std::to_string(rank_) + "\n";
  }
  return text;
}

std::string Watchdog::check_shutdown(const std::string& awaited, int64_t now) {
  if (shutdown_since_ns_ == 0) {
    shutdown_since_ns_ = now;
    warn_of_shutdown_at_ns_ = now + after_ns_;
  }
  if (after_ns_ == 0 || now < warn_of_shutdown_at_ns_) return "";
  const int64_t age = now - shutdown_since_ns_;
  warn_of_shutdown_at_ns_ = now + age;
  if (awaited.empty()) return "";
  return "ringdl: shutdown() has waited " + std::to_string(age / kSecond) + " s for " + awaited +
         "\n";
}

}  // namespace ringdl
