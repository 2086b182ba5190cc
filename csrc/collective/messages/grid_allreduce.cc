#include "collective/messages/grid_allreduce.h"

#include <utility>

#include "collective/partition.h"

namespace ringdl {
namespace {

std::vector<Span> chunks_of(size_t bytes, int columns) {
  const Partition partition(bytes, columns, bytes);
  std::vector<Span> chunks;
  for (int column = 0; column < columns; ++column) chunks.push_back(partition.segment(column, 0));
  return chunks;
}

std::vector<int> row_of(int rank, int columns) {
  std::vector<int> ranks;
  const int first = rank / columns * columns;
  for (int column = 0; column < columns; ++column) ranks.push_back(first + column);
  return ranks;
}

std::vector<int> column_of(int rank, int size, int columns) {
  std::vector<int> ranks;
  for (int each = rank % columns; each < size; each += columns) ranks.push_back(each);
  return ranks;
}

// Of sums that others are added to.
Reducer partial(const Reducer& reducer) {
  if (reducer.custom() != nullptr) return reducer;
  const bool is_average = reducer.reduction() == Reduction::kAverage;
  return {reducer.dtype(), is_average ? Reduction::kSum : reducer.reduction(), 1};
}

}  // namespace

int grid_columns(int size) {
  int rows = 1;
  for (int divisor = 2; divisor * divisor <= size; ++divisor) {
    if (size % divisor == 0) rows = divisor;
  }
  return size / rows;
}

GridAllreduce::GridAllreduce(Executor& executor, std::byte* data, size_t bytes,
                             const Reducer& reducer, int rank, int size, int columns,
                             size_t segment_bytes)
    : executor_(executor),
      data_(data),
      chunks_(chunks_of(bytes, columns)),
      own_(chunks_[static_cast<size_t>(rank % columns)]),
      sum_(own_.bytes),
      row_(row_of(rank, columns), rank % columns),
      column_(column_of(rank, size, columns), rank / columns),
      scatter_(executor, data, sum_.data(), chunks_, size > columns ? partial(reducer) : reducer,
               rank % columns, segment_bytes),
      reduce_(executor, sum_.data(), own_.bytes, reducer, rank / columns, size / columns,
              segment_bytes),
      gather_(data, chunks_, rank % columns, segment_bytes),
      copies_(executor) {}

// A phase begins when all messages of the one before have ended, and counts its own from there.
bool GridAllreduce::step(Channel& channel) {
  row_.use(channel);
  column_.use(channel);
  const auto begin = [&](SubChannel& its) {
    if (!std::exchange(has_begun_, true)) its.begin(channel);
  };
  const auto go_on = [&](Phase phase) {
    phase_ = phase;
    has_begun_ = false;
  };
  if (phase_ == Phase::kScatter) {
    begin(row_);
    if (!scatter_.step(row_)) return false;
    go_on(Phase::kReduce);
  }
  if (phase_ == Phase::kReduce) {
    begin(column_);
    if (!reduce_.step(column_)) return false;
    go_on(Phase::kCopy);
  }
  if (phase_ == Phase::kCopy) {
    if (copies_.asked() == 0) {
      copies_.add(executor_.copy(data_ + own_.begin, sum_.data(), own_.bytes));
    }
    if (!copies_.all_done()) return false;
    go_on(Phase::kGather);
  }
  if (phase_ == Phase::kGather) {
    begin(row_);
    if (!gather_.step(row_)) return false;
    go_on(Phase::kDone);
  }
  return true;
}

std::string GridAllreduce::describe() const {
  switch (phase_) {
    case Phase::kScatter:
      return "grid allreduce, rows: " + scatter_.describe();
    case Phase::kReduce:
      return "grid allreduce, columns: " + reduce_.describe();
    default:
      return "grid allreduce, rows: " + gather_.describe();
  }
}

}  // namespace ringdl
