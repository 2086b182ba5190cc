"""The next epoch without ranks that have failed, where MPI can go on without them.

The engine's connections are closed, so that all notice, and the ranks that are left agree who they
are: see `_ulfm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ringdl import _engine, _flights, _startup, _timeline
from ringdl._communicator import Communicator
from ringdl._errors import Error, StallError, UsageError
from ringdl._launch import detect

HAS_ENDED, RAISES, JOINS, STARTS = 1, 2, 4, 8
"""What a rank says of itself in `agree`."""

renumbered: list[Callable[[], object]] = []
"""What adapters have to do once this rank may have another number."""


def can_go_on() -> bool:
    """Whether the ranks of `init` can go on without one that fails."""
    return _startup.get_communicator()._shared.connections is not None


@contextmanager
def outliving() -> Iterator[None]:
    """Meanwhile a rank that ends by an error ends alone, unless all do: then the job has failed.

    The others notice, and agree with it, before it ends.
    """
    if not can_go_on():
        yield
        return
    from ringdl import _mpi

    _mpi.may_shrink = True
    process = os.getpid()
    try:
        yield
    except (StallError, KeyboardInterrupt):  # some rank may not answer: the job ends
        raise
    except BaseException as error:
        if os.getpid() != process:  # a forked child must not touch its parent's MPI
            raise
        _flights.note_end(error)
        _startup.get_communicator()._shared.engine.abandon()  # all others notice
        with _mpi.telling_late(error):
            do_all = _agree(RAISES) & RAISES != 0
        if not do_all:
            _mpi.end_alone(error)
        go_on()  # with all: the script may catch what it has raised
        raise


def agree(flags: int) -> int:
    """What all ranks that are left say: that they have ended, or the like. Collective over them.

    All get the same answer, whoever fails meanwhile. So a rank that has passed the last collective
    and one for which it has failed do the same next.
    """
    if not can_go_on():
        return flags
    if flags & (HAS_ENDED | STARTS) == 0:  # all that wait for this rank notice, in whatever group
        _startup.get_communicator()._shared.engine.abandon()
    return _agree(flags)


def agree_on(is_so: bool) -> bool:
    """Whether it is so on all ranks that are left, which go on as they do. Collective over them."""
    return _agree(int(is_so)) == 1


def _agree(flags: int) -> int:
    from ringdl import _ulfm

    with waiting():
        return _ulfm.agree(_startup.get_communicator()._shared.mpi, flags)


def waiting(
    event: str = "the ranks that are left agree how to go on",
) -> AbstractContextManager[None]:
    """In calls of MPI that nothing can interrupt: see `_mpi.waiting`."""
    from ringdl import _mpi

    return _mpi.waiting(
        detect(os.environ),
        _startup.get_communicator()._shared.settings,
        event,
        "some rank computes for as long, without a call of ringdl, or does not answer",
        "",
    )


def go_on() -> Communicator:
    """Begin the next epoch with the ranks that are left. Collective over them.

    What was in flight is given up. All that `init` says of another call of it holds; ranks are
    numbered anew, in their order. Those that fail meanwhile are left out, too.

    Raises:
        StallError, UsageError: as of `init`.
    """
    from ringdl import _mpi, _ulfm

    shared = _startup.get_communicator()._shared
    tuning, place, settings = shared.tuning, shared.place, shared.settings
    comm, members = shared.mpi, shared.members
    connections = shared.connections
    assert place is not None
    assert connections is not None
    _engine.set_default(None, None)
    shared.engine.abandon()
    _timeline.leave_if_recording()
    for settle in _startup.before_shutdown:
        settle()
    while True:
        with waiting():
            alive = set(_ulfm.survivors(comm))
        left = [rank for rank, member in enumerate(members) if member in alive]
        place = place.of(left, members.index(comm.Get_rank()))
        members = [members[rank] for rank in left]
        engine: Any = None
        communicator = None
        try:
            engine = connections.connect(members, settings.timeout)
            shared.renew(engine, settings, place.numbers, comm, shared.vendor)
            shared.members, shared.place, shared.connections = members, place, connections
            communicator = _startup.set_up(shared, place, settings, tuning)
        except (UsageError, StallError):
            raise
        except Error:  # another one has failed, which those that still connect notice, too
            if engine is not None:
                engine.abandon()
        except Exception as error:  # of this rank alone, which the others notice by its end
            _mpi.end_alone(error)
        with waiting():  # one may have failed when some had connected
            have_connected = _ulfm.agree(comm, int(communicator is not None))
        if communicator is None or not have_connected:
            if engine is not None:
                engine.abandon()
            continue
        _startup.make_default(communicator)
        for follow in renumbered:
            follow()
        return communicator
