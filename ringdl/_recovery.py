"""The next epoch without ranks that have failed, where MPI can go on without them.

The communicator of the ranks that are left is shrunk out of the one before, and the engine's own is
revoked, so that all of them notice: see `_ulfm`.
"""

from __future__ import annotations

import os
from typing import Any

from ringdl import _engine, _startup
from ringdl._communicator import Communicator
from ringdl._errors import Error, StallError, UsageError
from ringdl._launch import detect
from ringdl._settings import read_settings


def can_go_on() -> bool:
    """Whether the ranks of `init` can go on without one that fails."""
    if _startup.get_communicator()._shared.mpi is None:
        return False
    from ringdl import _ulfm

    return _ulfm.is_there()


def outlive() -> None:
    """From now on a rank that ends by an exception does not take the job with it."""
    if can_go_on():
        from ringdl import _mpi

        _mpi.outlive()


def agree(is_well: bool) -> bool:
    """Whether this is so on all ranks that are left. Collective over them.

    All get the same answer, whoever fails meanwhile. So a rank that has passed the last collective
    and one for which it has failed do the same next.
    """
    if not can_go_on():
        return is_well
    from ringdl import _mpi, _ulfm

    with _mpi.starting(detect(os.environ), read_settings(os.environ)):
        return _ulfm.agree(_startup.get_communicator()._shared.mpi, is_well)


def go_on() -> Communicator:
    """Begin the next epoch with the ranks that are left. Collective over them.

    What was in flight is given up. All that `init` says of another call of it holds; ranks are
    numbered anew, in their order. Those that fail meanwhile are left out, too.

    Raises:
        StallError, UsageError: as of `init`.
    """
    from ringdl import _mpi

    shared = _startup.get_communicator()._shared
    launcher, settings = detect(os.environ), read_settings(os.environ)
    mpi = _mpi.load_mpi(launcher)
    tuning, place, present = shared.tuning, shared.place, shared.mpi
    assert place is not None
    _engine.set_default(None, None)
    shared.engine.abandon()
    while True:
        with _mpi.starting(launcher, settings):
            left = present.Shrink()
        _mpi.has_shrunk = True
        place = place.of(_mpi.translate_ranks(left, present), present.Get_rank())
        present = left
        engine: Any = None
        try:
            with _mpi.starting(launcher, settings):
                engine = _mpi.open_engine(mpi, left)
            shared.renew(engine, settings, place.numbers, left, shared.vendor)
            shared.place = place
            communicator = _startup.set_up(shared, place, settings, tuning)
        except (UsageError, StallError):
            raise
        except Error:  # another one has failed
            if engine is not None:
                engine.abandon()
            left.Revoke()
        else:
            _startup.make_default(communicator)
            return communicator
