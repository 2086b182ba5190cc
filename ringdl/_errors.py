"""The errors that ringdl raises, one class per class of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringdl._work import GroupedWork, Work


class Error(RuntimeError):
    """The root of all errors that ringdl raises."""


class MismatchError(Error):
    """Ranks disagree on what a key means, or wait for a key that some rank never submits.

    Raised on every rank that takes part. The next use of the key is not affected.
    """


class StallError(Error):
    """A wait took longer than its timeout.

    The message names the ranks that have not arrived. The work stays in flight, its array off
    limits. Do not make the call again, which would be the next call: wait for `work` again.
    Uncaught, the error ends the job.

    Attributes:
        work: the `Work` or `GroupedWork` that is still in flight. None for `Buckets.wait`, which is
            called again, and for calls that make several collectives (of objects, ``split``,
            ``algorithm="mpi"``, ``broadcast_parameters``): these cannot be resumed.
    """

    work: Work[Any] | GroupedWork[Any] | None = None


class RankFailedError(Error):
    """A rank's process has ended without `shutdown`: what it takes part in cannot end any more.

    Raised on ranks that wait on the same host, within two seconds, unless the launcher has ended
    the job before. Uncaught, the error ends the job.
    """


class UsageError(Error, ValueError):
    """A call that cannot be right whatever the other ranks do; says what to do instead."""
