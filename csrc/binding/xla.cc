#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "binding/binding.h"
#include "binding/xla_ffi.h"

namespace ringdl::binding {
namespace {

// The ranks that a compiled function's collectives are of: by a number, as it outlives engines.
struct Ranks {
  std::shared_ptr<Driver> driver;
  SharedGroup group;
  int64_t timeout_ns = 0;
};

std::mutex ranks_mutex;
std::map<int64_t, Ranks>& all_ranks() {
  static auto* const all = new std::map<int64_t, Ranks>();
  return *all;
}

Ranks ranks_of(int64_t number) {
  const std::lock_guard lock(ranks_mutex);
  const auto found = all_ranks().find(number);
  if (found == all_ranks().end()) {
    throw UsageError(
        "the group of this compiled function has ranks that there are no more since init(); make "
        "another group, and compile it for that");
  }
  return found->second;
}

xla::Error* error_of(const xla::CallFrame& frame, xla::ErrorCode code, const std::string& text) {
  xla::ErrorArguments arguments{sizeof arguments, nullptr, text.c_str(), code};
  return frame.api->create_error(&arguments);
}

int64_t attribute(const xla::CallFrame& frame, std::string_view name) {
  const xla::Attributes& all = frame.attributes;
  for (int64_t i = 0; i < all.size; ++i) {
    if (std::string_view(all.names[i]->begin, all.names[i]->size) != name) continue;
    const auto& scalar = *static_cast<const xla::Scalar*>(all.values[i]);
    if (all.types[i] != xla::kScalarAttribute || scalar.dtype != xla::Type::kInt64) break;
    return *static_cast<const int64_t*>(scalar.value);
  }
  throw Error("XLA passes no attribute " + std::string(name));
}

const xla::Buffer& buffer(const xla::Buffers& of, int64_t number) {
  return *static_cast<const xla::Buffer*>(of.values[number]);
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

// Shapes and roots that were compiled are those of other ranks.
void refuse_other(const Ranks& ranks, int64_t rank, int64_t size) {
  const SharedGroup& its = ranks.group ? ranks.group : ranks.driver->group_of_all_ranks();
  if (rank == its->rank && size == its->size()) return;
  throw UsageError("the function was compiled for rank " + std::to_string(rank) + " of " +
                   std::to_string(size) + ", and since init() this is rank " +
                   std::to_string(its->rank) + " of " + std::to_string(its->size()) +
                   "; compile it again: jax.clear_caches()");
}

// Larger arrays are reduced where they are, smaller ones as one.
constexpr size_t kAloneBytes = 256 << 10;

// Works whose buffers XLA takes back when the handler returns.
class Works {
 public:
  explicit Works(const Ranks& ranks) : ranks_(ranks) {}
  ~Works() {
    for (const auto& work : all_) {
      try {
        ranks_.driver->give_up(work, "the compiled function ended by an error there");
      } catch (const std::exception&) {  // after shutdown() nothing is in flight
      }
    }
  }
  Works(const Works&) = delete;
  Works& operator=(const Works&) = delete;

  void submit(const Call& call, void* data) { all_.push_back(ranks_.driver->submit(call, data)); }
  // Threads of XLA's that are not Python's main one see no signal; and Python goes on beside them,
  // and may submit what others wait for.
  Work& wait(size_t number) {
    ranks_.driver->wait(all_[number], ranks_.timeout_ns, check_signals, false);
    return *all_[number];
  }
  size_t size() const { return all_.size(); }

 private:
  const Ranks& ranks_;
  std::vector<std::shared_ptr<Work>> all_;
};

// An argument is never written to, unless XLA has made its memory that of the result.
std::byte* copied(const xla::Buffer& in, const xla::Buffer& out) {
  if (out.data != in.data) std::memcpy(out.data, in.data, bytes_of(in));
  return static_cast<std::byte*>(out.data);
}

// Several arrays of one dtype.
void reduce_all(const xla::CallFrame& frame, Call call, const Ranks& ranks, int64_t count) {
  Buffer together;
  struct Part {
    std::byte* array;
    size_t begin, bytes;
  };
  std::vector<Part> small;
  Works works(ranks);
  const std::string name = call.name;
  const auto submit = [&](std::byte* data, size_t bytes) {
    call.shape = {static_cast<int64_t>(bytes / item_bytes(call.dtype))};
    call.name = name + " (" + std::to_string(works.size()) + ")";
    works.submit(call, data);
  };
  size_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const xla::Buffer& in = buffer(frame.arguments, i);
    std::byte* const array = copied(in, buffer(frame.results, i));
    const size_t bytes = bytes_of(in);
    if (bytes >= kAloneBytes) {
      submit(array, bytes);
    } else {
      small.push_back({array, total, bytes});
      total += bytes;
    }
  }
  if (total > 0) {
    together = Buffer(total);
    for (const Part& part : small) {
      std::memcpy(together.data() + part.begin, part.array, part.bytes);
    }
    submit(together.data(), total);
  }
  for (size_t i = 0; i < works.size(); ++i) works.wait(i);
  for (const Part& part : small) {
    std::memcpy(part.array, together.data() + part.begin, part.bytes);
  }
}

void collect(const xla::CallFrame& frame) {
  const Ranks ranks = ranks_of(attribute(frame, "ranks"));
  const int64_t size = attribute(frame, "size");
  refuse_other(ranks, attribute(frame, "rank"), size);
  const xla::Buffer& in = buffer(frame.arguments, 0);
  const xla::Buffer& out = buffer(frame.results, 0);
  Call call;
  call.kind = static_cast<Kind>(attribute(frame, "kind"));
  call.reduction = static_cast<Reduction>(attribute(frame, "reduction"));
  call.root = static_cast<int>(attribute(frame, "root"));
  call.dtype = dtype_of(in.dtype);
  call.shape.assign(in.dims, in.dims + in.rank);
  call.group = ranks.group;
  // Apart from calls outside of compiled functions, which XLA may carry out before or after.
  call.name = "in jax.jit: " + std::string(name_of(call.kind));
  const int64_t count = attribute(frame, "count");
  if (count > 1) return reduce_all(frame, call, ranks, count);
  void* data = in.data;
  if (call.kind == Kind::kAllreduce || call.kind == Kind::kBroadcast) {
    data = copied(in, out);
  } else if (call.kind == Kind::kReduceScatter) {
    call.output = out.data;
  } else if (call.kind == Kind::kAlltoall) {
    call.splits.assign(static_cast<size_t>(size), call.shape.at(0) / size);
  }
  Works works(ranks);
  works.submit(call, data);
  Work& work = works.wait(0);
  Gathered* const gathered = work.collective ? work.collective->gathered() : nullptr;
  if (gathered == nullptr || bytes_of(out) == 0) return;
  const auto part = static_cast<int64_t>(bytes_of(out)) / size;
  if (!std::ranges::all_of(gathered->lengths, [&](int64_t its) { return its == part; })) {
    throw UsageError("inside of jax.jit ranks pass arrays of the same shape to " +
                     std::string(name_of(call.kind)) +
                     ", as the shape of its result is compiled; call it outside, or pad them");
  }
  std::memcpy(out.data, gathered->data.data(), bytes_of(out));
}

// In Python's main thread, once XLA has returned.
void raise_later(nb::python_error& error) {
  const nb::gil_scoped_acquire acquire;
  auto* const kept = new nb::python_error(error);
  const auto raise = [](void* its) {
    static_cast<nb::python_error*>(its)->restore();
    delete static_cast<nb::python_error*>(its);
    return -1;
  };
  if (Py_AddPendingCall(raise, kept) != 0) delete kept;  // there are too many already
}

std::string class_of(const std::exception& error) {
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "ringdl.MismatchError: ";
  if (dynamic_cast<const StallError*>(&error) != nullptr) return "ringdl.StallError: ";
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "ringdl.UsageError: ";
  if (dynamic_cast<const RankFailedError*>(&error) != nullptr) return "ringdl.RankFailedError: ";
  return "ringdl.Error: ";
}

// What XLA calls, at first to ask for the version. The interface grows at its end, so the version
// of the caller is fine as long as its major number is the one that was declared.
xla::Error* handle(xla::CallFrame* frame) {
  for (xla::Extension* each = frame->extensions; each != nullptr; each = each->next) {
    if (each->type != xla::kMetadataExtension) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(each)->metadata;
    metadata.api_version.major_version = 0;
    metadata.api_version.minor_version = frame->api->version.minor_version;
    metadata.traits = 0;
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  try {
    collect(*frame);
    return nullptr;
  } catch (nb::python_error& error) {  // of a signal's handler
    raise_later(error);
    return error_of(*frame, xla::ErrorCode::kAborted, "ringdl: interrupted");
  } catch (const std::exception& error) {
    return error_of(*frame, xla::ErrorCode::kAborted, class_of(error) + error.what());
  }
}

}  // namespace

void bind_xla(nb::module_& module) {
  module.def("xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(&handle)); });
  module.def(
      "xla_use",
      [](int64_t number, const Communicator& communicator, const SharedGroup& group,
         double timeout) {
        const std::lock_guard lock(ranks_mutex);
        all_ranks()[number] = {communicator.driver, group, to_ns(timeout)};
      },
      nb::arg("number"), nb::arg("communicator"), nb::arg("group").none(), nb::arg("timeout"));
  module.def(
      "xla_forget",
      [](int64_t number) {
        Ranks forgotten;
        const nb::gil_scoped_release release;
        const std::lock_guard lock(ranks_mutex);
        std::swap(forgotten, all_ranks()[number]);
        all_ranks().erase(number);
      },
      nb::arg("number"));
}

}  // namespace ringdl::binding
