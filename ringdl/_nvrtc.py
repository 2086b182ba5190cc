"""Kernels for a CUDA device, compiled where ringdl is used, with NVRTC.

That is NVIDIA's compiler as a library: the wheels nvidia-cuda-nvrtc bring it, and so does a CUDA
toolkit. It needs no headers and some seconds; what it makes is kept in ~/.cache/ringdl.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from pathlib import Path

from ringdl import _engine, _nvidia
from ringdl._errors import Error

_OPTIONS = [b"-std=c++20", b"-fmad=false", b"-default-device"]


def kernels(capability: int, driver: int) -> bytes:
    """Compiled kernels, as `_engine.cuda_use_kernels` takes them.

    Args:
        capability: the device's compute capability, as 90.
        driver: the newest CUDA that the driver runs, as 13010.

    Raises:
        Error: no NVRTC of that CUDA or an earlier one is found, or it fails.
    """
    sources = _engine.cuda_kernel_sources()
    path = _nvidia.compiler("NVRTC", "libnvrtc.so", driver, "nvidia-cuda-nvrtc")
    digest = hashlib.blake2b(repr((path.name, _OPTIONS, sources)).encode(), digest_size=12)
    kept = _cache() / f"kernels-{digest.hexdigest()}-sm{capability}.cubin"
    try:
        return kept.read_bytes()
    except OSError:
        image = _compiled(path, capability, sources)
    _keep(kept, image)
    return image


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringdl"


def _keep(path: Path, image: bytes) -> None:
    """For the next process, if the folder can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(image)
        os.replace(file.name, path)
    except OSError:
        pass


def _compiled(path: Path, capability: int, sources: list[tuple[str, bytes]]) -> bytes:
    nvrtc = ctypes.CDLL(str(path))
    (name, text), *headers = sources
    program = ctypes.c_void_p()

    def check(result: int) -> None:
        if result != 0:
            log = taken(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog) if program else b""
            raise Error(f"NVRTC ({path}) fails with {result}: {log.decode(errors='replace')}")

    def taken(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer) -> bytes:
        size = ctypes.c_size_t()
        size_of(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        get(program, buffer)
        return buffer.raw

    texts = (ctypes.c_char_p * len(headers))(*[header for _, header in headers])
    names = (ctypes.c_char_p * len(headers))(*[each.encode() for each, _ in headers])
    options = [b"--gpu-architecture=sm_%d" % capability, *_OPTIONS]
    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), text, name.encode(), len(headers), texts, names
        )
    )
    try:
        given = (ctypes.c_char_p * len(options))(*options)
        check(nvrtc.nvrtcCompileProgram(program, len(options), given))
        return taken(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
