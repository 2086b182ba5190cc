"""JAX's arrays, which do not change: collectives return new ones.

On a device they are ordered by DLPack's rule: who takes an array names a stream, and JAX makes it
wait for the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ringdl import _cuda, _engine
from ringdl._arrays import Own
from ringdl._engine import DType
from ringdl._errors import UsageError
from ringdl._frameworks import cuda
from ringdl._frameworks import numpy as of_numpy


class _Bytes:
    """An array's memory on the CPU, which NumPy's view of it keeps: it is not donated meanwhile."""

    def __init__(self, array: Any) -> None:
        self.held = array, np.asarray(array)
        address = array.unsafe_buffer_pointer()
        self.__array_interface__ = {
            "version": 3,
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def for_engine(x: Any, *, written: bool) -> tuple[Any, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`: the same memory, in NumPy's words or ringdl's."""
    if isinstance(x, jax.core.Tracer):
        raise UsageError(
            "the array is a tracer: inside of jax.jit, grad and vmap call ringdl.jax's functions, "
            "as ringdl.jax.allreduce"
        )
    if written:
        raise UsageError(
            "an array of JAX does not change; call the form without an underscore, which returns a "
            "new one"
        )
    if len(x.devices()) > 1:
        raise UsageError(
            f"the array is spread over {len(x.devices())} devices; pass the part on each "
            "(x.addressable_shards)"
        )
    if _is_on_device(x):
        _refuse_layout(x)
        export = x.__dlpack__(stream=_cuda.DEFAULT_STREAM)  # which waits for it now
        address = x.unsafe_buffer_pointer()
        (its,) = x.devices()
        device = _engine.cuda_device_of(address) if address else its.local_hardware_id
        return _cuda.Array(x.shape, x.dtype, device, (address, (x, export))), None
    x.block_until_ready()
    if not _is_by_rows(x):
        return of_numpy.for_engine(np.array(x, order="C"), written=False)
    flat = np.asarray(_Bytes(x)) if x.nbytes > 0 else np.empty(0, np.uint8)
    return of_numpy.for_engine(flat.view(x.dtype).reshape(x.shape), written=False)


def handed(array: Any) -> Any:
    """See `ringdl._arrays.Framework.handed`."""
    return array if isinstance(array, np.ndarray) else cuda.handed(array)


def in_numpy(x: Any) -> None:
    """See `ringdl._arrays.Framework.in_numpy`."""


def write_back(array: Any, given: Any) -> None:
    """See `ringdl._arrays.Framework.write_back`: they share memory."""


def copy_of(x: Any) -> Any:
    """See `ringdl._arrays.Framework.copy_of`."""
    if isinstance(x, jax.core.Tracer):
        return x  # for_engine() reports what is wrong with it
    return Own(jax.numpy.array(x, copy=True))


def empty_like(like: Any, shape: Sequence[int]) -> Any:
    """See `ringdl._arrays.Framework.empty_like`."""
    return jax.numpy.empty(tuple(shape), like.dtype, device=_place_of(like))


def from_bytes(like: Any, shape: Sequence[int], data: np.ndarray[Any, Any]) -> Any:
    """See `ringdl._arrays.Framework.from_bytes`."""
    return jax.device_put(data.view(like.dtype).reshape(tuple(shape)), _place_of(like))


def concatenated(arrays: Sequence[Any]) -> Any:
    """See `ringdl._arrays.Framework.concatenated`."""
    if isinstance(arrays[0], np.ndarray):
        return of_numpy.concatenated(arrays)
    return cuda.concatenated(arrays)


def distribute(flat: Any, arrays: Sequence[Any]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    if isinstance(flat, np.ndarray):
        of_numpy.distribute(flat, arrays)
    else:
        cuda.distribute(flat, arrays)


def dtype_name(x: Any) -> str:
    """See `ringdl._arrays.Framework.dtype_name`."""
    return str(x.dtype)


def _place_of(like: Any) -> Any:
    """What a new array is committed to; nothing, if `like` is not: it may meet others anywhere."""
    return like.sharding if like.committed else None


def _is_by_rows(x: Any) -> bool:
    layout = x.format.layout
    return layout is None or tuple(layout.major_to_minor) == tuple(range(x.ndim))


def _refuse_layout(x: Any) -> None:
    if not _is_by_rows(x):
        raise UsageError(
            f"the array lies in the order {x.format.layout.major_to_minor} of its axes; pass one "
            "that lies by rows"
        )


def _is_on_device(x: Any) -> bool:
    (device,) = x.devices()
    if device.platform not in ("cpu", "gpu"):
        raise UsageError(
            f"the array is on a {device.platform}, and ringdl knows the memory of the CPU and of "
            "CUDA devices only; move it there first (jax.device_put)"
        )
    return str(device.platform) == "gpu"
