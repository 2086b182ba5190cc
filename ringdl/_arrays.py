"""Arrays of any framework as the engine takes them, and back."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ringdl._engine import DType
from ringdl._errors import UsageError

if TYPE_CHECKING:
    import numpy as np


class Array(Protocol):
    """An array that collectives take and return: of NumPy, PyTorch, JAX, CuPy."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...


AnyArray = TypeVar("AnyArray", bound=Array)


class Framework(Protocol):
    """A framework's module in ``ringdl._frameworks``: it has these functions."""

    def for_engine(self, x: Any, *, written: bool) -> tuple[Any, DType | None]:
        """Contiguous memory with the elements of an array: itself wherever it can be.

        Args:
            x: an array of this framework, of any shape and strides.
            written: whether the engine will write the result into it.

        Returns:
            The memory, and the dtype if it cannot say so itself (bfloat16 in NumPy).

        Raises:
            UsageError: it is on a device, read-only, or in foreign byte order.
        """

    def handed(self, array: Any) -> Any:
        """What the engine takes for what `for_engine` returned: that, or a `DeviceArray`.

        The latter names the stream of the framework in which the array was made; call it in the
        thread of the collective.

        Raises:
            UsageError: that stream is being captured.
        """

    def in_numpy(self, x: Any) -> np.ndarray | None:
        """The same memory as a NumPy array, if that is contiguous and quickly found."""

    def write_back(self, array: Any, given: Any) -> None:
        """Copy the result of `for_engine` back into its array, unless they share memory."""

    def copy_of(self, x: Any) -> Any:
        """A contiguous copy; `Own` if arrays of this kind do not change."""

    def empty_like(self, like: Any, shape: Sequence[int]) -> Any:
        """A new array of the dtype of `like`."""

    def from_bytes(self, like: Any, shape: Sequence[int], data: np.ndarray) -> Any:
        """An array of the dtype of `like` over memory that is given as bytes."""

    def concatenated(self, arrays: Sequence[Any]) -> Any:
        """The elements of arrays of one dtype, one after the other, in a flat one."""

    def distribute(self, flat: Any, arrays: Sequence[Any]) -> None:
        """Copy the elements of a flat array into others, one after the other."""

    def dtype_name(self, x: Any) -> str:
        """The dtype's name, as in `DType` if it is there."""


@dataclass(slots=True)
class Own:
    """A new array that nobody else has seen: the engine may write to it, even if others may not."""

    array: Any


_FRAMEWORKS = {
    ("numpy", "ndarray"): "numpy",
    ("torch", "Tensor"): "torch",
    ("cupy", "ndarray"): "cupy",
    ("jaxlib", "ArrayImpl"): "jax",
    ("jax", "Tracer"): "jax",
    ("tensorflow", "Tensor"): "tensorflow",
}
"""The module in _frameworks, by package and class: all its arrays are instances of that.

Those of other classes that say where on a device they lie are `cuda`'s.
"""

_found: dict[type, Framework] = {}
"""The framework of each class of arrays seen so far."""


def framework_of(x: Any) -> Framework | None:
    """The framework that has made an array; None if it is no array."""
    kind = type(x)
    framework = _found.get(kind)
    if framework is None:
        for base in kind.__mro__:
            name = _FRAMEWORKS.get((base.__module__.partition(".")[0], base.__name__))
            if name is not None:
                break
        else:
            name = "cuda" if hasattr(x, "__cuda_array_interface__") else None
        if name is not None:
            framework = importlib.import_module(f"ringdl._frameworks.{name}")
            _found[kind] = framework
    return framework


@dataclass(slots=True)
class Operand:
    """One array on its way into the engine.

    Attributes:
        given: what the caller passed.
        array: contiguous memory that the engine works on: `given` itself wherever it can be.
        handed: `array` as the engine takes it: of a device, where it lies.
        dtype: what the elements are if `array` cannot say so (bfloat16 in NumPy), else None.
        framework: whose arrays they are.
    """

    given: Any
    array: Any
    handed: Any
    dtype: DType | None
    framework: Framework

    def write_back(self) -> Any:
        """Copy the result to the caller's array, unless it is there; returns that array."""
        if self.array is not self.given:
            self.framework.write_back(self.array, self.given)
        return self.given


def operand(x: Any, *, written: bool) -> Operand:
    """Take an array as it is; a non-contiguous one is copied, and written back in the end.

    Args:
        x: an array of any shape and strides, in the memory of the CPU or of a CUDA device; or Own.
        written: whether the engine will write the result into it.

    Raises:
        UsageError: not an array, on a device, read-only, foreign byte order, or no such dtype.
    """
    if isinstance(x, Own):
        x, written = x.array, False
    framework = framework_of(x)
    if framework is None:
        raise UsageError(
            f"expected an array of NumPy, PyTorch, JAX or CuPy, not {type(x).__name__}; "
            "wrap numbers and lists with numpy.asarray"
        )
    array, dtype = framework.for_engine(x, written=written)
    return Operand(x, array, framework.handed(array), dtype, framework)


def as_it_lies(x: Any) -> Any:
    """What the engine takes for a dense array, in the order of its memory, whatever the strides."""
    return _framework(x).handed(x)


def in_numpy(x: Any) -> np.ndarray | None:
    """See `Framework.in_numpy`; None if it is no array."""
    framework = framework_of(x)
    return None if framework is None else framework.in_numpy(x)


def copy_of(x: Any) -> Any:
    """A contiguous copy of the same kind, for the forms that leave their argument alone.

    It is `Own` where arrays of that kind do not change.
    """
    framework = framework_of(x)
    if framework is not None:
        return framework.copy_of(x)
    numpy = sys.modules.get("numpy")
    if isinstance(x, (int, float)) or (numpy is not None and isinstance(x, numpy.generic)):
        import numpy as np

        return np.array(x)
    return x  # operand() reports what is wrong with it


def gathered(like: Any, rows: int, data: np.ndarray) -> Any:
    """The bytes that a collective has collected, as `rows` rows of an array of the kind of `like`.

    Where rows are empty, `data` is not read.
    """
    if row_bytes(like) * rows == 0:
        return empty_like(like, rows)
    return _framework(like).from_bytes(like, (rows, *like.shape[1:]), data)


def empty_like(like: Any, rows: int) -> Any:
    """A new array of the kind of `like`, of another number of rows."""
    return _framework(like).empty_like(like, (rows, *like.shape[1:]))


def row_bytes(x: Any) -> int:
    """Bytes of one row, or of the whole array if it has no axes."""
    dtype = x.dtype
    item_bytes = dtype.itemsize if hasattr(dtype, "itemsize") else dtype.size
    return int(math.prod(x.shape[1:])) * int(item_bytes)


def dtype_of(operand: Operand) -> DType:
    """What the elements are.

    Raises:
        UsageError: there is no such dtype here.
    """
    if operand.dtype is not None:
        return operand.dtype
    name = operand.framework.dtype_name(operand.array)
    if name not in DType.__members__:
        raise UsageError(
            f"arrays of dtype {name} are not supported; use one of {', '.join(DType.__members__)}"
        )
    return DType[name]


def _framework(x: Any) -> Framework:
    framework = framework_of(x)
    assert framework is not None  # operand() has checked it
    return framework
