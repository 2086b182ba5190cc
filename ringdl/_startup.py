"""Start and end of the default communicator: `init`, `shutdown`, and what happens around them."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from ringdl import _engine, _flights, _report, _timeline
from ringdl._communicator import Communicator, communicator_of_all
from ringdl._engine import Algorithm, Reduction
from ringdl._errors import Error, RankFailedError, UsageError
from ringdl._launch import Launcher, StoreJob, detect, detect_store_job
from ringdl._settings import Settings, read_settings, warn_of_unknown
from ringdl._shared import Shared
from ringdl._tuning import Tuning, find_tuning, topology
from ringdl._window import share_memory

if TYPE_CHECKING:
    from ringdl import _mpi

_default: Communicator | None = None
_last: weakref.ref[Shared] | None = None
"""What the communicators have in common that the last `init` has made, if any is alive."""
_reporter: int | None = None
"""This process, if it tells whoever has started the job how that ends; not its forked children."""
_hooked = False
after_init: list[Callable[[Communicator], object]] = []
"""What frameworks do once there are ranks."""

before_shutdown: list[Callable[[], object]] = []
"""What adapters have to do before an engine ends."""


def init(comm: Any = None, tuning: Tuning | str | None = None) -> Communicator:
    """Make the default communicator. Collective; calling it again changes nothing.

    After `shutdown` it may be called again, also for other ranks. What was made before goes on with
    them: communicators, wrapped optimizers, process sets, and, after `Buckets.rebind`, buckets.

    Without an argument: all ranks that the launcher (mpirun, srun, torchrun) started, or this
    process alone if there is none. MPI is loaded only if a launcher of MPI or a communicator is
    there; ranks of torchrun, and of scripts that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT,
    are connected by TCP, and find each other through PyTorch's store.

    A child of a rank is no rank. Where multiprocessing imports the script in a child (spawn and
    forkserver do), a call at its top returns an object that answers `rank`, `size` and the like as
    the parent does and refuses all else; any other call in a child is refused.

    Args:
        comm: an mpi4py communicator, which is duplicated; default MPI.COMM_WORLD.
        tuning: what algorithms are chosen by: a `Tuning`, its JSON, or a file with it; rank 0's
            counts. By default what RINGDL_TUNING says, else what `python -m ringdl tune` has
            measured for such ranks on such a machine, else built-in costs.

    Returns:
        The default communicator.

    Raises:
        UsageError: the launcher does not belong to the MPI library, there is no usable one, a
            setting cannot be followed, torchrun's ranks cannot find each other or were given a
            communicator of MPI, or this process is a child of a rank.
        StallError: torchrun's ranks do not all arrive within RINGDL_TIMEOUT.
    """
    global _default
    if _default is not None:
        return _default
    launcher, job = detect(os.environ), detect_store_job(os.environ)
    started = job or launcher
    if started is not None:
        from ringdl import _children

        parent = _children.find_parent(os.environ)
        if parent is not None:
            _default = cast("Communicator", _children.stand_in(parent))
            return _default
        _children.mark(os.environ)
    settings = read_settings(os.environ)
    if started is None or started.rank == 0:
        warn_of_unknown(os.environ)
    if job is not None and not _mpi_has_ranks():
        if comm is not None:
            raise UsageError(
                f"{job} says that there are {job.size} ranks, and the communicator that init() was "
                "given knows of one: MPI has not started them. Leave it out, or start with "
                f"`mpirun -n {job.size}`"
            )
        made = _init_over_sockets(job, settings, tuning)
    elif comm is None and launcher is None and "mpi4py.MPI" not in sys.modules:
        shared = _shared_again()
        shared.renew(_engine.alone(), settings)
        made = communicator_of_all(shared)
        _tune(made, settings, tuning)
        shared.bind()
        if settings.flight_recorder is not None:
            _flights.start(made, settings.flight_recorder)
        if settings.timeline is not None:
            _timeline.start(made, settings.timeline)
    else:
        made = _init_over_mpi(launcher, comm, settings, tuning)
    if started is not None:
        _children.mark(os.environ, made)
    make_default(made)
    return made


def make_default(communicator: Communicator) -> None:
    """Have this communicator be the default one, from now on."""
    global _default, _last, _reporter
    _default, _last = communicator, weakref.ref(communicator._shared)
    is_elastic = communicator._shared.connections is not None
    _reporter = os.getpid() if is_elastic and communicator.rank == 0 else None
    _engine.set_default(communicator._engine, communicator._finish_allreduce)
    for follow in after_init:
        follow(communicator)


def _shared_again() -> Shared:
    """The last one, if a communicator has kept it alive; else a new one."""
    last = None if _last is None else _last()
    return Shared() if last is None else last


def _mpi_has_ranks() -> bool:
    """Whether the script has initialized MPI, and it found other ranks."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return False
    return bool(mpi.COMM_WORLD.Get_size() > 1)


def _init_over_mpi(
    launcher: Launcher | None, comm: Any, settings: Settings, tuning: Tuning | str | None
) -> Communicator:
    from ringdl import _mpi, _mpirun, _ulfm

    if comm is not None and not hasattr(comm, "Get_group"):
        raise UsageError(f"init({comm!r}): pass an mpi4py communicator, or nothing for all ranks")
    with _mpi.waiting(launcher, settings):
        mpi = _mpi.load_mpi(launcher)
        comm = mpi.COMM_WORLD if comm is None else comm
        hosts = _mpi.find_hosts(mpi, comm)
        connections = _ulfm.Connections(comm, hosts.numbers) if _ulfm.is_there() else None
        if connections is None:
            vendor = _mpirun.identify_library(mpi.Get_library_version())[0]
            engine = _mpi.open_engine(mpi, comm)
        else:
            members = range(comm.Get_size())
            vendor, engine = "TCP", connections.connect(members, settings.timeout)
    shared = _shared_again()
    shared.renew(engine, settings, hosts.numbers, comm, vendor)
    shared.place, shared.connections = hosts, connections
    if connections is not None and engine.rank == 0:
        _report.tell(_report.BEGUN)
    communicator = set_up(shared, hosts, settings, tuning)
    has_parent = mpi.Comm.Get_parent() != mpi.COMM_NULL  # MPI_Comm_spawn has started this rank
    if (communicator.size > 1 or has_parent) and not _hooked:
        _mpi.abort_on_uncaught_error(mpi, lambda: _own_rank(mpi), connections is not None)
    _register_hooks(hosts)
    return communicator


def _own_rank(mpi: Any) -> int:
    """Of the default communicator, once that is there."""
    return mpi.COMM_WORLD.Get_rank() if _default is None else _default.rank


def _init_over_sockets(
    job: StoreJob, settings: Settings, tuning: Tuning | str | None
) -> Communicator:
    from ringdl import _rendezvous

    engine, hosts = _rendezvous.open_engine(job, os.environ, settings.timeout)
    shared = _shared_again()
    shared.renew(engine, settings, hosts.numbers, vendor="TCP")
    communicator = set_up(shared, hosts, settings, tuning)
    if not _hooked:
        _end_on_uncaught_error(job.rank)
    _register_hooks(hosts)
    return communicator


def set_up(
    shared: Shared, hosts: _mpi.Hosts, settings: Settings, tuning: Tuning | str | None
) -> Communicator:
    """Make a communicator whose ranks agree on all that they have to. Collective."""
    communicator = communicator_of_all(shared)
    try:
        _agree(communicator, hosts, settings, tuning)
    except UsageError:  # on all ranks; none may miss the others before it knows why
        shared.engine.shutdown()
        raise
    shared.bind()
    return communicator


def _agree(
    communicator: Communicator, hosts: _mpi.Hosts, settings: Settings, tuning: Tuning | str | None
) -> None:
    import numpy as np

    engine, shared = communicator._engine, communicator._shared
    engine.set_may_spin(hosts.cores >= hosts.local_size)
    agreed = communicator.broadcast_object(settings, name="ringdl.settings")
    epoch = np.array([shared.epoch])  # ranks may have been in different jobs before
    shared.epoch = communicator.allreduce(epoch, Reduction.Max, "ringdl.epoch").item()
    shared.settings = agreed
    shared.timeout = communicator._timeout = agreed.timeout
    shared.checks_replicas = agreed.check_replicas
    shared.jax_memory = agreed.jax_memory
    engine.set_join_answers_allreduces_only(agreed.join == "allreduce")
    engine.set_watchdog(agreed.watchdog, agreed.debug)
    if not agreed.cuda_peers:
        engine.use_no_device_peers()
    no_memory = None
    if agreed.shared_memory and communicator.host_count < communicator.size:
        no_memory = share_memory(communicator, hosts.numbers)
    _tune(communicator, agreed, tuning)
    if agreed.flight_recorder is not None:
        _flights.start(communicator, agreed.flight_recorder)
    if agreed.timeline is not None:
        _timeline.start(communicator, _timeline.path_in_epoch(agreed.timeline, shared.epoch))
    engine.forget_submitters()
    if no_memory is not None:
        import warnings

        warnings.warn(no_memory, RuntimeWarning, stacklevel=5)


def _register_hooks(hosts: _mpi.Hosts) -> None:
    """Register what happens on signals and at exit; warn of too many threads, once."""
    global _hooked
    if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, None):  # the script has no use for it
        _engine.dump_on_signal(signal.SIGUSR1)
    if len(hosts.numbers) > 1 and not _hooked:
        _hooked = True
        _warn_of_threads(hosts)
    atexit.unregister(_shutdown_at_exit)
    atexit.register(_shutdown_at_exit)  # the last registered is the first to be called


def _end_on_uncaught_error(rank: int) -> None:
    """Notify the others when this rank ends by an exception: they would wait in vain.

    Its sockets are closed, which each of them finds while it waits; no launcher is needed.
    """
    from ringdl._mpi import tell_captured

    previous = sys.excepthook
    process = os.getpid()

    def hook(kind: Any, error: Any, trace: Any) -> None:
        global _default
        previous(kind, error, trace)
        tell_captured()
        if os.getpid() != process or _default is None:
            return
        _flights.note_end(error)
        print(
            f"ringdl: rank {rank} ends by {kind.__name__}; the others end by RankFailedError",
            file=sys.stderr,
        )
        ended, _default = _default, None
        _engine.set_default(None, None)
        ended._engine.abandon()

    sys.excepthook = hook


def _tune(communicator: Communicator, settings: Settings, given: Tuning | str | None) -> None:
    """Agree on what algorithms are chosen by. Collective."""
    hosts = communicator.memory_hosts()
    found: Any = None
    if communicator.rank == 0:
        try:
            found = settings.tuning if given is None else given
            if not isinstance(found, Tuning):
                vendor = communicator._shared.vendor
                found = find_tuning(found, vendor, hosts, communicator.host_count)
        except UsageError as error:
            found = error
        except Exception as error:  # the others wait for an answer
            found = UsageError(f"the tuning table cannot be read ({error!r}); correct it")
    agreed = found
    if communicator.size > 1:
        agreed = communicator.broadcast_object(found, name="ringdl.tuning")
    if isinstance(agreed, UsageError):
        raise agreed
    if settings.segment_bytes is not None:
        agreed = agreed.with_segments(settings.segment_bytes)
    if settings.algorithm is not None:
        communicator._shared.algorithm = _possible(Algorithm[settings.algorithm], hosts)
    communicator.use_tuning(agreed)
    if communicator.rank == 0 and communicator.size > 1:
        import logging

        logging.getLogger("ringdl").info("tuning %s, from %s", agreed.hash, agreed.source)


def _possible(algorithm: Algorithm, hosts: list[int]) -> Algorithm:
    if algorithm == Algorithm.nccl or len(hosts) == 1:  # arrays on devices show whether it can be
        return algorithm
    if not _engine.is_possible_allreduce(algorithm, 0, hosts, 1):
        raise UsageError(
            f"RINGDL_ALGORITHM={algorithm.name} cannot be followed: {algorithm.name} is for "
            f"{_engine.ranks_of_allreduce(algorithm)}, and the ranks here are {topology(hosts)}; "
            "unset it"
        )
    return algorithm


def _warn_of_threads(hosts: _mpi.Hosts) -> None:
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(text) if text.isdecimal() else len(os.sched_getaffinity(0))
    if hosts.local_rank == 0 and threads > 1 and threads * hosts.local_size > hosts.cores:
        import warnings

        warnings.warn(
            f"{hosts.local_size} ranks on this host would compute with {threads} threads each, on "
            f"{hosts.cores} cores; set OMP_NUM_THREADS={max(1, hosts.cores // hosts.local_size)}",
            RuntimeWarning,
            stacklevel=5,
        )


def shutdown() -> None:
    """End the default communicator; `init` may be called again. Collective.

    Waits for the works in flight and until all ranks have called it. Also called when the program
    ends. Never finalizes MPI.
    """
    global _default
    if _default is not None:
        for settle in before_shutdown:
            settle()
        _engine.set_default(None, None)
        try:
            try:
                _timeline.stop_if_recording()
            except Error:  # the others wait for this rank all the same
                _default.shutdown()
                raise
            _default.shutdown()
        except Error:
            _default = None
            raise
        _default = None  # an interrupted shutdown may be repeated


def _shutdown_at_exit() -> None:
    from ringdl import _mpi

    try:
        shutdown()
    except RankFailedError:
        if not _mpi.may_shrink:  # else all has been done; see `ringdl.elastic.run`
            # Printed only, it would leave MPI's end waiting for that rank.
            sys.excepthook(*sys.exc_info())
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # to the launcher, too, this rank has failed
    if _reporter == os.getpid():
        _report.tell(_report.ENDED)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record what happens on all ranks, until `stop_timeline` or `shutdown`. Collective.

    The file is JSON that https://ui.perfetto.dev opens: for each rank its works, with their
    algorithms and bytes, the waits for them, and, with ``ringdl.torch``, the hooks of gradients.
    About 10 us per work; a million works and waits per rank at most. RINGDL_TIMELINE=FILE does so
    from `init` on.

    While recording, each rank writes what it has done to a file of its own: rank 0 to the named
    one, rank 1 to ``timeline.rank1.json`` beside ``timeline.json``. If the job fails or is killed,
    they stay, complete up to a tenth of a second before, with the works that were in flight; after
    a clean end only rank 0's is left, with all ranks.

    Args:
        file_path: where rank 0 writes.
        mark_cycles: ignored: there are no cycles.

    Raises:
        UsageError: rank 0 cannot write the file, or a timeline is being recorded already.
    """
    del mark_cycles
    _timeline.start(get_communicator(), file_path)


def stop_timeline() -> None:
    """End what `start_timeline` began, and write the file. Collective.

    Raises:
        UsageError: no timeline is being recorded.
    """
    get_communicator()
    _timeline.stop()


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
