"""Process sets: some of the ranks, under the names that MPI training scripts use.

Wherever a process set is taken, a `ringdl.Communicator` is, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ringdl
from ringdl import _recovery
from ringdl._shared import Shared


class ProcessSet:
    """Some of the ranks, which have collectives of their own.

    It can be used once it is registered: by ``init(process_sets=[...])`` or by `add_process_set`,
    which all ranks call alike. Then disjoint ones never wait for each other. After `shutdown` and
    `init` it is still registered, and means the ranks that have its numbers then.

    Args:
        ranks_or_comm: ranks as `rank` counts them, in any order; or an mpi4py communicator.

    Attributes:
        process_set_id: its number, or None while it is not registered; 0 is that of all ranks.
        ranks: in ascending order; None until a communicator's are known.

    Raises:
        UsageError: it is neither.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._communicator: ringdl.Communicator | None = None
        self._shared: Shared | None = None  # kept, so that it is still registered after shutdown()
        self._epoch = 0  # of the communicator
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        try:
            listed = list(ranks_or_comm)
        except TypeError:
            listed = [None]
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in listed):
            raise ringdl.UsageError(
                f"ProcessSet takes a list of ranks or an mpi4py communicator, not {ranks_or_comm!r}"
            )
        self.ranks = sorted(listed)

    def size(self) -> int | None:
        """How many ranks it has; None while it is not registered."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This rank's number in it; None while it is not registered.

        Roots are named by their number among all ranks, not by this one.

        Raises:
            UsageError: this rank is not in it.
        """
        return None if self.process_set_id is None else communicator_of(self).rank

    def included(self) -> bool | None:
        """Whether this rank is in it; None while its ranks are not known."""
        return None if self.ranks is None else ringdl.rank() in self.ranks

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """The same one, in a copy of a model."""
        return self

    def __reduce__(self) -> Any:
        """A pickle is not registered."""
        return ProcessSet, (self.ranks,)

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _AllRanks(ProcessSet):
    """The process set of all ranks, whatever they are at the moment."""

    def __init__(self) -> None:
        self.process_set_id = 0
        self.mpi_comm = None

    def __reduce__(self) -> Any:
        return "global_process_set"

    @property
    def ranks(self) -> list[int]:  # type: ignore[override]
        return list(range(ringdl.size())) if ringdl.is_initialized() else []


global_process_set: ProcessSet = _AllRanks()

_registered: dict[int, ProcessSet] = {0: global_process_set}
"""By number; the same on all ranks."""

_alike: dict[tuple[int, ...], tuple[int, int]] = {}
"""By their ranks: the last epoch in which such sets were added, and how many."""

_renumbered_in = 0
"""The epoch in which ranks have failed or joined last."""

AnySet = ProcessSet | ringdl.Communicator


def communicator_of(process_set: AnySet) -> ringdl.Communicator:
    """The communicator of a process set.

    Raises:
        UsageError: it is not registered, or this rank is not in it.
    """
    default = ringdl.get_communicator()
    if process_set is global_process_set:
        return default
    if isinstance(process_set, ringdl.Communicator):
        return process_set
    if not isinstance(process_set, ProcessSet):
        raise ringdl.UsageError(
            f"process_set is {process_set!r}; take a ProcessSet or a ringdl.Communicator"
        )
    if process_set.process_set_id is None:
        raise ringdl.UsageError(
            f"{process_set} is not registered; pass it to init(process_sets=[...]) or to "
            "add_process_set(), on all ranks"
        )
    if process_set._epoch != default.epoch:
        _bind(process_set, default, 0)
    if process_set._communicator is None:
        raise ringdl.UsageError(
            f"rank {default.rank} is not in {process_set}; only its ranks may use it"
        )
    return process_set._communicator


def root_in(process_set: AnySet, root_rank: int) -> int:
    """The root's number in the communicator of a process set.

    Raises:
        UsageError: it is not in the set.
    """
    if not isinstance(process_set, ProcessSet) or process_set is global_process_set:
        return root_rank
    assert process_set.ranks is not None
    if root_rank not in process_set.ranks:
        raise ringdl.UsageError(
            f"root_rank {root_rank} is not in {process_set}; name one of its ranks, as hvd.rank() "
            "counts them"
        )
    return process_set.ranks.index(root_rank)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set, or the one of these ranks. Call it on all ranks, in the same order.

    No environment variable has to allow it. One of the same ranks makes room for it if it has not
    been used since ranks have failed or joined: functions that `ringdl.elastic.run` calls again
    add theirs again.

    Raises:
        UsageError: it has no ranks, or some that do not exist, or is registered already.
    """
    default = ringdl.get_communicator()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.mpi_comm is not None:
        added.ranks = _ranks_of(added.mpi_comm, default)
    for other in [*_registered.values()]:
        if other.ranks != added.ranks:
            continue
        if other is global_process_set or other._epoch >= _renumbered_in:
            raise ringdl.UsageError(
                f"there is {other} already; use that one instead of adding another"
            )
        remove_process_set(other)
    _bind(added, default, _count_alike(added, default))
    number = max(_registered) + 1
    added.process_set_id = number
    _registered[number] = added
    return added


def _count_alike(added: ProcessSet, default: ringdl.Communicator) -> int:
    """How many of the same ranks this epoch has had before, which may have left works behind."""
    assert added.ranks is not None
    key = tuple(added.ranks)
    epoch, count = _alike.get(key, (0, 0))
    count = count if epoch == default.epoch else 0
    _alike[key] = default.epoch, count + 1
    return count


def set_process_sets(process_sets: Sequence[ProcessSet | Sequence[int]]) -> None:
    """Register these and no others. Call it on all ranks alike.

    Raises:
        UsageError: see `add_process_set`.
    """
    for registered in [*_registered.values()]:
        remove_process_set(registered)
    for process_set in process_sets:
        add_process_set(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Undo a registration, on all ranks; returns whether there was one. That of all ranks stays."""
    number = process_set.process_set_id
    if number in (None, 0) or _registered.get(number) is not process_set:
        return False
    del _registered[number]
    process_set.process_set_id = None
    process_set._communicator = None
    process_set._shared = None
    return True


def _bind(process_set: ProcessSet, default: ringdl.Communicator, number_alike: int) -> None:
    """Make its communicator of today's ranks, without any communication.

    Raises:
        UsageError: it holds a rank that does not exist.
    """
    assert process_set.ranks is not None
    process_set._communicator = default._group_of(process_set.ranks, "process set", number_alike)
    process_set._shared = default._shared
    process_set._epoch = default.epoch


def _ranks_of(mpi_comm: Any, default: ringdl.Communicator) -> list[int]:
    """The ranks of an mpi4py communicator, as the default one counts them."""
    from ringdl import _mpi

    own = default._shared.mpi
    if own is None:
        raise ringdl.UsageError("ranks are not started by MPI here; name them by their numbers")
    members = _mpi.translate_ranks(mpi_comm, own)
    number = {member: rank for rank, member in enumerate(default._shared.members)}
    if not number.keys() >= set(members):
        raise ringdl.UsageError("the communicator has ranks that have failed; make another one")
    return sorted(number[member] for member in members)


def _note_epoch() -> None:
    global _renumbered_in
    _renumbered_in = ringdl.get_communicator().epoch


_recovery.renumbered.append(_note_epoch)
