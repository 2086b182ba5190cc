"""Torch's tensors, in the CPU's memory and on CUDA devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ringdl import _cuda
from ringdl._engine import DeviceArray, DType
from ringdl._errors import UsageError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_IN_NUMPY = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)
"""The dtypes that both ringdl and NumPy have."""


def for_engine(x: torch.Tensor, *, written: bool) -> tuple[torch.Tensor, DType | None]:
    """See `ringdl._arrays.Framework.for_engine`."""
    del written
    if x.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the tensor is on device {x.device}, and ringdl knows the memory of the CPU and of "
            "CUDA devices only; move it there first"
        )
    if x.layout != torch.strided:
        raise UsageError(f"the tensor has layout {x.layout}; pass a dense one (.to_dense())")
    _refuse_freed(x)
    return x.detach().resolve_neg().contiguous(), None


def _refuse_freed(x: torch.Tensor) -> None:
    """PyTorch itself would read what is not there."""
    if x.data_ptr() == 0 and x.numel() > 0:
        raise UsageError("the tensor has no memory: its storage was freed")


def handed(array: torch.Tensor) -> torch.Tensor | DeviceArray:
    """See `ringdl._arrays.Framework.handed`."""
    if array.device.type == "cpu":
        return array
    if torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "a CUDA graph is being captured, and it cannot hold what passes between ranks; call "
            "ringdl outside of the capture"
        )
    stream = torch.cuda.current_stream(array.device).cuda_stream
    return _cuda.described(
        array.data_ptr(), dtype_name(array), array.shape, array.device.index, stream, array
    )


def in_numpy(x: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """See `ringdl._arrays.Framework.in_numpy`."""
    is_plain = (
        type(x) in _PLAIN
        and x.dtype in _IN_NUMPY
        and x.device.type == "cpu"
        and x.layout == torch.strided
        and x.is_contiguous()
        and not x.is_neg()
        and (x.data_ptr() != 0 or x.numel() == 0)
    )
    return x.detach().numpy() if is_plain else None


def write_back(array: torch.Tensor, given: torch.Tensor) -> None:
    """See `ringdl._arrays.Framework.write_back`."""
    if array.data_ptr() != given.data_ptr():
        given.detach().copy_(array)
        _wait_for(given)


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """See `ringdl._arrays.Framework.copy_of`."""
    if x.layout != torch.strided:
        return x  # for_engine() reports what is wrong with it
    if x.device.type == "cpu":
        _refuse_freed(x)
    return x.detach().clone(memory_format=torch.contiguous_format)


def empty_like(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """See `ringdl._arrays.Framework.empty_like`."""
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)


def from_bytes(
    like: torch.Tensor, shape: Sequence[int], data: np.ndarray[Any, np.dtype[np.uint8]]
) -> torch.Tensor:
    """See `ringdl._arrays.Framework.from_bytes`."""
    return torch.from_numpy(data).view(like.dtype).reshape(tuple(shape)).to(like.device)


def concatenated(arrays: Sequence[torch.Tensor]) -> torch.Tensor:
    """See `ringdl._arrays.Framework.concatenated`."""
    return torch.cat([array.reshape(-1) for array in arrays])


def distribute(flat: torch.Tensor, arrays: Sequence[torch.Tensor]) -> None:
    """See `ringdl._arrays.Framework.distribute`."""
    begin = 0
    for array in arrays:
        array.copy_(flat[begin : begin + array.numel()].view(array.shape))
        begin += array.numel()
    _wait_for(flat)


def _wait_for(tensor: torch.Tensor) -> None:
    """Until it is written: who uses it next may do so in any stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def dtype_name(x: torch.Tensor) -> str:
    """See `ringdl._arrays.Framework.dtype_name`."""
    return str(x.dtype).removeprefix("torch.")
