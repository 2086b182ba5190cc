"""A user's reduction for CUDA devices: compiled by numba-cuda, loaded beside ringdl's kernels."""

from __future__ import annotations

import ctypes
import importlib
import re
from typing import TYPE_CHECKING, Any

from ringdl import _engine, _nvidia
from ringdl._engine import DType
from ringdl._errors import Error

if TYPE_CHECKING:
    from ringdl._custom_op import Function

_PTX = 2
"""What nvJitLink is given: NVJITLINK_INPUT_PTX."""


def load(function: Function, dtype: DType, device: int, on_cpu: int) -> None:
    """Make a device ready to reduce by it.

    Args:
        function: of two scalars, which the CPU's kernel was compiled of already.
        dtype: of the arrays' elements.
        device: its number in this process.
        on_cpu: the address of the CPU's kernel, by which the engine finds that of the device.

    Raises:
        Exception: Numba or NVIDIA's linker is missing, or refuses it.
    """
    version, _ = _engine.cuda_driver()
    capability = _engine.cuda_devices()[device].capability
    image, name = compiled(function, dtype, capability, version)
    _engine.cuda_use_custom(device, on_cpu, image, name)


def compiled(function: Function, dtype: DType, capability: int, driver: int) -> tuple[bytes, str]:
    """The kernel, as the driver takes it, and its name.

    It takes what the CPU's does: ``(into, from, count)``, and does
    ``into[i] = op(into[i], from[i])``; its threads share out the elements.

    Args:
        function: see `load`.
        dtype: see `load`.
        capability: the device's compute capability, as 90.
        driver: the newest CUDA that the driver runs, as 13010.
    """
    install = f"pip install 'numba-cuda[cu{driver // 1000}]'"
    try:
        cuda: Any = importlib.import_module("numba.cuda")
    except ImportError as error:
        raise Error(f"{error}; {install}") from error
    # Numba brings an older one. A .pth file puts numba-cuda's in its place, in site-packages alone.
    if getattr(cuda, "implementation", "NVIDIA") != "NVIDIA":
        raise Error(
            "numba.cuda is Numba's own, not that of numba-cuda; "
            f"{install} into the interpreter's site-packages"
        )
    numba: Any = importlib.import_module("numba")
    scalar = cuda.jit(function, device=True)

    def kernel(into: Any, other: Any, count: Any) -> None:
        i = cuda.grid(1)
        while i < count:
            into[i] = scalar(into[i], other[i])
            i += cuda.gridsize(1)

    def kernel_of_bool(into: Any, other: Any, count: Any) -> None:
        i = cuda.grid(1)
        while i < count:
            into[i] = 1 if scalar(into[i] != 0, other[i] != 0) else 0
            i += cuda.gridsize(1)

    is_bool = dtype == DType.bool
    pointer = numba.types.CPointer(getattr(numba.types, "uint8" if is_bool else dtype.name))
    text, _ = cuda.compile(
        kernel_of_bool if is_bool else kernel,
        numba.types.void(pointer, pointer, numba.types.int64),
        device=False,
        abi="numba",
        cc=divmod(capability, 10),
        output="ptx",
    )
    entry = re.search(r"\.visible\s+\.entry\s+(\w+)", text)
    if entry is None:
        raise Error("Numba has made no kernel of it")
    return _linked(text.encode(), capability, driver), entry[1]


def _linked(ptx: bytes, capability: int, driver: int) -> bytes:
    """Code for the device: a driver refuses what a newer compiler has made, unless it is linked."""
    path = _nvidia.compiler("nvJitLink", "libnvJitLink.so", driver, "nvidia-nvjitlink")
    link = ctypes.CDLL(str(path))
    handle, size = ctypes.c_void_p(), ctypes.c_size_t()

    def check(result: int) -> None:
        if result == 0:
            return
        link.nvJitLinkGetErrorLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        link.nvJitLinkGetErrorLog(handle, log)
        raise Error(f"nvJitLink ({path}) fails with {result}: {log.value.decode(errors='replace')}")

    options = (ctypes.c_char_p * 1)(b"-arch=sm_%d" % capability)
    result = link.nvJitLinkCreate(ctypes.byref(handle), 1, options)
    if result != 0:
        raise Error(f"nvJitLink ({path}) makes no code for compute capability {capability / 10}")
    try:
        check(link.nvJitLinkAddData(handle, _PTX, ptx, ctypes.c_size_t(len(ptx)), b"custom_op"))
        check(link.nvJitLinkComplete(handle))
        check(link.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        check(link.nvJitLinkGetLinkedCubin(handle, code))
        return code.raw
    finally:
        link.nvJitLinkDestroy(ctypes.byref(handle))
