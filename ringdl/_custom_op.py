"""Reductions of the user's own: a Python function of two scalars, compiled by Numba."""

from __future__ import annotations

import dis
import importlib
import types
from collections.abc import Callable
from typing import Any

from ringdl._engine import CustomOperation, DType
from ringdl._errors import UsageError

Function = Callable[[Any, Any], Any]

_DTYPES = ("float64", "float32", "int64", "int32", "int16", "int8", "uint8", "bool")

_kernels: dict[tuple[int, DType], Any] = {}
"""Compiled kernels by digest. Kept for good: a work in flight may outlive the operation."""

_on_devices: set[tuple[int, DType, int]] = set()
"""For which devices they were compiled, or could not be."""


class CustomOp:
    """A reduction made by `custom_op`; pass it as ``op`` to the allreduces."""

    __slots__ = ("_function", "digest", "name")

    def __init__(self, function: Function, name: str) -> None:
        self._function = function
        self.name = name
        """Its name in errors."""
        self.digest = _digest(function, name)
        """64 bits that tell operations apart: of the name, the bytecode, and what it refers to."""

    def address(self, dtype: DType) -> int:
        """The kernel for one dtype, compiled at its first use (tenths of a second).

        Returns:
            The address of a C function ``void (void* into, const void* from, int64_t count)`` that
            does ``into[i] = op(into[i], from[i])``, needs no GIL, and is there for good.

        Raises:
            UsageError: a 16-bit float, the function cannot be compiled, or Numba is missing.
        """
        if dtype.name not in _DTYPES:
            raise UsageError(
                f"custom_op {self.name!r} does not take {dtype.name}, which Numba lacks; use "
                f"float32, or another of {', '.join(_DTYPES)}"
            )
        key = (self.digest, dtype)
        if key not in _kernels:
            if _digest(self._function, self.name) != self.digest:
                raise UsageError(
                    f"custom_op {self.name!r} refers to values that have changed since it was "
                    "made; make another one with custom_op after the change"
                )
            _kernels[key] = _compile(self._function, self.name, dtype)
        return int(_kernels[key].address)

    def operation(self, dtype: DType) -> CustomOperation:
        """What the engine takes for arrays of one dtype; raises what `address` does."""
        return CustomOperation(self.address(dtype), self.digest, self.name, self)

    def load_on(self, device: int, dtype: DType) -> None:
        """Compile it for a device, at its first use there (seconds).

        Where that cannot be, arrays go by way of the CPU's memory, and a warning says why.
        """
        key = (self.digest, dtype, device)
        if key in _on_devices:
            return
        _on_devices.add(key)
        from ringdl import _cuda, _custom_op_cuda

        try:
            _custom_op_cuda.load(self._function, dtype, device, self.address(dtype))
        except Exception as error:  # Numba raises errors of all kinds
            _cuda.warn(
                f"custom_op {self.name!r} goes by way of the CPU's memory: {_first_reason(error)}"
            )

    def __repr__(self) -> str:
        return f"<ringdl.CustomOp {self.name}>"


def custom_op(fn: Function, name: str | None = None) -> CustomOp:
    """Make a reduction of a function of two scalars that returns one.

    It must be associative and commutative: a ring adds in the order of the ranks, which differs
    from chunk to chunk of the array. With any other function all ranks still get the same bits, but
    which ones depends on the number of ranks and on where in the array an element lies.

    The function is compiled by Numba (``pip install 'ringdl[numba]'``) for each dtype at its first
    use, and runs without the GIL. So it takes what Numba compiles: numbers and the functions of
    math and NumPy. Values outside of it that it refers to are those of the moment when it is made;
    they must not change before its first use. Division by zero gives inf or nan, as in NumPy. Its
    result is converted to the array's dtype. An exception cannot leave it: functions with ``raise``
    or ``assert`` are refused, and one that comes from elsewhere is printed and leaves elements as
    they were.

    Arrays on CUDA devices are reduced there, if all ranks reach one another's and numba-cuda (``pip
    install 'numba-cuda[cu13]'``) compiles the function for them; else by way of the CPU's memory,
    and a warning says why. A device may round differently.

    All ranks must pass the same operation, under the same Python version: where the name, the
    bytecode or a value that it refers to differs, all ranks raise MismatchError.

    Args:
        fn: a Python function of two arguments (not one that Numba has compiled).
        name: its name in errors; by default the function's own name.

    Raises:
        UsageError: not such a function, or it refers to what cannot be compared between ranks.

    Example:
        >>> larger = ringdl.custom_op(lambda a, b: a if abs(a) >= abs(b) else b, "larger")
        >>> ringdl.allreduce(x, op=larger)
    """
    code = getattr(fn, "__code__", None)
    if not isinstance(fn, types.FunctionType) or code is None or code.co_argcount != 2:
        raise UsageError(f"custom_op takes a Python function of two arguments, not {fn!r}")
    return CustomOp(fn, fn.__name__ if name is None else name)


def _digest(function: Function, name: str) -> int:
    import hashlib

    described = repr((name, _describe(function, name, ())))
    return int.from_bytes(hashlib.blake2b(described.encode(), digest_size=8).digest(), "little")


def _describe(value: Any, name: str, within: tuple[Any, ...]) -> object:
    """A description of a value, whose repr is the same on two ranks if the value is.

    Functions are described by their code and by the values that it refers to.
    """
    value = getattr(value, "py_func", value)  # of a function that Numba has compiled
    if isinstance(value, types.FunctionType):
        if value in within:
            return "recursion"
        outside = {
            free: cell.cell_contents
            for free, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        }
        names = sorted(_names(value.__code__))
        outside |= {key: value.__globals__[key] for key in names if key in value.__globals__}
        modules = [other for other in outside.values() if isinstance(other, types.ModuleType)]
        for module in modules:  # which grows
            for key in names:  # as in `math.pi`, or `settings.decay`
                its = getattr(module, key, None)
                is_array = hasattr(its, "dtype") and not isinstance(its, type)
                if isinstance(its, types.ModuleType) and its not in modules:
                    modules.append(its)
                elif is_array or isinstance(its, (int, float, complex, tuple)):
                    outside[f"{module.__name__}.{key}"] = its
        outside["defaults"] = value.__defaults__
        described = [
            (key, _describe(other, name, (*within, value))) for key, other in outside.items()
        ]
        return ("function", _describe_code(value.__code__, name), described)
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__)
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return (value.__module__, value.__qualname__)
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value).__name__, value)
    if isinstance(value, tuple):
        return tuple(_describe(item, name, within) for item in value)
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        return (str(value.dtype), value.shape, value.tobytes())
    if type(value).__name__ == "ufunc":
        return ("ufunc", value.__name__)
    raise UsageError(
        f"custom_op {name!r} refers to {value!r}, a {type(value).__name__}, which ranks cannot "
        "compare; refer to numbers, arrays, functions and modules only"
    )


def _describe_code(code: types.CodeType, name: str) -> object:
    if any(instruction.opname == "RAISE_VARARGS" for instruction in dis.get_instructions(code)):
        raise UsageError(
            f"custom_op {name!r} raises, in {code.co_name}, and nobody could catch that; return "
            "nan or another value instead (assert raises, too)"
        )
    constants = [
        _describe_code(constant, name)
        if isinstance(constant, types.CodeType)
        else sorted(map(repr, constant))
        if isinstance(constant, frozenset)
        else constant
        for constant in code.co_consts
    ]
    return (code.co_code, code.co_names, code.co_argcount, constants)


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _compile(function: Function, name: str, dtype: DType) -> Any:
    try:
        numba: Any = importlib.import_module("numba")
    except ImportError as error:
        raise UsageError(
            f"custom_op {name!r} is compiled by Numba, which cannot be imported ({error}); "
            "pip install 'ringdl[numba]'"
        ) from error
    scalar = numba.njit(function, error_model="numpy")

    def loop(into: Any, other: Any, count: Any) -> None:
        for i in range(count):
            into[i] = scalar(into[i], other[i])

    def loop_of_bool(into: Any, other: Any, count: Any) -> None:
        for i in range(count):
            into[i] = 1 if scalar(into[i] != 0, other[i] != 0) else 0

    is_bool = dtype == DType.bool
    element = numba.types.boolean if is_bool else getattr(numba.types, dtype.name)
    pointer = numba.types.CPointer(numba.types.uint8 if is_bool else element)
    signature = numba.types.void(pointer, pointer, numba.types.int64)
    try:
        scalar.compile((element, element))
        result = scalar.nopython_signatures[0].return_type
        if isinstance(result, (numba.types.Integer, numba.types.Float, numba.types.Boolean)):
            return numba.cfunc(signature, error_model="numpy")(loop_of_bool if is_bool else loop)
    except Exception as error:  # Numba raises errors of all kinds
        raise UsageError(
            f"custom_op {name!r} cannot be compiled for {dtype.name}: {_first_reason(error)}"
        ) from error
    raise UsageError(
        f"custom_op {name!r} cannot be compiled for {dtype.name}: it returns {result}, not a number"
    )


def _first_reason(error: Exception) -> str:
    """The first line of Numba's message that says what is wrong, not where Numba was."""
    import re

    plain = re.sub("\x1b\\[[0-9;]*m", "", str(error))  # in colours, where colorama is installed
    lines = [line.strip() for line in plain.splitlines()]
    said = [line for line in lines if line and not line.startswith("Failed in nopython mode")]
    return said[0] if said else type(error).__name__
