"""Files that are mapped into memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def map_bytes(file: Path) -> NDArray[np.uint8]:
    """The bytes of a file, which cannot be written to, as long as the array or a view of it lives.

    The file is closed at once. (Python's ``mmap`` keeps it open, before 3.13 in any case, and a
    process may have some thousand files open.)

    Raises:
        OSError: it cannot be read or mapped.
    """
    import numpy as np

    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size == 0:
            return np.empty(0, np.uint8)
        libc = _libc()
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, opened.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(file))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    mapped: NDArray[np.uint8] = np.frombuffer(memoryview(memory).toreadonly(), np.uint8)
    return mapped


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
