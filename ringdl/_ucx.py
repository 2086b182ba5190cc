"""What UCX is told before it begins. MPICH, and some builds of Open MPI, send through it."""

from __future__ import annotations

import ctypes
import os


def limit_notes() -> None:
    """Have it forget ranges of memory that were unmapped, each time that they are 256 MiB in all.

    Since its version 1.17 it notes them, some 150 bytes for each, until a message needs its cache
    of registered memory. On one host none does, so a process grew with each large array that it
    freed, and with each thread that ended. Older versions may warn that they do not use the
    variable. Open MPI loads UCX later, if at all: there it is left as it is.
    """
    try:
        ucp = ctypes.CDLL("libucp.so.0", os.RTLD_NOLOAD)
    except OSError:
        return
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(*map(ctypes.byref, (major, minor, release)))
    if (major.value, minor.value) >= (1, 17):
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "256M")
