#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "binding/xla_call.h"
#include "binding/xla_memory.h"

namespace ringdl::binding {
namespace {

xla::Error* error_of(const xla::CallFrame& frame, xla::ErrorCode code, const std::string& text) {
  xla::ErrorArguments arguments{sizeof arguments, nullptr, text.c_str(), code};
  return frame.api->create_error(&arguments);
}

// Shapes and roots that were compiled are those of other ranks.
void refuse_other(const XlaRanks& ranks, int64_t rank, int64_t size) {
  const SharedGroup& its = ranks.group ? ranks.group : ranks.driver->group_of_all_ranks();
  if (rank == its->rank && size == its->size()) return;
  throw UsageError("the function was compiled for rank " + std::to_string(rank) + " of " +
                   std::to_string(size) + ", and since init() this is rank " +
                   std::to_string(its->rank) + " of " + std::to_string(its->size()) +
                   "; compile it again: jax.clear_caches()");
}

void collect(const XlaCall& frame, Call call, const XlaRanks& ranks) {
  const int64_t size = frame.attribute("size");
  const xla::Buffer& in = frame.argument(0);
  const xla::Buffer& out = frame.result(0);
  call.shape.assign(in.dims, in.dims + in.rank);
  call.name = frame.name(name_of(call.kind));
  void* data = in.data;
  if (call.kind == Kind::kAllreduce || call.kind == Kind::kBroadcast) {
    data = copied(in, out);
  } else if (call.kind == Kind::kReduceScatter) {
    call.output = out.data;
  } else if (call.kind == Kind::kAlltoall) {
    call.splits.assign(static_cast<size_t>(size), call.shape.at(0) / size);
  }
  XlaWorks works(ranks);
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

void carry_out(const XlaCall& frame) {
  const XlaRanks ranks = ranks_of(frame.attribute("ranks"));
  refuse_other(ranks, frame.attribute("rank"), frame.attribute("size"));
  if (frame.attribute("count") < 0) return follow_policy(frame);
  Call call;
  call.kind = static_cast<Kind>(frame.attribute("kind"));
  call.reduction = static_cast<Reduction>(frame.attribute("reduction"));
  call.root = static_cast<int>(frame.attribute("root"));
  call.dtype = dtype_of(frame.argument(0).dtype);
  call.group = ranks.group;
  if (frame.attribute("count") > 0) {
    reduce_gradients(frame, std::move(call), ranks);
  } else {
    collect(frame, std::move(call), ranks);
  }
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
  if (dynamic_cast<const XlaError*>(&error) != nullptr) return "";
  if (dynamic_cast<const MismatchError*>(&error) != nullptr) return "ringdl.MismatchError: ";
  if (dynamic_cast<const StallError*>(&error) != nullptr) return "ringdl.StallError: ";
  if (dynamic_cast<const UsageError*>(&error) != nullptr) return "ringdl.UsageError: ";
  if (dynamic_cast<const RankFailedError*>(&error) != nullptr) return "ringdl.RankFailedError: ";
  return "ringdl.Error: ";
}

// The other devices of this process may wait in XLA for one that has failed. XLA gives up after 40
// seconds, ends the process, and has forgotten why.
void print_if_several(const xla::CallFrame& frame, const std::string& text) {
  const int64_t number = XlaCall(frame).device();
  if (number < 0) return;
  std::fprintf(stderr, "ringdl: a call on device %d has failed: %s\n", static_cast<int>(number),
               text.c_str());
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
    take_over_xla_memory(reinterpret_cast<const void*>(frame->api->create_error));
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  try {
    carry_out(XlaCall(*frame));
    return nullptr;
  } catch (nb::python_error& error) {  // of a signal's handler
    raise_later(error);
    return error_of(*frame, xla::ErrorCode::kAborted, "ringdl: interrupted");
  } catch (const std::exception& error) {
    const std::string text = class_of(error) + error.what();
    print_if_several(*frame, text);
    return error_of(*frame, xla::ErrorCode::kAborted, text);
  }
}

}  // namespace

void bind_xla(nb::module_& module) {
  module.def("xla_handler", [] { return nb::capsule(reinterpret_cast<void*>(&handle)); });
  module.def(
      "xla_use",
      [](int64_t number, const Communicator& communicator, const SharedGroup& group,
         double timeout) { put_ranks({number, communicator.driver, group, to_ns(timeout)}); },
      nb::arg("number"), nb::arg("communicator"), nb::arg("group").none(), nb::arg("timeout"));
  module.def("xla_forget", &forget_ranks, nb::arg("number"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "xla_share_memory",
      [](const Communicator* of) {
        const nb::gil_scoped_release release;
        set_xla_window(of == nullptr ? nullptr : of->driver->window());
      },
      nb::arg("of").none());
  module.def("xla_ask", &ask_python, nb::arg("explain"), nb::arg("compare"));
  module.def("xla_ask_policies", &ask_policies, nb::arg("follow"));
}

}  // namespace ringdl::binding
