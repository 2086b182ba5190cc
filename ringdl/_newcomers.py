"""Ranks in place of those that have failed: MPI starts them, and they join at a commit.

Whoever is left trains on until they are ready:

    ranks that are left                    newcomers
    _start()     MPI_Comm_spawn ---------> greet()
                 <- all have met: a communicator, where they are, how to connect ->
                                           run the script (`_newcomer`)
                                           init(): a job of their own, for now
    at_commit()  <---------------- ready - join(), in elastic.run
                 RanksJoin, on all that are left
    admit()      - take part ------------>
                 <------- _recovery.go_on(): the next epoch, of all ------->

They meet before the script runs, as Open MPI never answers who asks it for the address of a process
that has ended, when the others of its job have, too. So whoever fails afterwards, on either side,
is left out as ever, by MPI_Comm_shrink, and disturbs nobody. Open MPI alone, as of `_ulfm`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from ringdl import _recovery, _startup
from ringdl._communicator import Communicator
from ringdl._errors import Error, UsageError
from ringdl._launch import detect
from ringdl._settings import RANK_PROCESS, read_settings

if TYPE_CHECKING:
    from ringdl._mpi import Hosts
    from ringdl._ulfm import Connections

_SCRIPT, _HELLO, _READY, _ANSWER = range(4)
"""Tags of messages between ranks that are left and newcomers."""

_END = "end"
"""The answer to newcomers that come too late."""

_POLL_SECONDS = 0.01

_HOST = "PMIX_HOSTNAME"
"""What Open MPI's launcher calls a rank's host."""

_OF_LAUNCHERS = ("PMIX_", "OMPI_", "PRTE_", "PMI_", "SLURM_")
_OF_ONE_JOB = (RANK_PROCESS, "RINGDL_TIMELINE", "RINGDL_FLIGHT_RECORDER")
"""What newcomers do not inherit: records are of the job that they join."""


class RanksJoin(BaseException):
    """Ends `train`, at a commit, as newcomers are ready: `ringdl.elastic.run` calls it again.

    Not an Exception, as nothing has failed: ``except Exception`` lets it through.
    """


@dataclass
class _Replacing:
    """What all ranks know alike of whom they replace.

    Attributes:
        hosts: of the ranks that the job has had at its start, each as often as it had ranks.
        left: how many ranks may still be started.
    """

    hosts: Counter[str]
    left: int


@dataclass(frozen=True)
class Script:
    """What a rank runs.

    Attributes:
        module: ``python -m`` this one; None for a file.
        file: this file's path.
        arguments: the words after it.
    """

    module: str | None
    file: str
    arguments: Sequence[str]


@dataclass(frozen=True)
class _Meeting:
    """Ranks and newcomers that have met, before these join.

    Attributes:
        comm: the mpi4py communicator of all of them.
        old: how many have been there: newcomers are the ranks from this one on.
        place: see `Shared`.
        connections: see `Shared`.
        ready: newcomers that have said that they are.
    """

    comm: Any
    old: int
    place: Hosts
    connections: Connections
    ready: set[int] = field(default_factory=set)

    def lost(self) -> set[int]:
        """Which of them have failed, as far as this rank knows."""
        from mpi4py import MPI

        self.comm.Ack_failed()
        failed = self.comm.Get_failed()
        return set(MPI.Group.Translate_ranks(failed, None, self.comm.Get_group()))

    def receive(self, tag: int) -> Any:
        """The next message with this tag, if there is one; else None."""
        from mpi4py import MPI

        status = MPI.Status()
        try:
            if self.comm.Iprobe(tag=tag, status=status):
                return self.comm.recv(source=status.Get_source(), tag=tag)
        except MPI.Exception:  # one has failed that this rank did not know of
            pass
        return None

    def say(self, word: object) -> None:
        """Tell all newcomers that are alive."""
        from mpi4py import MPI

        for rank in range(self.old, self.comm.Get_size()):
            try:
                self.comm.send(word, rank, _ANSWER)
            except MPI.Exception:  # it has failed
                continue


_replacing: _Replacing | None = None
_meeting: _Meeting | None = None
"""With newcomers that have not joined; in a newcomer, with those that it is to join."""
_is_newcomer = False

_late = ExitStack()
"""In a newcomer: ends it in time, if it never joins."""


def prepare() -> None:
    """Note which ranks there are to be, once, if failed ones are to be replaced. Collective.

    Raises:
        UsageError: on every rank: the script cannot be started again.
    """
    global _replacing
    ranks = _startup.get_communicator()
    replacements = ranks._shared.settings.replacements
    if replacements == 0 or _replacing is not None or not _recovery.can_go_on():
        return
    _own_script()
    _replacing = _Replacing(Counter(_hosts_of(ranks)), replacements)


def _hosts_of(ranks: Communicator) -> list[str]:
    name = os.environ.get(_HOST, os.uname().nodename)
    return ranks.allgather_object(name, name="ringdl.elastic.hosts")


def _own_script() -> Script:
    """What this process runs.

    Raises:
        UsageError: neither a file nor a module.
    """
    main = sys.modules["__main__"]
    spec, file = main.__spec__, getattr(main, "__file__", None)
    if spec is None and file is None:
        raise UsageError(
            "ranks cannot be replaced (RINGDL_REPLACEMENTS) in a program that is no file and no "
            "module: write it to a file"
        )
    module = None if spec is None else spec.name.removesuffix(".__main__")
    return Script(module, os.path.abspath(file or ""), sys.argv[1:])


def at_commit() -> None:
    """Start newcomers if ranks are missing; have them join once they are ready. Collective.

    Raises:
        RanksJoin: on every rank: they are.
    """
    global _meeting
    if _replacing is None:
        return
    ranks = _startup.get_communicator()
    if _meeting is None:
        if _replacing.left > 0 and ranks.size < _replacing.hosts.total():
            _meeting = _start(ranks, _replacing)
        return
    answer = _look(_meeting) if ranks.rank == 0 else None
    answer = ranks.broadcast_object(answer, name="ringdl.elastic.newcomers")
    if answer == "ready":
        raise RanksJoin
    if answer == "lost":
        _meeting = None


def _look(meeting: _Meeting) -> str:
    """What the newcomers do; on the first rank alone."""
    lost = meeting.lost()
    while (newcomer := meeting.receive(_READY)) is not None:
        meeting.ready.add(newcomer)
    alive = set(range(meeting.old, meeting.comm.Get_size())) - lost
    if not alive:
        return "lost"
    return "ready" if alive <= meeting.ready else "waiting"


def _start(ranks: Communicator, replacing: _Replacing) -> _Meeting | None:
    """Start as many as are missing, on the hosts that they are missing from. Collective.

    Returns:
        None on every rank, if they could not be started.
    """
    from mpi4py import MPI

    missing = replacing.hosts - Counter(_hosts_of(ranks))
    hosts = sorted(missing.elements())[: replacing.left]
    replacing.left -= len(hosts)
    command = [*_interpreter_flags(), "-m", "ringdl._newcomer"]
    # Where a rank has ended, its place on the host counts as taken.
    placing = {"host": ",".join(hosts), "map_by": ":OVERSUBSCRIBE", "bind_to": "none"}
    link = meeting = None
    with _recovery.waiting("MPI has started ranks in place of those that have failed"):
        try:
            info = MPI.Info.Create(placing)
            link = ranks._shared.mpi.Spawn(sys.executable, command, len(hosts), info, root=0)
            if ranks.rank == 0:
                told = _own_script(), _inherited(os.environ)
                for newcomer in range(len(hosts)):
                    link.send(told, newcomer, _SCRIPT)
            meeting = _meet(link, is_new=False)
        except (MPI.Exception, Error, UsageError) as error:
            if link is not None:
                link.Revoke()  # whoever waits for this rank notices
            if ranks.rank == 0:
                print(f"ringdl: ranks were not replaced: {error}", file=sys.stderr, flush=True)
    return meeting if _recovery.agree_on(meeting is not None) else None


def _interpreter_flags() -> list[str]:
    """Those of this process' command that Python reads before a script, or -m."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    return own[: own.index("-m")] if "-m" in own else own


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_ONE_JOB
    }


def _meet(link: Any, is_new: bool) -> _Meeting:
    """Connect ranks and newcomers, each with each. Collective over all of them.

    Args:
        link: their mpi4py intercommunicator.
        is_new: whether this is a newcomer.

    Raises:
        MPI.Exception, Error: one of them has failed.
    """
    from mpi4py import MPI

    from ringdl import _mpi, _ulfm

    others = link.Get_remote_size()
    are_there = _exchange(link, True)
    if is_new:
        are_there = _exchange(link, are_there) and are_there
    else:
        are_there = _recovery.agree_on(are_there)
        _exchange(link, are_there)
    if not are_there:
        raise Error("one has failed meanwhile")
    comm = link.Merge(high=is_new)  # may not return if one fails meanwhile
    old = others if is_new else comm.Get_size() - others
    place = _mpi.find_hosts(MPI, comm)
    return _Meeting(comm, old, place, _ulfm.Connections(comm, place.numbers))


def _exchange(link: Any, word: bool) -> bool:
    """Tell each on the other side a word, and hear theirs, also where some have failed.

    Returns:
        Whether none has failed, and all have said True.
    """
    from mpi4py import MPI

    words = []
    sent = []
    for other in range(link.Get_remote_size()):
        try:
            sent.append(link.isend(word, other, _HELLO))
        except MPI.Exception:
            words.append(False)
    for other in range(link.Get_remote_size()):
        try:
            words.append(link.recv(source=other, tag=_HELLO))
        except MPI.Exception:
            words.append(False)
    for each in sent:
        try:
            each.wait()
        except MPI.Exception:
            words.append(False)
    return all(words)


def admit() -> None:
    """Have `_recovery.go_on`, which has to follow, go on with the newcomers. Collective."""
    assert _meeting is not None
    _meeting.say(_replacing)  # each rank does: any may fail
    _follow()


def dismiss() -> None:
    """At the end of training: those that have not joined end. On every rank."""
    global _meeting
    if _meeting is not None:
        _meeting.say(_END)
    _meeting = None


def _follow() -> None:
    """The next epoch is to be that of all that have met."""
    global _meeting
    assert _meeting is not None
    shared = _startup.get_communicator()._shared
    shared.mpi, shared.place = _meeting.comm, _meeting.place
    shared.connections = _meeting.connections
    _meeting = None


def greet() -> Script:
    """In a newcomer: meet those that have started it, and take what they say.

    Returns:
        What it has to run.
    """
    global _is_newcomer, _meeting
    from ringdl import _mpi

    _is_newcomer = _mpi.may_shrink = True
    launcher = detect(os.environ)
    _late.enter_context(
        _mpi.waiting(
            launcher,
            read_settings(os.environ),
            "the ranks that are left have taken it in",
            "the script has not called ringdl.elastic.run(), or they compute for as long without "
            "a commit",
            "",
        )
    )
    mpi = _mpi.load_mpi(launcher)
    link = mpi.Comm.Get_parent()
    try:
        script: Script
        script, inherited = link.recv(source=0, tag=_SCRIPT)
        _meeting = _meet(link, is_new=True)
    except (mpi.Exception, Error, UsageError) as error:
        leave(str(error))
    os.environ.update(inherited)
    for name in _OF_ONE_JOB:
        os.environ.pop(name, None)
    return script


def has_joined() -> bool:
    """Whether this process is a rank of the job, not a newcomer."""
    return not _is_newcomer


def join() -> None:
    """Become a rank of the job that this newcomer was started by. Collective, with `admit`.

    Ends the process if that has ended.
    """
    global _is_newcomer, _replacing
    from mpi4py import MPI

    assert _meeting is not None
    for rank in range(_meeting.old):
        try:
            _meeting.comm.send(_meeting.comm.Get_rank(), rank, _READY)
        except MPI.Exception:  # it has failed
            continue
    while (answer := _meeting.receive(_ANSWER)) is None:
        if _meeting.lost() >= set(range(_meeting.old)):
            leave("those that it was to join have ended")
        time.sleep(_POLL_SECONDS)
    if answer == _END:
        leave("training has ended")
    _replacing, _is_newcomer = answer, False
    _late.close()
    _follow()
    _recovery.go_on()


def leave(why: str) -> NoReturn:
    """End this newcomer, which nobody needs."""
    print(
        f"ringdl: a rank that was started in place of a failed one ends without having joined: "
        f"{why}",
        file=sys.stderr,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
