"""What MPI training scripts ask about the job and about how the package was built."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ringdl
from ringdl._training.process_sets import ProcessSet, set_process_sets


def init(
    comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> ringdl.Communicator:
    """Make the default communicator, as `ringdl.init` does. Collective.

    Args:
        comm: an mpi4py communicator, or a list of ranks of MPI.COMM_WORLD, which call this alone.
            By default all ranks.
        process_sets: registered at once, and no others; the same on all ranks. "dynamic", which
            others need before `add_process_set`, means nothing here.

    Raises:
        UsageError: as in `ringdl.init` and `add_process_set`, or this rank is not in the list.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ringdl.UsageError(
            f"process_sets is {process_sets!r}; take a list of ProcessSet, 'dynamic' or None"
        )
    if comm is not None and not hasattr(comm, "Get_group"):
        comm = _communicator_of_ranks([*comm])
    communicator = ringdl.init(comm)
    if process_sets is not None and not isinstance(process_sets, str):
        set_process_sets(process_sets)
    return communicator


def _communicator_of_ranks(ranks: list[int]) -> Any:
    from ringdl import _launch, _mpi

    job = _launch.detect_store_job(os.environ)
    if ranks and job is not None:
        raise ringdl.UsageError(
            f"{job} has started this process, and a list of ranks is for those of mpirun; start "
            "with mpirun, or call init() on all ranks and make a process set of these"
        )
    return _mpi.communicator_of(ranks) if ranks else None


def cross_rank() -> int:
    """This host's number among those that have a rank of this local rank."""
    return _across().index(ringdl.rank())


def cross_size() -> int:
    """How many hosts have a rank of this local rank."""
    return len(_across())


def _across() -> list[int]:
    """The ranks with this one's local rank, one per host."""
    hosts = ringdl.get_communicator()._hosts()
    local = ringdl.local_rank()
    return [rank for rank, host in enumerate(hosts) if hosts[:rank].count(host) == local]


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of ranks."""
    hosts = ringdl.get_communicator()._hosts()
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether the ranks are MPI's and MPI gives MPI_THREAD_MULTIPLE."""
    if ringdl.get_communicator()._shared.mpi is None:
        return False
    from ringdl import _mpi

    return _mpi.has_thread_multiple()


def mpi_enabled() -> bool:
    """Whether messages go over MPI: not if this process is alone, without a launcher."""
    return ringdl.is_initialized() and ringdl.get_communicator()._shared.mpi is not None


def mpi_built() -> bool:
    """True: any MPI that mpi4py finds will do."""
    return True


def gloo_enabled() -> bool:
    """False: there is no Gloo."""
    return False


def gloo_built() -> bool:
    """False: there is no Gloo."""
    return False


def nccl_built() -> int:
    """NCCL's version as a number (22809 is 2.28.9); 0 if none can be loaded here.

    Gradients on devices go by it where `python -m ringdl tune --device cuda` has found it faster,
    or RINGDL_ALGORITHM=nccl.
    """
    from ringdl import _nccl

    return _nccl.number()


def ddl_built() -> bool:
    """False: there is no DDL."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL."""
    return False


def cuda_built() -> bool:
    """True: tensors may lie on CUDA devices."""
    return True


def rocm_built() -> bool:
    """False: tensors lie in the CPU's memory or on CUDA devices."""
    return False
