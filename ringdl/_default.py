"""The default communicator: `init`, `shutdown`, and its collectives as functions of the module."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import Any

from ringdl import _engine, _mpi
from ringdl._communicator import Communicator
from ringdl._engine import Reduction
from ringdl._errors import UsageError
from ringdl._launch import detect
from ringdl._settings import Settings, default_segment_bytes, read_settings
from ringdl._work import Work

_default: Communicator | None = None
_hooked = False


def init(comm: Any = None) -> Communicator:
    """Make the default communicator. Collective; calling it again changes nothing.

    Without an argument: all ranks that the launcher (mpirun, srun) started, or this process alone
    if there is none. MPI is loaded only if a launcher or a communicator is there.

    Args:
        comm: an mpi4py communicator, which is duplicated; default MPI.COMM_WORLD.

    Returns:
        The default communicator.

    Raises:
        UsageError: the launcher does not belong to the MPI library, or there is no usable one.
    """
    global _default
    if _default is not None:
        return _default
    launcher = detect(os.environ)
    settings = read_settings(os.environ)
    if comm is None and launcher is None and "mpi4py.MPI" not in sys.modules:
        engine = _engine.alone()
        engine.set_segment_bytes(settings.segment_bytes or default_segment_bytes(1))
        _default = Communicator(engine, settings=settings)
    else:
        _default = _init_over_mpi(_mpi.load_mpi(launcher), comm, settings)
    return _default


def _init_over_mpi(mpi: Any, comm: Any, settings: Settings) -> Communicator:
    global _hooked
    comm = mpi.COMM_WORLD if comm is None else comm
    hosts = _mpi.find_hosts(mpi, comm)
    engine = _mpi.open_engine(mpi, comm)
    engine.set_may_spin(hosts.cores >= hosts.local_size)
    communicator = Communicator(
        engine,
        settings=settings,
        local_rank=hosts.local_rank,
        local_size=hosts.local_size,
        host_rank=hosts.host_rank,
        host_count=hosts.host_count,
    )
    agreed = communicator.broadcast_object(settings, name="ringdl.settings")
    communicator._timeout = agreed.timeout
    engine.set_segment_bytes(agreed.segment_bytes or default_segment_bytes(hosts.host_count))
    if communicator.size > 1 and not _hooked:
        _hooked = True
        _mpi.abort_on_uncaught_error(mpi, mpi.COMM_WORLD.Get_rank())
        _warn_of_threads(hosts)
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # the last registered is the first to be called
    return communicator


def _warn_of_threads(hosts: _mpi.Hosts) -> None:
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(text) if text.isdigit() else len(os.sched_getaffinity(0))
    if hosts.local_rank == 0 and threads > 1 and threads * hosts.local_size > hosts.cores:
        warnings.warn(
            f"{hosts.local_size} ranks on this host would compute with {threads} threads each, on "
            f"{hosts.cores} cores; set OMP_NUM_THREADS={max(1, hosts.cores // hosts.local_size)}",
            RuntimeWarning,
            stacklevel=4,
        )


def shutdown() -> None:
    """End the default communicator; `init` may be called again. Collective.

    Waits for the works in flight and until all ranks have called it. Also called when the program
    ends. Never finalizes MPI.
    """
    global _default
    if _default is not None:
        communicator, _default = _default, None
        communicator.shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not since."""
    return _default is not None


def get_communicator() -> Communicator:
    """The default communicator.

    Raises:
        UsageError: `init` was not called.
    """
    if _default is None:
        raise UsageError("ringdl is not initialized; call ringdl.init() first")
    return _default


def rank() -> int:
    """See `Communicator.rank`."""
    return get_communicator().rank


def size() -> int:
    """See `Communicator.size`."""
    return get_communicator().size


def local_rank() -> int:
    """See `Communicator.local_rank`."""
    return get_communicator().local_rank


def local_size() -> int:
    """See `Communicator.local_size`."""
    return get_communicator().local_size


def host_rank() -> int:
    """See `Communicator.host_rank`."""
    return get_communicator().host_rank


def host_count() -> int:
    """See `Communicator.host_count`."""
    return get_communicator().host_count


def stats() -> dict[str, int | float]:
    """See `Communicator.stats`."""
    return get_communicator().stats()


def allreduce(
    x: Any,
    op: Reduction = Reduction.Average,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """See `Communicator.allreduce`."""
    return get_communicator().allreduce(x, op, name, timeout)


def allreduce_(
    x: Any,
    op: Reduction = Reduction.Average,
    name: str | None = None,
    timeout: float | None = None,
) -> Any:
    """See `Communicator.allreduce_`."""
    return get_communicator().allreduce_(x, op, name, timeout)


def allreduce_async(x: Any, op: Reduction = Reduction.Average, name: str | None = None) -> Work:
    """See `Communicator.allreduce_async`."""
    return get_communicator().allreduce_async(x, op, name)


def allreduce_async_(x: Any, op: Reduction = Reduction.Average, name: str | None = None) -> Work:
    """See `Communicator.allreduce_async_`."""
    return get_communicator().allreduce_async_(x, op, name)


def allgather(x: Any, name: str | None = None, timeout: float | None = None) -> Any:
    """See `Communicator.allgather`."""
    return get_communicator().allgather(x, name, timeout)


def broadcast(x: Any, root: int = 0, name: str | None = None, timeout: float | None = None) -> Any:
    """See `Communicator.broadcast`."""
    return get_communicator().broadcast(x, root, name, timeout)


def broadcast_(x: Any, root: int = 0, name: str | None = None, timeout: float | None = None) -> Any:
    """See `Communicator.broadcast_`."""
    return get_communicator().broadcast_(x, root, name, timeout)


def barrier(name: str | None = None, timeout: float | None = None) -> None:
    """See `Communicator.barrier`."""
    get_communicator().barrier(name, timeout)


def broadcast_object(
    obj: Any, root: int = 0, name: str | None = None, timeout: float | None = None
) -> Any:
    """See `Communicator.broadcast_object`."""
    return get_communicator().broadcast_object(obj, root, name, timeout)
