"""How ranks that are left and newcomers meet: one communicator of all, made by both sides.

Each side calls connect(), then exchange() twice, so that all know alike whether one has failed,
then meet(). `_newcomers` has why they meet so early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringdl._mpi import Hosts
    from ringdl._shared import Shared
    from ringdl._ulfm import Connections

SCRIPT, HELLO, READY, ANSWER = range(4)
"""Tags of messages between ranks that are left and newcomers."""

END = "end"
"""The answer to newcomers that come too late."""


@dataclass(frozen=True)
class Meeting:
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
        from ringdl import _ulfm

        self.comm.Ack_failed()
        return _ulfm.failed_ranks(self.comm)

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

    def say(self, word: object, ranks: Sequence[int], tag: int) -> None:
        """Send some a word, if they are alive."""
        from mpi4py import MPI

        for rank in ranks:
            try:
                self.comm.send(word, rank, tag)
            except MPI.Exception:  # it has failed
                continue

    def answer(self, word: object) -> None:
        """Tell all newcomers."""
        self.say(word, range(self.old, self.comm.Get_size()), ANSWER)

    def follow(self, shared: Shared) -> None:
        """Have the next epoch be that of all that have met."""
        shared.mpi, shared.place, shared.connections = self.comm, self.place, self.connections
        shared.members = range(self.comm.Get_size())


def connect(comm: Any, peers: Any, is_new: bool) -> Any:
    """The intercommunicator of ranks and newcomers. Collective over all of them.

    Args:
        comm: an mpi4py communicator of those on this side.
        peers: that of the first rank and the newcomers; on other ranks it does not matter.
        is_new: whether this is a newcomer.

    Raises:
        MPI.Exception: one of them has failed.
    """
    return comm.Create_intercomm(0, peers, 0 if is_new else 1, SCRIPT)


def exchange(link: Any, word: bool) -> bool:
    """Tell each on the other side a word, and hear theirs, also where some have failed.

    Args:
        link: an mpi4py intercommunicator.
        word: this rank's.

    Returns:
        Whether none has failed, and all have said True.
    """
    from mpi4py import MPI

    words = []
    sent = []
    for other in range(link.Get_remote_size()):
        try:
            sent.append(link.isend(word, other, HELLO))
        except MPI.Exception:
            words.append(False)
    for other in range(link.Get_remote_size()):
        try:
            words.append(link.recv(source=other, tag=HELLO))
        except MPI.Exception:
            words.append(False)
    for each in sent:
        try:
            each.wait()
        except MPI.Exception:
            words.append(False)
    return all(words)


def meet(link: Any, is_new: bool) -> Meeting:
    """Connect ranks and newcomers, each with each. Collective over all of them.

    Where one raises, all others do.

    Args:
        link: their mpi4py intercommunicator.
        is_new: whether this is a newcomer.

    Raises:
        MPI.Exception, Error: one of them has failed, or cannot be reached.
    """
    from mpi4py import MPI

    from ringdl import _mpi, _ulfm

    others = link.Get_remote_size()
    comm = None
    try:
        comm = link.Merge(high=is_new)  # may not return if one fails meanwhile
        old = others if is_new else comm.Get_size() - others
        # No more of them: Open MPI crashes if one fails meanwhile, see `_newcomers._spawn`.
        place = _mpi.find_hosts(MPI, comm, are_on_one=True)
        return Meeting(comm, old, place, _ulfm.Connections(comm, place.numbers))
    except BaseException:
        for each in (link, comm):
            if each is not None:
                each.Revoke()  # whoever waits for this one notices
        raise
