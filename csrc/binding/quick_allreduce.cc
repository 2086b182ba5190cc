#include <nanobind/stl/shared_ptr.h>

#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "binding/binding.h"

// The allreduce that is called most: blocking, unnamed, in place, of a NumPy array, by all ranks.
// Inside a host it takes about a microsecond, so what Python does around it counts: there is a
// function of the module without a frame of Python's, arrays are read without DLPack, and the GIL
// is kept while the others' answers may be there at any moment. Python sees a work only if it takes
// long or fails.
namespace ringdl::binding {
namespace {

// The beginning of a NumPy array and of its dtype, as NumPy's binary interface has them since 1.7.
struct NumPyArray {
  PyObject object;
  char* data;
  int dimensions;
  Py_ssize_t* shape;
  Py_ssize_t* strides;
  PyObject* base;
  struct NumPyDType* dtype;
  int flags;
};

struct NumPyDType {
  PyObject object;
  PyTypeObject* type;
  char kind;
  char character;
  char byte_order;
  char flags;
  int number;
};

constexpr int kUsable = 0x1 | 0x100 | 0x400;  // C-contiguous, aligned, writeable

// By NumPy's numbers of its own dtypes; others may share their characters.
std::optional<DType> dtype_of(const NumPyDType& dtype) {
  if (dtype.byte_order != '=' && dtype.byte_order != '|') return std::nullopt;
  static constexpr std::pair<int, DType> kNumbers[] = {
      {0, DType::kBool},     {1, DType::kInt8},     {2, DType::kUInt8},
      {3, DType::kInt16},    {5, DType::kInt32},    {7, DType::kInt64},
      {11, DType::kFloat32}, {12, DType::kFloat64}, {23, DType::kFloat16}};
  for (const auto& [number, known] : kNumbers) {
    if (number == dtype.number) return known;
  }
  return std::nullopt;
}

// NumPy's array type, once an array was found to look as declared above: until then, and if it does
// not, no array is taken here.
PyTypeObject* find_numpy_type() {
  const nb::module_ numpy = nb::module_::import_("numpy");
  const nb::object probe = numpy.attr("zeros")(nb::make_tuple(3, 5), "float32");
  const auto array = nb::cast<nb::ndarray<>>(probe);
  const auto* const seen = reinterpret_cast<const NumPyArray*>(probe.ptr());
  const bool is_known = sizeof(long) == 8 && seen->data == array.data() && seen->dimensions == 2 &&
                        seen->shape[0] == 3 && seen->shape[1] == 5 && seen->strides[1] == 4 &&
                        (seen->flags & kUsable) == kUsable && seen->dtype->number == 11 &&
                        seen->dtype->byte_order == '=';
  return is_known ? Py_TYPE(probe.ptr()) : nullptr;
}

std::optional<ArrayView> view_of_numpy(PyObject* x) {
  static PyTypeObject* type = nullptr;  // guarded by the GIL, which an import may let go of
  static bool has_checked = false;
  if (!has_checked) {
    if (std::strcmp(Py_TYPE(x)->tp_name, "numpy.ndarray") != 0) return std::nullopt;
    type = find_numpy_type();
    has_checked = true;
  }
  if (Py_TYPE(x) != type) return std::nullopt;
  const auto& array = *reinterpret_cast<const NumPyArray*>(x);
  const auto dtype = dtype_of(*array.dtype);
  if (!dtype || (array.flags & kUsable) != kUsable) return std::nullopt;
  return ArrayView{array.data, *dtype, {array.shape, array.shape + array.dimensions}};
}

std::optional<Reduction> reduction_of(PyObject* op) {
  static std::pair<PyObject*, Reduction> last{nullptr, Reduction::kSum};  // members live for ever
  if (op != last.first) {
    if (!nb::isinstance<Reduction>(nb::handle(op))) return std::nullopt;
    last = {op, nb::cast<Reduction>(nb::handle(op))};
  }
  return last.second;
}

// Lets go of the GIL, if it comes to that.
class LazyRelease {
 public:
  void operator()() {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }
  LazyRelease() = default;
  LazyRelease(const LazyRelease&) = delete;
  LazyRelease& operator=(const LazyRelease&) = delete;
  ~LazyRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

// What the module's function is for, and what finishes a work of it that is under way; null if
// there is none. With the GIL held.
struct Default {
  nb::object communicator;
  nb::object finish;
};

Default& the_default() {
  static auto* const value = new Default();
  return *value;
}

// `otherwise` is called for everything else.
PyObject* quick_allreduce(PyObject* otherwise, PyObject* const* arguments, Py_ssize_t count,
                          PyObject* names) {
  const Default now = the_default();  // another thread may shut it down
  if ((count == 1 || count == 2) && names == nullptr && now.communicator.is_valid()) {
    try {
      const nb::handle op = count == 2 ? nb::handle(arguments[1]) : nb::handle();
      auto& communicator = *nb::inst_ptr<Communicator>(now.communicator);
      const nb::object begun = allreduce_now(communicator, nb::handle(arguments[0]), op);
      if (begun.ptr() == Py_True) return Py_NewRef(arguments[0]);
      if (!begun.is_none()) {
        return PyObject_CallFunctionObjArgs(now.finish.ptr(), begun.ptr(), arguments[0], nullptr);
      }
    } catch (const UsageError&) {  // nothing was submitted; what is called now says why
    } catch (nb::python_error& error) {
      error.restore();
      return nullptr;
    } catch (const Error&) {
      raise_in_python(std::current_exception());
      return nullptr;
    } catch (const std::bad_alloc& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
      return nullptr;
    } catch (const std::exception& error) {
      const nb::object kind = nb::module_::import_("ringdl._errors").attr("Error");
      PyErr_SetString(kind.ptr(), error.what());
      return nullptr;
    }
  }
  return PyObject_Vectorcall(otherwise, arguments, static_cast<size_t>(count), names);
}

}  // namespace

nb::object allreduce_now(Communicator& self, nb::handle x, nb::handle op) {
  const auto reduction = op.is_valid() ? reduction_of(op.ptr()) : Reduction::kAverage;
  auto view = view_of_numpy(x.ptr());
  if (!reduction || !view) return nb::none();
  Call call;
  call.kind = Kind::kAllreduce;
  call.reduction = *reduction;
  call.dtype = view->dtype;
  call.shape = std::move(view->shape);
  std::shared_ptr<Work> work;
  {
    LazyRelease release;
    work = self.driver->allreduce_now(call, view->data, [&] { release(); });
  }
  if (!work) return nb::bool_(true);
  if (!work->released.load()) {
    self.in_flight.emplace(work->id, Held{Operand(x, view->dtype), std::nullopt, nb::none()});
  }
  bool is_done = false;
  {
    const nb::gil_scoped_release release;
    is_done = self.driver->wait_briefly(work);
  }
  self.let_go_of_ended();
  return is_done ? nb::object(nb::bool_(true)) : nb::cast(work);
}

void bind_quick_allreduce(nb::module_& module) {
  module.def(
      "set_default",
      [](nb::object communicator, nb::object finish) {
        Default before = std::move(the_default());  // goes last: it may call into Python
        if (communicator.is_none()) return;
        the_default() = {std::move(communicator), std::move(finish)};
      },
      nb::arg("communicator").none(), nb::arg("finish").none());
  module.def(
      "quick_allreduce_",
      [](const nb::object& otherwise) {
        static PyMethodDef method{"allreduce_", nullptr, METH_FASTCALL | METH_KEYWORDS, nullptr};
        static const std::string text = std::string(
                                            "allreduce_(x, op=..., name=None, timeout=None, *, "
                                            "algorithm=None, compression=None)"
                                            "\n--\n\n") +
                                        nb::str(otherwise.attr("__doc__")).c_str();
        method.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(
            static_cast<_PyCFunctionFastWithKeywords>(&quick_allreduce)));
        method.ml_doc = text.c_str();
        return nb::steal(PyCFunction_NewEx(&method, otherwise.ptr(), nullptr));
      },
      nb::arg("otherwise"));
}

}  // namespace ringdl::binding
