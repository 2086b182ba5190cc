"""NVIDIA's NCCL, where it can be loaded: an allreduce of arrays on devices, between hosts as well.

As with MPI's own allreduce, calls are matched by their order, and nothing else may be in flight.
Communicators do not block (NCCL 2.14): what waits for other ranks has a timeout.
"""

from __future__ import annotations

import ctypes
import importlib.util
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringdl import _engine
from ringdl._engine import DeviceArray, Reduction
from ringdl._errors import Error, StallError, UsageError

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

_SUCCESS, _IN_PROGRESS = 0, 7
_TYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7}
_TYPES |= {"float64": 8, "bfloat16": 9}
_OPERATIONS = {Reduction.Sum: 0, Reduction.Product: 1, Reduction.Max: 2, Reduction.Min: 3}
_OPERATIONS |= {Reduction.Average: 4}
_LOOK_SECONDS = 1e-3
"""How often whoever waits asks NCCL for errors; in between it asks the device alone."""


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.14: later versions take it, and know by its version what it lacks."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def library() -> tuple[Any, str]:
    """The library, or None and why not: what torch has loaded, the system's, or its wheel's."""
    names = ["libnccl.so.2"]
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        names.append(str(Path(folder, "nccl", "lib", "libnccl.so.2")))
    why_not = ""
    for name in names:
        try:
            loaded = ctypes.CDLL(name)
        except OSError as error:
            why_not = why_not or str(error)
            continue
        if hasattr(loaded, "ncclCommInitRankConfig"):
            loaded.ncclGetErrorString.restype = ctypes.c_char_p
            return loaded, ""
        why_not = f"{name} is older than NCCL 2.14"
    return None, why_not


def version() -> str:
    """That of the library; empty if there is none."""
    loaded, _ = library()
    if loaded is None:
        return ""
    number = ctypes.c_int()
    loaded.ncclGetVersion(ctypes.byref(number))
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"


class Group:
    """NCCL's communicator of the ranks of one of ringdl's, each with a device of its own."""

    def __init__(self, communicator: Communicator, device: int, timeout: float) -> None:
        """Collective.

        Raises:
            UsageError: on all ranks, if one has no NCCL, or two share a device.
            StallError: some rank does not come.
        """
        self.is_aborted = False
        """It cannot be used any more."""
        self._library, why_not = library()
        bus = _engine.cuda_devices()[device].bus
        own = (communicator._hosts()[communicator.rank], bus, why_not)
        first: dict[tuple[Any, ...], int] = {}
        for rank, (host, its_bus, its_why_not) in enumerate(communicator.allgather_object(own)):
            if its_why_not:
                raise UsageError(f"rank {rank} has no NCCL: {its_why_not}; take another algorithm")
            if (other := first.setdefault((host, its_bus), rank)) != rank:
                raise UsageError(
                    f"ranks {other} and {rank} share a CUDA device, and NCCL needs one for each "
                    "rank; take another algorithm, or start fewer ranks"
                )
        identity = _Id()
        if communicator.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(identity)), "ncclGetUniqueId")
        identity = _Id.from_buffer_copy(communicator.broadcast_object(bytes(identity)))
        self._handle = ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        with _engine.CudaCurrent(device):
            result = self._library.ncclCommInitRankConfig(
                ctypes.byref(self._handle),
                communicator.size,
                identity,
                communicator.rank,
                ctypes.byref(config),
            )
        self._finish(result, "ncclCommInitRankConfig", timeout, lambda: True)

    def allreduce(self, array: DeviceArray, op: Reduction, timeout: float) -> None:
        """In place, after what is in the array's stream; returns once the result is there.

        Raises:
            UsageError: NCCL has no such dtype, or no such reduction of it.
            StallError: it took longer; the communicator cannot be used any more.
        """
        dtype, count = array.dtype.name, 1
        for extent in array.shape:
            count *= extent
        is_averaged_integer = op == Reduction.Average and "float" not in dtype
        if dtype not in _TYPES or op not in _OPERATIONS or is_averaged_integer:
            raise UsageError(
                f"NCCL has no allreduce of {dtype} by {op.name}; take another algorithm"
            )
        address, stream = ctypes.c_void_p(array.address), ctypes.c_void_p(array.stream)
        with _engine.CudaCurrent(array.device):
            result = self._library.ncclAllReduce(
                address,
                address,
                ctypes.c_size_t(count),
                _TYPES[dtype],
                _OPERATIONS[op],
                self._handle,
                stream,
            )
        self._finish(result, "ncclAllReduce", timeout, lambda: True)
        mark = _engine.cuda_mark(array.device, array.stream)
        self._finish(_SUCCESS, "ncclAllReduce", timeout, mark.is_passed)

    def _finish(self, result: int, call: str, timeout: float, is_over: Callable[[], bool]) -> None:
        """Wait until NCCL has begun what was asked for, and `is_over`."""
        deadline = time.monotonic() + timeout
        look, error = 0.0, ctypes.c_int(result)
        if result not in (_SUCCESS, _IN_PROGRESS):
            self._check(result, call)
        while error.value == _IN_PROGRESS or not is_over():
            now = time.monotonic()
            if now > deadline:
                self._abort()
                raise StallError(
                    f"{call} did not end within {timeout} s: some rank has ended, or does not "
                    "call; NCCL's communicator was aborted, and is made anew by the next call"
                )
            if now > look:
                look = now + _LOOK_SECONDS
                self._library.ncclCommGetAsyncError(self._handle, ctypes.byref(error))
                if error.value not in (_SUCCESS, _IN_PROGRESS):
                    self._abort()
                    self._check(error.value, call)

    def _abort(self) -> None:
        self.is_aborted = True
        self._library.ncclCommAbort(self._handle)

    def _check(self, result: int, call: str) -> None:
        if result == _SUCCESS:
            return
        text = self._library.ncclGetErrorString(result).decode(errors="replace")
        raise Error(f"{call}: {text}; NCCL_DEBUG=WARN says more, and another algorithm goes on")
