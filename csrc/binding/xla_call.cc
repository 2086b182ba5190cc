#include "binding/xla_call.h"

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include "base/error.h"
#include "binding/xla_memory.h"

namespace ringdl::binding {
namespace {

struct Known {
  XlaRanks ranks;
  std::set<std::pair<int64_t, int64_t>> compared;  // plans, devices
};

std::mutex known_mutex;
std::map<int64_t, Known>& all_known() {
  static auto* const all = new std::map<int64_t, Known>();
  return *all;
}

}  // namespace

XlaRanks ranks_of(int64_t number) {
  const std::lock_guard lock(known_mutex);
  const auto found = all_known().find(number);
  if (found == all_known().end()) {
    throw UsageError(
        "the group of this compiled function has ranks that there are no more since init(); make "
        "another group, and compile it for that");
  }
  return found->second.ranks;
}

void put_ranks(XlaRanks ranks) {
  Known known{std::move(ranks), {}};
  const std::lock_guard lock(known_mutex);
  std::swap(all_known()[known.ranks.number], known);
}

void forget_ranks(int64_t number) {
  Known forgotten;
  const std::lock_guard lock(known_mutex);
  std::swap(forgotten, all_known()[number]);
  all_known().erase(number);
}

bool are_compared(int64_t number, int64_t plan, int64_t device) {
  const std::lock_guard lock(known_mutex);
  const auto found = all_known().find(number);
  return found != all_known().end() && found->second.compared.contains({plan, device});
}

void set_compared(int64_t number, int64_t plan, int64_t device) {
  const std::lock_guard lock(known_mutex);
  const auto found = all_known().find(number);
  if (found != all_known().end()) found->second.compared.insert({plan, device});
}

int64_t XlaCall::attribute(std::string_view name) const {
  const xla::Attributes& all = frame_.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (std::string_view(all.names[i]->begin, all.names[i]->size) != name) continue;
    const auto& scalar = *static_cast<const xla::Scalar*>(all.values[i]);
    if (all.types[i] != xla::kScalarAttribute || scalar.dtype != xla::Type::kInt64) break;
    return *static_cast<const int64_t*>(scalar.value);
  }
  throw Error("XLA passes no attribute " + std::string(name));
}

int64_t XlaCall::argument_count() const {
  return frame_.arguments.size - 1 - (attribute("devices") > 1 ? 1 : 0);
}

int64_t XlaCall::device() const {
  if (attribute("devices") == 1) return -1;
  return *static_cast<const uint32_t*>(argument(argument_count()).data);
}

std::string XlaCall::name(std::string_view what) const {
  const int64_t number = device();
  const std::string place = number < 0 ? "" : " on device " + std::to_string(number);
  return "in jax.jit" + place + ": " + std::string(what);
}

DType dtype_of(xla::Type type) {
  switch (type) {
    case xla::Type::kFloat64:
      return DType::kFloat64;
    case xla::Type::kFloat32:
      return DType::kFloat32;
    case xla::Type::kFloat16:
      return DType::kFloat16;
    case xla::Type::kBFloat16:
      return DType::kBFloat16;
    case xla::Type::kInt64:
      return DType::kInt64;
    case xla::Type::kInt32:
      return DType::kInt32;
    case xla::Type::kInt16:
      return DType::kInt16;
    case xla::Type::kInt8:
      return DType::kInt8;
    case xla::Type::kUInt8:
      return DType::kUInt8;
    case xla::Type::kBool:
      return DType::kBool;
    default:
      throw UsageError("ringdl does not reduce arrays of XLA's type " +
                       std::to_string(static_cast<int>(type)));
  }
}

size_t bytes_of(const xla::Buffer& its) {
  size_t count = 1;
  for (int64_t i = 0; i < its.rank; ++i) count *= static_cast<size_t>(its.dims[i]);
  return count * item_bytes(dtype_of(its.dtype));
}

std::byte* copied(const xla::Buffer& in, const xla::Buffer& out) {
  if (out.data != in.data) std::memcpy(out.data, in.data, bytes_of(in));
  return static_cast<std::byte*>(out.data);
}

XlaWorks::~XlaWorks() {
  if (ended_ == all_.size()) return;
  for (const auto& work : all_) {
    try {
      ranks_.driver->give_up(work, why_);
    } catch (const std::exception&) {  // after shutdown() nothing is in flight
    }
  }
  for (const void* array : arrays_) keep_xla_memory(array);
}

void XlaWorks::submit(const Call& call, void* data) {
  all_.push_back(ranks_.driver->submit(call, data, false));  // `arrays_` is kept here
  arrays_.push_back(data);
  if (call.output != nullptr) arrays_.push_back(call.output);
}

// Threads of XLA's that are not Python's main one see no signal; and Python goes on beside them,
// and may submit what others wait for.
Work& XlaWorks::wait(size_t number) {
  try {
    ranks_.driver->wait(all_[number], ranks_.timeout_ns, check_signals, false);
  } catch (const StallError& error) {
    const std::string_view text = error.what();
    why_ = text.substr(0, text.find(". It stays in flight"));
    throw StallError(why_ +
                     ". It is given up: have all ranks run the same compiled functions, or "
                     "wait for longer by RINGDL_TIMEOUT");
  }
  ++ended_;
  return *all_[number];
}

}  // namespace ringdl::binding
