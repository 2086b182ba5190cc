"""Arrays of the frameworks as the engine takes them, and back: NumPy, and torch on the CPU."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ringdl._engine import DType
from ringdl._errors import UsageError

if TYPE_CHECKING:
    import numpy as np


class Array(Protocol):
    """What collectives take, and return one of the same kind: a NumPy array, a torch tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> Any: ...


AnyArray = TypeVar("AnyArray", bound=Array)


@dataclass(slots=True)
class Operand:
    """One array on its way into the engine.

    Attributes:
        given: what the caller passed.
        array: contiguous memory that the engine works on: `given` itself wherever it can be.
        dtype: what the elements are if `array` cannot say so (bfloat16 in NumPy), else None.
    """

    given: Any
    array: Any
    dtype: DType | None

    def write_back(self) -> Any:
        """Bring the result to where the caller wants it; returns that array."""
        if self.array is not self.given and not _share_memory(self.array, self.given):
            if _is_tensor(self.given):
                self.given.detach().copy_(self.array)
            else:
                self.given.view(self.array.dtype)[...] = self.array
        return self.given


def operand(x: Any, *, written: bool) -> Operand:
    """Take an array as it is; a non-contiguous one is copied, and written back in the end.

    Args:
        x: a NumPy array or torch tensor in the CPU's memory, of any shape and strides.
        written: whether the engine will write the result into it.

    Raises:
        UsageError: not an array, on a device, read-only, foreign byte order, or no such dtype.
    """
    if _is_ndarray(x):
        if written and not x.flags.writeable:
            raise UsageError(
                "the array is read-only; pass a writable one, or use the form that copies"
            )
        if not x.dtype.isnative:
            raise UsageError(
                f"the array has foreign byte order (dtype {x.dtype.str}); convert it with "
                "x.astype(x.dtype.newbyteorder('='))"
            )
        contiguous = x if x.flags.c_contiguous else copy_of(x)
        if _is_bfloat16(x.dtype):
            return Operand(x, contiguous.view("uint16"), DType.bfloat16)
        if x.dtype.name not in DType.__members__:
            raise UsageError(
                f"arrays of dtype {x.dtype} are not supported; use one of "
                f"{', '.join(DType.__members__)}"
            )
        return Operand(x, contiguous, None)
    if _is_tensor(x):
        if x.device.type != "cpu":
            raise UsageError(
                f"the tensor is on device {x.device}, and this build of ringdl reduces arrays in "
                "the CPU's memory only; move it there with .cpu() first"
            )
        if x.layout != sys.modules["torch"].strided:
            raise UsageError(f"the tensor has layout {x.layout}; pass a dense one (.to_dense())")
        return Operand(x, x.detach().resolve_neg().contiguous(), None)
    raise UsageError(
        f"expected a NumPy array or a torch tensor, not {type(x).__name__}; "
        "wrap numbers and lists with numpy.asarray"
    )


def copy_of(x: Any) -> Any:
    """A contiguous copy of the same kind, for the forms that leave their argument alone."""
    import numpy as np

    if isinstance(x, np.ndarray):
        return np.array(x, order="C")
    if isinstance(x, (int, float, np.generic)):
        return np.array(x)
    if _is_tensor(x) and x.layout == sys.modules["torch"].strided:
        return x.detach().clone(memory_format=sys.modules["torch"].contiguous_format)
    return x  # operand() says what is wrong with it


def gathered(like: Any, rows: int, data: np.ndarray) -> Any:
    """The bytes that a collective has collected, as `rows` rows of an array of the kind of `like`.

    Where rows are empty, `data` is not looked at.
    """
    if row_bytes(like) * rows == 0:
        return empty_like(like, rows)
    shape = (rows, *like.shape[1:])
    if _is_tensor(like):
        return sys.modules["torch"].from_numpy(data).view(like.dtype).reshape(shape)
    return data.view(like.dtype).reshape(shape)


def empty_like(like: Any, rows: int) -> Any:
    """A new array of the kind of `like`, of another number of rows."""
    shape = (rows, *like.shape[1:])
    if _is_tensor(like):
        return sys.modules["torch"].empty(shape, dtype=like.dtype)
    return sys.modules["numpy"].empty(shape, dtype=like.dtype)


def row_bytes(x: Any) -> int:
    """Bytes of one row, or of the whole array if it has no axes."""
    item_bytes = int(x.element_size() if _is_tensor(x) else x.itemsize)
    return int(math.prod(x.shape[1:])) * item_bytes


def dtype_of(operand: Operand) -> DType:
    """What the elements are.

    Raises:
        UsageError: there is no such dtype here.
    """
    if operand.dtype is not None:
        return operand.dtype
    name = str(operand.array.dtype).removeprefix("torch.")
    if name not in DType.__members__:
        raise UsageError(
            f"arrays of dtype {name} are not supported; use one of {', '.join(DType.__members__)}"
        )
    return DType[name]


def _share_memory(a: Any, b: Any) -> bool:
    if _is_tensor(a):
        return bool(a.data_ptr() == b.data_ptr())
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def _is_ndarray(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # not loaded: nobody can have made such an array
    return numpy is not None and isinstance(x, numpy.ndarray)


def _is_tensor(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_bfloat16(dtype: np.dtype[Any]) -> bool:
    ml_dtypes = sys.modules.get("ml_dtypes")
    return ml_dtypes is not None and bool(dtype == ml_dtypes.bfloat16)
