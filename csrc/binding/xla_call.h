#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "binding/binding.h"
#include "binding/xla_ffi.h"
#include "engine/call.h"

/// What a call by XLA says, and the works that carry it out. Any thread of XLA's; without the GIL.
namespace ringdl::binding {

/// An error of ringdl's that Python has raised: its text begins with its class.
class XlaError : public Error {
  using Error::Error;
};

/// The ranks that a compiled function's collectives are of: by a number, as it outlives engines.
struct XlaRanks {
  int64_t number = 0;
  std::shared_ptr<Driver> driver;
  SharedGroup group;
  int64_t timeout_ns = 0;
};

/// Those that were put under this number last.
/// @throws UsageError  there are none any more
XlaRanks ranks_of(int64_t number);
void put_ranks(XlaRanks ranks);
void forget_ranks(int64_t number);

/// Whether the parameters of a plan (ringdl/jax/_plan.py) were found to be equal on all ranks of
/// this number since these were put, on this device.
bool are_compared(int64_t number, int64_t plan, int64_t device);
void set_compared(int64_t number, int64_t plan, int64_t device);

/// Operands are a token, arrays, and, where several devices run the program each for itself, the
/// number of the device; results a token and arrays.
class XlaCall {
 public:
  explicit XlaCall(const xla::CallFrame& frame) : frame_(frame) {}

  /// @throws Error  there is no such attribute
  int64_t attribute(std::string_view name) const;
  const xla::Buffer& argument(int64_t number) const { return *at(frame_.arguments, number + 1); }
  const xla::Buffer& result(int64_t number) const { return *at(frame_.results, number + 1); }
  /// Of arrays among the operands.
  int64_t argument_count() const;
  /// Of arrays among the results.
  int64_t result_count() const { return frame_.results.size - 1; }
  /// Of several that run the program; -1 if one does so for all.
  int64_t device() const;
  /// What its works are matched by: apart from calls outside of compiled functions, which XLA may
  /// carry out before or after, and from those of other devices, which XLA orders in no way.
  std::string name(std::string_view what) const;

 private:
  static const xla::Buffer* at(const xla::Buffers& of, int64_t number) {
    return static_cast<const xla::Buffer*>(of.values[number]);
  }
  const xla::CallFrame& frame_;
};

/// @throws UsageError  ringdl has no such elements
DType dtype_of(xla::Type type);
size_t bytes_of(const xla::Buffer& its);

/// An argument is never written to, unless XLA has made its memory that of the result.
std::byte* copied(const xla::Buffer& in, const xla::Buffer& out);

/// Works whose buffers XLA takes back when the handler returns.
class XlaWorks {
 public:
  explicit XlaWorks(const XlaRanks& ranks) : ranks_(ranks) {}
  ~XlaWorks();
  XlaWorks(const XlaWorks&) = delete;
  XlaWorks& operator=(const XlaWorks&) = delete;

  void submit(const Call& call, void* data);
  /// @throws MismatchError, StallError, RankFailedError
  Work& wait(size_t number);
  size_t size() const { return all_.size(); }

 private:
  const XlaRanks& ranks_;
  std::vector<std::shared_ptr<Work>> all_;
  std::vector<const void*> arrays_;                                    // theirs
  size_t ended_ = 0;                                                   // without an error
  std::string why_ = "the compiled function ended by an error there";  // that they are given up
};

/// Averages several arrays of one dtype, or sums them. Ranks whose gradients differ in name, shape,
/// dtype or number get a MismatchError that names the first; the first time also those whose
/// parameters differ.
void reduce_gradients(const XlaCall& frame, Call call, const XlaRanks& ranks);

/// What Python is asked: `explain(number, plan, device)`, how the gradients of these ranks
/// differ, and `compare(number, plan, device, parameters)`, how the parameters do, arrays of
/// bytes that are valid during the call. Both are collective, and answer with the text of an
/// XlaError, or an empty one.
void ask_python(nb::object explain, nb::object compare);

/// Hands arrays to a policy, which may change the first of them: those that become results.
void follow_policy(const XlaCall& frame);
/// What Python does with them: `follow(plan, arrays)`, arrays of bytes that are valid during the
/// call. It answers as above.
void ask_policies(nb::object follow);

}  // namespace ringdl::binding
