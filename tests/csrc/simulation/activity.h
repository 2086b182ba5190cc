#pragma once

#include <algorithm>
#include <cctype>
#include <string>
#include <vector>

#include "engine/work.h"
#include "simulation/simulation.h"

namespace ringdl::check {

/// What some ranks of a simulation do together, call by call.
class Activity {
 public:
  /// @param members  the ranks that take part, in their order
  explicit Activity(std::vector<int> members) : members_(std::move(members)) {}
  virtual ~Activity() = default;
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  const std::vector<int>& members() const { return members_; }
  /// How many calls a rank makes.
  virtual int calls(int rank) const { return has(rank) ? 1 : 0; }
  /// Whether ranks make these calls in the same order among others of the sort.
  virtual bool is_ordered() const { return false; }
  /// A rank makes its next call.
  /// @returns false: not yet, as the one before has not ended
  virtual bool call(Simulation& simulation, int rank) = 0;
  /// Whether all calls of a rank have been made, and have ended.
  virtual bool has_ended(int rank) const = 0;
  /// What is wrong with what a rank has got, in words; empty if nothing is.
  /// @param victims  the ranks that have died
  virtual std::string wrong(int rank, const std::vector<int>& victims) const = 0;

 protected:
  bool has(int rank) const { return std::ranges::count(members_, rank) > 0; }
  /// A failure is right if it names one of those that have died.
  std::string wrong_failure(const std::string& text, const std::vector<int>& victims) const {
    const bool names_one = std::ranges::any_of(victims, [&](int rank) {
      return has(rank) && names(text, "rank " + std::to_string(rank));
    });
    return names_one ? "" : " fails: " + text;
  }

 private:
  // Whether the text has these words, not followed by another digit.
  static bool names(const std::string& text, const std::string& words) {
    for (size_t at = text.find(words); at != text.npos; at = text.find(words, at + 1)) {
      const size_t end = at + words.size();
      if (end == text.size() || !std::isdigit(static_cast<unsigned char>(text[end]))) return true;
    }
    return false;
  }

  const std::vector<int> members_;
};

}  // namespace ringdl::check
