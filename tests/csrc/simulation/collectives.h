#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "simulation/activity.h"
#include "simulation/dice.h"

namespace ringdl::check {

/// One call of a collective of any kind, by all ranks or by a group, some of which may have joined.
///
/// Element i of what member m brings is m + i % 5, so that sums are exact.
class CollectiveActivity final : public Activity {
 public:
  /// @param number  of the activity: part of its name
  /// @param live  the ranks that have not joined by then; by default all
  CollectiveActivity(Dice& dice, int size, int number, const std::vector<int>& live)
      : CollectiveActivity(dice, size, number, live, live.size() < static_cast<size_t>(size)) {}

  int calls(int rank) const override { return is_live(rank) ? 1 : 0; }

  bool is_ordered() const override { return name_.empty(); }

  bool call(Simulation& simulation, int rank) override {
    Side& side = this->side(rank);
    side.call = call_of(simulation[rank], rank);
    side.call.output = side.output.data();
    side.work = simulation.submit(rank, side.call, side.data.data());
    return true;
  }

  bool has_ended(int rank) const override {
    if (!is_live(rank)) return true;
    const auto& work = side(rank).work;
    return work && work->ended();
  }

  std::string wrong(int rank, const std::vector<int>& victims) const override {
    if (!is_live(rank)) return "";
    const Work& work = *side(rank).work;
    const std::string where = work.label() + " on rank " + std::to_string(rank);
    if (work.state == Work::State::kDone) {
      if (is_contradicted()) return where + " ends well, though ranks disagree";
      return is_right(rank) ? "" : where + " has a wrong result";
    }
    if (work.failure.kind == FailureKind::kMismatch && is_contradicted()) return "";
    const std::string failure = wrong_failure(work.failure.text, victims);
    return failure.empty() ? "" : where + failure;
  }

 private:
  struct Side {
    std::vector<float> data;
    std::vector<float> output;
    Call call;
    std::shared_ptr<Work> work;
  };

  CollectiveActivity(Dice& dice, int size, int number, const std::vector<int>& live, bool joins)
      : Activity(members_of(dice, size, joins)), live_(live), sides_(static_cast<size_t>(size)) {
    is_group_ = members().size() < live.size() || (!joins && dice.is_one_of(4));
    kind_ = kind_of(dice, joins);
    if (dice.is_one_of(3))
      rows_ = dice(1, 20);
    else
      rows_ = dice.is_one_of(2) ? dice(20, 1000) : dice(1000, 30'000) / count();
    columns_ = dice.is_one_of(2) ? 1 : dice(1, 7);
    root_ = member_of(live_[static_cast<size_t>(dice(0, 1 << 20)) % live_.size()]);
    if (root_ < 0) root_ = static_cast<int>(dice(0, count() - 1));
    if (dice.is_one_of(4)) reduction_ = Reduction::kMax;
    if (kind_ == Kind::kAllreduce) {
      if (dice.is_one_of(3)) algorithm_ = Algorithm::kRing;
      if (dice.is_one_of(8)) algorithm_ = Algorithm::kDoubling;
      if (dice.is_one_of(6) && size < 10 && reduction_ == Reduction::kSum) {
        compression_ = DType::kFloat16;
      }
    }
    if (!dice.is_one_of(4)) name_ = "work " + std::to_string(number);
    if (!joins && kind_ != Kind::kBarrier && dice.is_one_of(10)) {
      other_ = static_cast<int>(dice(0, count() - 1));
      other_way_ = dice.choose(std::vector<OtherWay>{OtherWay::kDType, OtherWay::kColumns});
    }
    for (const int rank : members()) {
      const int member = member_of(rank);
      Side& its = side(rank);
      its.data.resize(brings(member));
      for (size_t i = 0; i < its.data.size(); ++i) its.data[i] = value(member, i);
      if (kind_ == Kind::kReduceScatter) its.output.resize(scattered(member) * (columns() + 1));
    }
  }

  static std::vector<int> members_of(Dice& dice, int size, bool joins) {
    std::vector<int> all = numbers_to(size);
    if (joins || size < 3 || !dice.is_one_of(3)) return all;
    return dice.some_of(all, static_cast<size_t>(dice(2, size - 1)));
  }

  Kind kind_of(Dice& dice, bool joins) const {
    static const std::vector<Kind> kinds{Kind::kAllreduce, Kind::kAllreduce, Kind::kAllreduce,
                                         Kind::kBroadcast, Kind::kAllgather, Kind::kBarrier,
                                         Kind::kAlltoall,  Kind::kGather,    Kind::kReduceScatter,
                                         Kind::kScatter};
    return !joins && count() == 2 && dice.is_one_of(2) ? Kind::kMessage : dice.choose(kinds);
  }

  int count() const { return static_cast<int>(members().size()); }
  int member_of(int rank) const {
    const auto at = std::ranges::find(members(), rank);
    return at == members().end() ? -1 : static_cast<int>(at - members().begin());
  }
  bool is_live(int rank) const { return has(rank) && std::ranges::count(live_, rank) > 0; }
  bool is_live_member(int member) const { return is_live(members()[static_cast<size_t>(member)]); }
  Side& side(int rank) { return sides_[static_cast<size_t>(rank)]; }
  const Side& side(int rank) const { return sides_[static_cast<size_t>(rank)]; }
  bool is_contradicted() const { return other_ >= 0; }

  static float value(int member, size_t index) {
    return static_cast<float>(member) + static_cast<float>(index % 5);
  }
  size_t columns() const { return static_cast<size_t>(columns_); }
  // Rows where each member may have as many as it likes.
  size_t uneven(int a, int b) const {
    return (static_cast<size_t>(rows_) + static_cast<size_t>(a + b)) % 4 *
           static_cast<size_t>(rows_);
  }
  size_t scattered(int member) const {
    const auto members = static_cast<size_t>(count());
    const auto rows = static_cast<size_t>(rows_);
    return rows / members + (static_cast<size_t>(member) < rows % members ? 1 : 0);
  }
  std::vector<int64_t> splits_of(int member) const {
    std::vector<int64_t> splits;
    for (int to = 0; to < count(); ++to) splits.push_back(static_cast<int64_t>(uneven(member, to)));
    return splits;
  }
  int64_t rows_of_all(int member) const {
    const std::vector<int64_t> splits = splits_of(member);
    return std::accumulate(splits.begin(), splits.end(), int64_t{0});
  }
  int64_t rows_of_member(int member) const {
    switch (kind_) {
      case Kind::kBarrier:
        return 0;
      case Kind::kAllgather:
      case Kind::kGather:
        return static_cast<int64_t>(uneven(member, 0));
      case Kind::kAlltoall:
        return rows_of_all(member);
      case Kind::kScatter:
        return member == root_ ? rows_of_all(member) : 0;
      default:
        return rows_;
    }
  }
  size_t brings(int member) const {
    const bool is_wider = member == other_ && other_way_ == OtherWay::kColumns;
    return static_cast<size_t>(rows_of_member(member)) * (columns() + is_wider);
  }

  Call call_of(Engine& engine, int rank) const {
    const int member = member_of(rank);
    Call call;
    call.kind = kind_;
    call.name = name_;
    if (kind_ == Kind::kMessage) {
      call.group = group_of_pair(members()[0], members()[1], *engine.parts().all);
    } else if (is_group_) {
      call.group = group_of(members(), rank, engine.size(), 7);
    }
    if (kind_ == Kind::kBarrier) return call;
    call.dtype = DType::kFloat32;
    call.shape = {rows_of_member(member), columns_};
    if (member == other_ && other_way_ == OtherWay::kDType) call.dtype = DType::kInt32;
    if (member == other_ && other_way_ == OtherWay::kColumns) ++call.shape[1];
    call.reduction = reduction_;
    const bool has_root =
        kind_ == Kind::kBroadcast || kind_ == Kind::kGather || kind_ == Kind::kScatter;
    if (has_root) call.root = root_;
    if (kind_ == Kind::kAllreduce) {
      call.algorithm = algorithm_;
      if (call.dtype == DType::kFloat32) call.compression = compression_;
    }
    if (kind_ == Kind::kAlltoall || (kind_ == Kind::kScatter && member == root_)) {
      call.splits = splits_of(member);
    }
    return call;
  }

  float reduced(size_t index) const {
    float result = 0;
    for (int member = 0; member < count(); ++member) {
      if (!is_live_member(member)) continue;
      const float its = value(member, index);
      result = reduction_ == Reduction::kSum ? result + its : std::max(result, its);
    }
    return result;
  }

  // Elements of a member's, from the row on.
  void append(std::vector<float>& to, int member, size_t row, size_t rows) const {
    for (size_t i = 0; i < rows * columns(); ++i) to.push_back(value(member, row * columns() + i));
  }

  std::vector<float> expected(int own) const {
    std::vector<float> expected;
    size_t before = 0;  // rows
    switch (kind_) {
      case Kind::kAllreduce:
        for (size_t i = 0; i < brings(own); ++i) expected.push_back(reduced(i));
        break;
      case Kind::kReduceScatter:
        for (int member = 0; member < own; ++member) before += scattered(member);
        for (size_t i = 0; i < scattered(own) * columns(); ++i) {
          expected.push_back(reduced(before * columns() + i));
        }
        break;
      case Kind::kBroadcast:
        append(expected, root_, 0, static_cast<size_t>(rows_));
        break;
      case Kind::kMessage:
        append(expected, 0, 0, static_cast<size_t>(rows_));
        break;
      case Kind::kScatter:
        for (int member = 0; member < own; ++member) before += uneven(root_, member);
        append(expected, root_, before, uneven(root_, own));
        break;
      case Kind::kAlltoall:
        for (int from = 0; from < count(); ++from) {
          if (!is_live_member(from)) continue;
          before = 0;
          for (int member = 0; member < own; ++member) before += uneven(from, member);
          append(expected, from, before, uneven(from, own));
        }
        break;
      case Kind::kGather:
      case Kind::kAllgather:
        for (int from = 0; from < count() && (kind_ == Kind::kAllgather || own == root_); ++from) {
          if (is_live_member(from)) append(expected, from, 0, uneven(from, 0));
        }
        break;
      case Kind::kBarrier:
        break;
    }
    return expected;
  }

  bool is_right(int rank) const {
    const Side& its = side(rank);
    const std::vector<float> expected = this->expected(member_of(rank));
    const void* data = its.data.data();
    size_t bytes = its.data.size() * sizeof(float);
    const bool gathers = kind_ == Kind::kAllgather || kind_ == Kind::kAlltoall ||
                         kind_ == Kind::kScatter ||
                         (kind_ == Kind::kGather && member_of(rank) == root_);
    if (gathers) {
      const Gathered& gathered = *its.work->collective->gathered();
      data = gathered.data.data();
      bytes = gathered.data.size();
    } else if (kind_ == Kind::kReduceScatter) {
      data = its.output.data();
      bytes = scattered(member_of(rank)) * columns() * sizeof(float);
    } else if (kind_ == Kind::kGather) {
      return true;
    }
    return bytes == expected.size() * sizeof(float) &&
           (bytes == 0 || std::memcmp(data, expected.data(), bytes) == 0);
  }

  const std::vector<int> live_;
  std::vector<Side> sides_;  // by rank
  Kind kind_ = Kind::kBarrier;
  bool is_group_ = false;
  int64_t rows_ = 0;
  int64_t columns_ = 1;
  int root_ = 0;
  Reduction reduction_ = Reduction::kSum;
  std::optional<Algorithm> algorithm_;
  std::optional<DType> compression_;
  std::string name_;
  enum class OtherWay : uint8_t { kDType, kColumns };
  int other_ = -1;  // a member that means something else, namely another
  OtherWay other_way_ = OtherWay::kDType;
};

}  // namespace ringdl::check
