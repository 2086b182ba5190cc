"""Whether the MPI library takes arrays on CUDA devices: what it says, and whether that is true."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringdl._communicator import Communicator


def is_said(communicator: Communicator) -> bool:
    """Whether the library of this rank says that it does, by ``MPIX_Query_cuda_support``."""
    if communicator._shared.mpi is None:
        return False
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and bool(query())


def tried(communicator: Communicator) -> str:
    """What is to be known of it, for people. Collective.

    Where all libraries say so, an array goes around the ranks; a library that errs may crash.
    """
    if communicator._shared.mpi is None:
        return "there is no MPI"
    if not all(communicator.allgather_object(is_said(communicator))):
        return "MPI does not say that it takes arrays on devices"
    import numpy as np
    from mpi4py import MPI

    from ringdl._cuda import Array

    world, device = communicator._shared.mpi, communicator.local_device
    sent, received = (Array((1000,), np.dtype(np.int32), device or 0) for _ in range(2))
    sent.set(np.full(1000, communicator.rank))
    left, right = (communicator.rank - 1) % world.size, (communicator.rank + 1) % world.size
    try:
        world.Sendrecv([sent, MPI.INT32_T], right, 0, [received, MPI.INT32_T], left, 0)
        is_right = bool((received.numpy() == left).all())
    except MPI.Exception:
        is_right = False
    if all(communicator.allgather_object(is_right)):
        return "MPI takes arrays on devices, too (tried)"
    return "MPI says that it takes arrays on devices, and does not (tried)"
