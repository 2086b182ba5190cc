"""Ranks in place of those that have failed: MPI starts them, and they join at a commit.

Whoever is left trains on until they are ready:

    ranks that are left                    newcomers (`_newcomer`)
    _start()     MPI_Comm_spawn, by one -> main()
                 <- all have met: a communicator, where they are, how to connect ->
                                           run the script
                                           init(): a job of their own, for now
    at_commit()  <---------------- ready - join(), in elastic.run
                 RanksJoin, on all that are left
    admit()      - take part ------------>
                 <------- _recovery.go_on(): the next epoch, of all ------->

They meet before the script runs, as Open MPI never answers who asks it for the address of a process
that has ended, when the others of its job have, too. So whoever fails afterwards, on either side,
is left out as ever, and disturbs nobody. If one fails before, the newcomers end, and others are
started at the next commit. Open MPI alone, as of `_ulfm`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ringdl import _recovery, _startup
from ringdl._errors import Error
from ringdl._meeting import END, READY, SCRIPT, Meeting, connect, exchange, meet
from ringdl._script import Script, inherited, is_early, own_script

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

_log = logging.getLogger("ringdl")

_NEWCOMER = "from ringdl import _newcomer; _newcomer.main()"
_WHERE_RANKS_DO = "import sys; sys.path[0] = sys.argv[1]; "
"""It looks for modules there from the first one on; without it, in the folder that it is in."""

_HOST = "PMIX_HOSTNAME"
"""What Open MPI's launcher calls this host."""

_POLL_SECONDS = 0.05

# The launcher has made the processes of newcomers within so long.
_APPEAR_SECONDS = 10.0

# A call of MPI in which one has failed returns within so long, or is left behind.
_RETURN_SECONDS = 2.0

# Newcomers that notice that nobody meets them end within so long.
_LEAVE_SECONDS = 1.0


class RanksJoin(BaseException):
    """Ends `train`, at a commit, as newcomers are ready: `ringdl.elastic.run` calls it again.

    Not an Exception, as nothing has failed: ``except Exception`` lets it through.
    """


class HaveAgreed(BaseException):
    """Ends `train`, at a commit: those that are left have agreed already that some rank is not."""


@dataclass
class Replacing:
    """What all ranks know alike of whom they replace.

    Attributes:
        size: how many ranks the job has had at its start.
        left: how many may still be started.
        script: what they run,
        environment: and with what.
        mark: in the command line of each, of no other process.
    """

    size: int
    left: int
    script: Script
    environment: dict[str, str]
    mark: str = ""


replacing: Replacing | None = None
"""None: nobody is replaced."""
_meeting: Meeting | None = None
"""With newcomers that have not joined."""
_unwanted: list[str] = []
"""Marks of newcomers that nobody has met."""
_is_over = False
"""The first `run` has ended: newcomers begin with that one, so none is started any more."""


def prepare() -> None:
    """Note how many ranks there are to be, in the first `run`, if failed ones are to be replaced.

    On one host alone: over several, Open MPI's launcher (5.0.11) crashes or hangs now and then when
    it starts ranks after some have failed, and with it the job that could have gone on.

    Raises:
        UsageError: on every rank: the script cannot be started again.
    """
    global replacing
    ranks = _startup.get_communicator()
    count = ranks._shared.settings.replacements
    if count == 0 or replacing is not None or _is_over or not _recovery.can_go_on():
        return
    if ranks.host_count > 1:
        if ranks.rank == 0:
            _log.warning("ranks that fail are not replaced, as the job is on several hosts")
        return
    replacing = Replacing(ranks.size, count, own_script(sys.orig_argv), inherited())


def settle() -> None:
    """Have all ranks know the same. Collective, as an epoch begins.

    They have met the same newcomers, or these end; they start others with what rank 0 has.
    """
    if replacing is not None:
        ranks = _startup.get_communicator()
        mark = f"ringdl-newcomer-{secrets.token_hex(8)}"
        replacing.script, replacing.environment, replacing.mark = ranks.broadcast_object(
            (replacing.script, replacing.environment, mark), name="ringdl.elastic.script"
        )
        if not all(ranks.allgather_object(_meeting is not None, name="ringdl.elastic.newcomers")):
            _dismiss()


def at_commit() -> None:
    """Start newcomers if ranks are missing; have them join once they are ready. Collective.

    Raises:
        RanksJoin: on every rank: they are.
        HaveAgreed: on every rank that is left: one has failed.
    """
    global _meeting
    if replacing is None:
        return
    ranks = _startup.get_communicator()
    if _meeting is None:
        if replacing.left > 0 and ranks.size < replacing.size:
            _meeting = _start(ranks, replacing)
        return
    answer = _look(_meeting) if ranks.rank == 0 else None
    answer = ranks.broadcast_object(answer, name="ringdl.elastic.newcomers")
    if answer == "ready":
        raise RanksJoin
    if answer == "lost":
        _meeting = None


def _look(meeting: Meeting) -> str:
    """What the newcomers do; on the first rank alone."""
    lost = meeting.lost()
    while (newcomer := meeting.receive(READY)) is not None:
        meeting.ready.add(newcomer)
    alive = set(range(meeting.old, meeting.comm.Get_size())) - lost
    if not alive:
        return "lost"
    return "ready" if alive <= meeting.ready else "waiting"


def _start(ranks: Communicator, its: Replacing) -> Meeting | None:
    """Start as many as are missing. Collective.

    All make the same agreements, whoever fails meanwhile.

    Returns:
        None on every rank, if they could not be started.

    Raises:
        HaveAgreed: on every rank that is left: some have not come here, as one has failed.
    """
    from mpi4py import MPI

    if not _recovery.agree(_recovery.STARTS):
        raise HaveAgreed
    mark = f"{its.mark}-{its.left}"
    count = min(its.size - ranks.size, its.left)
    its.left -= count
    with _recovery.waiting("MPI has started ranks in place of those that have failed"):
        link = peers = None
        try:
            comm = ranks._shared.mpi.Shrink()  # MPI connects nobody to one that has lost some
        except MPI.Exception as error:
            _tell(ranks.rank, error)
        else:
            attempt = partial(_attempt, ranks, comm, mark, count)
            is_first = comm.Get_rank() == 0
            peers = attempt(lambda: _spawn(count, its, mark)) if is_first else comm
        if _recovery.agree_on(peers is not None):
            link = attempt(lambda: connect(comm, peers, is_new=False))
        are_there = link is not None and bool(attempt(lambda: exchange(link, True)))
        are_there = _recovery.agree_on(are_there)
        if are_there:
            are_there = _recovery.agree_on(bool(attempt(lambda: exchange(link, True))))
        meeting = attempt(lambda: meet(link, is_new=False)) if are_there else None
        if are_there and _recovery.agree_on(meeting is not None):
            return meeting
        if meeting is not None:
            meeting.answer(END)
        elif link is not None:
            link.Revoke()  # newcomers that wait for this rank notice
        _unwanted.append(mark)
        _end_unwanted(_LEAVE_SECONDS)
    return None


def _attempt(ranks: Communicator, comm: Any, mark: str, count: int, call: Callable[[], Any]) -> Any:
    """What a call of MPI returns that may never return once a rank or a newcomer has failed.

    A thread makes it, and is left behind in that case, as PMIx_Connect in Open MPI's MPI_Comm_spawn
    waits for ever for who has failed. Without MPI_THREAD_MULTIPLE there is no such thread.

    Args:
        ranks: those that are left.
        comm: an mpi4py communicator of them, revoked on all once one of them has failed here.
        mark: of the newcomers.
        count: of them.
        call: is made once.

    Returns:
        None if it raises, or is left behind, which is told.
    """
    from mpi4py import MPI

    from ringdl import _mpi, _ulfm

    shared = ranks._shared
    result = error = None

    def make() -> None:
        nonlocal result, error
        try:
            result = call()
        except Exception as raised:
            error = raised

    if not _mpi.has_thread_multiple():
        make()
    else:
        thread = threading.Thread(target=make, name="ringdl newcomers", daemon=True)
        thread.start()
        most = 0
        begun, until = time.monotonic(), math.inf
        while thread.is_alive() and time.monotonic() < until:
            thread.join(_POLL_SECONDS)
            with contextlib.suppress(MPI.Exception):
                shared.mpi.Iprobe()  # has MPI look for what its launcher says
            lost = _ulfm.failed_ranks(shared.mpi).intersection(shared.members)
            has_failed = bool(comm.Is_revoked() or lost)
            if ranks.rank == 0:
                alive = sum(1 for _ in _processes(mark))
                most = max(most, min(alive, count))
                is_late = time.monotonic() > begun + _APPEAR_SECONDS
                has_failed |= alive < (count if is_late else most)
            if has_failed:
                until = min(until, time.monotonic() + _RETURN_SECONDS)
        if thread.is_alive():
            error = Error("a rank, or a new process, has failed meanwhile")
    if error is None:
        return result
    comm.Revoke()  # all others leave theirs behind
    _tell(ranks.rank, error)
    return None


def _tell(rank: int, error: Exception) -> None:
    print(f"ringdl: rank {rank}: ranks were not replaced: {error}", file=sys.stderr, flush=True)


def _processes(mark: str) -> Iterator[int]:
    """Newcomers with this mark, by their process ids."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
            if mark.encode() in file.read():
                yield int(process)


def _end_unwanted(seconds: float = 0.0) -> None:
    """End newcomers that nobody has met, and that have not left within so long.

    They may wait in MPI_Init for who has failed.
    """
    until = time.monotonic() + seconds
    for mark in _unwanted:
        while any(_processes(mark)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        for process in _processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _spawn(count: int, its: Replacing, mark: str) -> Any:
    """Start newcomers, by this rank alone, which is the only one that they are connected to.

    A process in which Open MPI (5.0.10, 5.0.11) has half made a communicator crashes when another
    rank of that fails, and MPI_Comm_spawn takes tenths of a second for one.

    Args:
        count: of newcomers.
        its: what they run.
        mark: by which `_processes` finds them.

    Returns:
        An mpi4py communicator of this rank and them, in this order.

    Raises:
        MPI.Exception: one has failed, or the launcher does not start them.
    """
    from mpi4py import MPI

    # Where a rank has ended, its place on the host counts as taken.
    placing = {"map_by": ":OVERSUBSCRIBE", "bind_to": "none", "wdir": its.script.folder}
    if _HOST in os.environ:
        placing["host"] = os.environ[_HOST]
    early = [f"{name}={its.environment[name]}" for name in its.environment if is_early(name)]
    program = _NEWCOMER if sys.flags.safe_path else _WHERE_RANKS_DO + _NEWCOMER
    python = [sys.executable, *its.script.options, "-c", program, its.script.path, mark]
    words = [*early, *python, str(os.getpid())]
    link = MPI.COMM_SELF.Spawn("env", words, count, MPI.Info.Create(placing))
    for newcomer in range(count):
        link.send((its.script, its.environment), newcomer, SCRIPT)
    return link.Merge(high=False)


def admit() -> None:
    """Have `_recovery.go_on`, which has to follow, go on with the newcomers. Collective."""
    global _meeting
    assert _meeting is not None
    assert replacing is not None
    _meeting.answer((replacing.size, replacing.left))  # each rank does: any may fail
    _meeting.follow(_startup.get_communicator()._shared)
    _meeting = None


def finish() -> None:
    """The first `run` has ended, on all ranks: nobody joins any more."""
    global replacing, _is_over
    _dismiss()
    _end_unwanted()
    _unwanted.clear()
    replacing, _is_over = None, True


def _dismiss() -> None:
    """Newcomers that this rank has met end, if all others do the same."""
    global _meeting
    if _meeting is not None:
        _meeting.answer(END)
    _meeting = None
