#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/error.h"
#include "binding/xla_call.h"
#include "binding/xla_memory.h"

namespace ringdl::binding {
namespace {

// Never destroyed: threads of XLA's may outlive the interpreter.
struct Python {
  nb::object explain, compare, follow;
};
Python& python() {
  static auto* const its = new Python();
  return *its;
}

std::string how_gradients_differ(const XlaCall& frame, int64_t number, int64_t plan) {
  const nb::gil_scoped_acquire acquire;
  return nb::cast<std::string>(python().explain(number, plan, frame.device()));
}

std::string how_parameters_differ(const XlaCall& frame, int64_t first, int64_t number,
                                  int64_t plan) {
  const nb::gil_scoped_acquire acquire;
  nb::list parameters;
  for (int64_t i = first; i < frame.argument_count(); ++i) {
    const xla::Buffer& its = frame.argument(i);
    const nb::ndarray<nb::numpy, const uint8_t> bytes(its.data, {bytes_of(its)}, nb::handle());
    parameters.append(nb::cast(bytes, nb::rv_policy::reference));
  }
  return nb::cast<std::string>(python().compare(number, plan, frame.device(), parameters));
}

// Whether all ranks have made the call, and so all get here: see Inbox::compare(). Else one has
// refused it, left, or given up.
bool is_disagreement(const MismatchError& error) {
  return std::string_view(error.what()).starts_with("ranks disagree on ");
}

struct Part {
  std::byte* array;
  size_t begin, bytes;
};

}  // namespace

void ask_python(nb::object explain, nb::object compare) {
  python().explain = std::move(explain);
  python().compare = std::move(compare);
}

void ask_policies(nb::object follow) { python().follow = std::move(follow); }

void follow_policy(const XlaCall& frame) {
  if (frame.attribute("plan") < 0) return;  // that these are the ranks is all that is asked
  const int64_t results = frame.result_count();
  std::vector<std::pair<std::byte*, size_t>> changed;
  for (int64_t i = 0; i < results; ++i) {
    const xla::Buffer& in = frame.argument(i);
    changed.emplace_back(copied(in, frame.result(i)), bytes_of(in));
  }
  const nb::gil_scoped_acquire acquire;
  nb::list views;
  for (const auto& [data, bytes] : changed) {
    const nb::ndarray<nb::numpy, uint8_t> view(data, {bytes}, nb::handle());
    views.append(nb::cast(view, nb::rv_policy::reference));
  }
  for (int64_t i = results; i < frame.argument_count(); ++i) {
    const xla::Buffer& in = frame.argument(i);
    const nb::ndarray<nb::numpy, const uint8_t> view(in.data, {bytes_of(in)}, nb::handle());
    views.append(nb::cast(view, nb::rv_policy::reference));
  }
  const auto why = nb::cast<std::string>(python().follow(frame.attribute("plan"), views));
  if (!why.empty()) throw XlaError(why);
}

// A digest of what the gradients are travels as the root, which an allreduce has no other use for.
void reduce_gradients(const XlaCall& frame, Call call, const XlaRanks& ranks) {
  const int64_t plan = frame.attribute("plan");
  const int64_t count = frame.attribute("count");
  const int64_t wire = frame.attribute("wire");
  if (wire >= 0 && call.dtype == DType::kFloat32) call.compression = static_cast<DType>(wire);
  const std::string name = frame.name("gradients");
  Buffer together;
  std::vector<Part> small;
  XlaWorks works(ranks);
  const auto submit = [&](std::byte* data, size_t bytes) {
    call.shape = {static_cast<int64_t>(bytes / item_bytes(call.dtype))};
    call.name = name + " (" + std::to_string(works.size()) + ")";
    works.submit(call, data);
  };
  size_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const xla::Buffer& in = frame.argument(i);
    std::byte* const array = copied(in, frame.result(i));
    const size_t bytes = bytes_of(in);
    if (bytes >= kAloneBytes) {
      submit(array, bytes);
    } else {
      small.push_back({array, total, bytes});
      total += bytes;
    }
  }
  if (total > 0 || works.size() == 0) {
    together = Buffer(total);
    for (const Part& part : small) {
      std::memcpy(together.data() + part.begin, part.array, part.bytes);
    }
    submit(together.data(), total);
  }
  try {
    for (size_t i = 0; i < works.size(); ++i) works.wait(i);
  } catch (const MismatchError& error) {
    if (!is_disagreement(error)) throw;
    const std::string why = how_gradients_differ(frame, ranks.number, plan);
    if (why.empty()) throw;
    throw XlaError(why);
  }
  for (const Part& part : small) {
    std::memcpy(part.array, together.data() + part.begin, part.bytes);
  }
  if (count == frame.argument_count()) return;  // without parameters
  if (are_compared(ranks.number, plan, frame.device())) return;
  const std::string why = how_parameters_differ(frame, count, ranks.number, plan);
  if (!why.empty()) throw XlaError(why);
  set_compared(ranks.number, plan, frame.device());
}

}  // namespace ringdl::binding
