"""A group of ranks: who they are, on which hosts, and the groups within."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, cast

from ringdl._engine import Kind, Reduction
from ringdl._errors import UsageError
from ringdl._joining import have_own_pace, leave_all, start_all_over
from ringdl._objects import Objects
from ringdl._reductions import Reductions
from ringdl._settings import Settings
from ringdl._shared import Shared
from ringdl._tuning import Tuning
from ringdl._work import one_of_several_steps, seconds_of

if TYPE_CHECKING:
    from ringdl import _engine
    from ringdl._arrays import Operand


class _Lost:
    """In place of an engine, for a group whose ranks are no more: refuses what is asked of it."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise UsageError(self._why)


class Communicator(Reductions, Objects):
    """A group of ranks; every function of the module is a method here.

    Collectives are matched by name, or, without one, by their number among the calls of their kind;
    ranks may submit them in any order. Threads may share a communicator if MPI offers
    MPI_THREAD_MULTIPLE; else only the thread that made it may use it.

    Made by `ringdl.init` (use `ringdl.get_communicator` to get the default one), and from another
    one by `split` and `group`.

    It outlives `shutdown`: after the next `init` it stands for the ranks that there are then, and a
    group for those with the same numbers. If they do not exist, or this process is none of them any
    more, the group refuses all calls.

    Args:
        shared: what it has in common with others.
        ranks: of the engine, in the order of its own; by default all.
        salt: tells groups of the same ranks apart.
    """

    def __init__(self, shared: Shared, ranks: Sequence[int] | None = None, salt: int = 0) -> None:
        self._shared = shared
        self._ranks = ranks
        self._salt = salt
        shared.add(self)

    def _bind(self) -> None:
        engine, ranks, group = self._shared.engine, self._ranks, None
        if ranks is not None and engine.rank in ranks and max(ranks) < engine.size:
            group = engine.group(ranks, self._salt)
        elif ranks is not None:
            lost = _Lost(
                f"this group holds the ranks {list(ranks)} of before shutdown(); now there are "
                f"{engine.size} ranks, and this one is rank {engine.rank}: make another group"
            )
            engine, group = cast("_engine.Communicator", lost), self._group
        self._use(engine, group, self._shared.timeout)
        self._mpi: Any = None  # the communicator of MPI's own allreduce, once that was called

    @property
    def epoch(self) -> int:
        """Which generation of ranks this is: one more after each `init`, the same on all ranks."""
        return self._shared.epoch

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        hosts = self._hosts()
        return hosts[: self.rank].count(hosts[self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks are on this host."""
        hosts = self._hosts()
        return hosts.count(hosts[self.rank])

    @property
    def host_rank(self) -> int:
        """This host's number; hosts are ordered by their lowest rank."""
        hosts = self._hosts()
        return list(dict.fromkeys(hosts)).index(hosts[self.rank])

    @property
    def host_count(self) -> int:
        """How many hosts take part."""
        return len(set(self._hosts()))

    @property
    def local_device(self) -> int | None:
        """The number of the CUDA device for this rank, as for ``torch.cuda.set_device``.

        The ranks of a host take its devices by turns, also in groups. None if there is none.
        """
        from ringdl import _cuda

        hosts, rank = self._shared.hosts, self._engine.rank
        return _cuda.device_of_rank(hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]))

    @property
    def tuning(self) -> Tuning:
        """What algorithms are chosen by; the same on all ranks."""
        return self._shared.tuning

    def memory_hosts(self) -> list[int]:
        """The number of each rank's host; ranks that share no memory are on hosts of their own."""
        return self._of_members(self._shared.memory_hosts)

    def use_tuning(self, tuning: Tuning) -> None:
        """Choose by another table from now on, in all communicators of this one's engine.

        Call it on all their ranks, with the same table, while nothing is in flight, and before
        buckets are made.
        """
        self._shared.tuning = tuning
        self._engine.set_choice(tuning.lines(), self._shared.algorithm, tuning.nccl_bytes)
        self._engine.set_segment_bytes(tuning.segment_bytes)

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make one communicator per color, of the ranks that pass it. Collective.

        A rank may be in several communicators at once, and those without a common rank never wait
        for each other. They share this one's engine and end with it.

        Args:
            color: ranks with the same color get the same communicator; None: this rank gets none.
            key: ranks are ordered by it, then by their rank here.

        Returns:
            The communicator of this rank's color.
        """
        import numpy as np

        with self._telling(Kind.allgather, "ringdl.split"):
            try:
                color, key = color if color is None else index(color), index(key)
                mine = np.array([[color is not None, color or 0, key]], np.int64)
            except OverflowError:
                raise UsageError(
                    f"split: color is {color!r} and key {key!r}; pass whole numbers of 64 bits"
                ) from None
        with one_of_several_steps():
            others = self.allgather(mine, name="ringdl.split").tolist()
        if len(others) < self.size:
            raise UsageError("split: a rank has joined; split before any rank calls join()")
        number = self._count("split")
        if color is None:
            return None
        members = sorted(
            (other_key, rank)
            for rank, (is_in, other_color, other_key) in enumerate(others)
            if is_in and other_color == color
        )
        return self._make_group([rank for _, rank in members], ("split", self.epoch, number, color))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Make a communicator of some ranks, without any communication.

        Each member calls it with the same ranks in the same order; the other ranks may, and get
        None. Made again, it is another communicator. See `split`.

        Args:
            ranks: ranks of this communicator, each once; their order is that of the new one.

        Raises:
            UsageError: a rank that does not exist, or occurs twice, or no ranks at all.
        """
        listed = [index(rank) for rank in ranks]
        self._refuse_no_group(listed)
        if self.rank not in listed:
            return None
        return self._make_group(listed, ("group", self.epoch, self._count("group", *listed)))

    def join(self, timeout: float | None = None) -> int:
        """Wait until all ranks have called this, and take part in what the others do until then.

        For ranks that run out of data before the others: this one submits nothing more, and answers
        each collective of the others as if it had nothing to add. Reductions get what changes
        nothing (averages still divide by the number of ranks), buckets get no gradients, allgather,
        gather and alltoall no rows, and the results of broadcast and scatter are dropped.
        `Communicator.allgather_object` returns the objects of the ranks that are left. Then no
        other rank may make buckets or `split`, or name this one as a root.

        Args:
            timeout: seconds without any call of the others, by default RINGDL_TIMEOUT; without a
                limit where they train at their own pace (`ringdl.policies.ParameterServer`).

        Returns:
            The rank that joined last, the same on all ranks: the one for which most works had been
            submitted until then, and of several the highest. It has the newest parameters.

        Raises:
            StallError: the timeout is over. This rank goes on to answer the others: call again.
            MismatchError: a rank has shut down without joining.
            UsageError: this is not the communicator of all ranks.
        """
        if self._group is not None:
            raise UsageError("join: call it on the communicator that this one was made from")
        error = leave_all()
        if timeout is None:
            timeout = math.inf if have_own_pace() else self._timeout
        last = self._engine.join(seconds_of(timeout))
        start_all_over(last)
        if error is not None:
            raise error
        return last

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        *,
        device: int | str | None = None,
    ) -> Any:
        """Make an array in memory that the ranks of this host share. Not collective.

        Where all ranks of a communicator are on one host and pass such arrays, an allreduce reads
        each of them once and writes each once, and nothing else. The array belongs to the caller
        like any other; its memory is given back when nothing refers to it any more. That of a
        device is kept for the next such array of about its size, as other ranks may reach it.

        Args:
            shape: a number of elements, or extents.
            dtype: as NumPy knows it, or ``"bfloat16"``.
            device: the number of a CUDA device whose memory it is to lie in, or its name as
                ``"cuda:1"``; ``"cuda"`` is `local_device`. By default it lies in the CPU's.

        Returns:
            A NumPy array of any content, which begins at a multiple of 64 bytes. Ordinary memory
            where ranks share none, or have used up what they may share. A child made by `fork`
            has the same memory, not a copy: it sees what this process writes there later, also
            into the arrays that get this memory after this one. On a device an array that CuPy,
            Numba and PyTorch take without a copy (`__cuda_array_interface__`), and that
            ``numpy()`` copies.

        Raises:
            MemoryError: there is not enough memory.
            UsageError: a negative extent, no extents, no dtype, or no such device.
        """
        import math
        import sys

        import numpy as np

        if dtype == "bfloat16":
            from ml_dtypes import bfloat16

            dtype = bfloat16
        try:
            extents = tuple(map(index, shape if isinstance(shape, Sequence) else (shape,)))
            kind = np.dtype(dtype)
        except TypeError as error:
            raise UsageError(
                f"empty({shape!r}, {dtype!r}): pass a number of elements or extents, and a dtype "
                f"of NumPy or its name ({error})"
            ) from None
        if min(extents, default=0) < 0:
            raise UsageError(f"empty: the shape {extents} has a negative extent")
        byte_count = math.prod(extents) * kind.itemsize
        if byte_count > sys.maxsize:
            raise MemoryError(f"empty: there are no {byte_count} bytes of addresses; ask for less")
        if device is not None:
            from ringdl import _cuda

            number = _cuda.number_of(device, self)
            memory = self._engine.allocate_on(number, byte_count)
            return _cuda.Array(extents, kind, number, memory)
        return self._engine.allocate(byte_count).view(kind).reshape(extents)

    def stats(self) -> dict[str, int | float]:
        """Count what happened since `init` on this rank, in all communicators of its engine.

        Among others ``works`` that ended, ``messages_sent`` and ``bytes_sent`` (all messages),
        ``grants_sent``, and ``wait_seconds`` spent in waits.
        """
        return {
            key: value if key == "wait_seconds" else int(value)
            for key, value in self._engine.stats().items()
        }

    def shutdown(self) -> None:
        """Wait for the works in flight and for all ranks to call this, then end. Idempotent.

        Communicators that `split` and `group` have made end with the one that they came from, not
        by a call of theirs.
        """
        if self._group is not None:
            raise UsageError("shut down the communicator that this one was made from")
        self._engine.shutdown()

    def _hosts(self) -> list[int]:
        return self._of_members(self._shared.hosts)

    def _numbers(self) -> Sequence[int]:
        """Of its ranks, among all that `init` has."""
        return range(self.size) if self._ranks is None else self._ranks

    def _of_members(self, by_rank: Sequence[int]) -> list[int]:
        by_rank = by_rank[: self._engine.size]
        return list(by_rank) if self._ranks is None else [by_rank[rank] for rank in self._ranks]

    def _count(self, *what: Any) -> int:
        """How often this rank has made such a thing for this communicator before, in this epoch."""
        key = (self._id(), *what)
        self._shared.made[key] += 1
        return self._shared.made[key]

    def _id(self) -> int:
        return 0 if self._group is None else self._group.id

    def _refuse_no_group(self, ranks: list[int]) -> None:
        if not ranks:
            raise UsageError("group: a group holds at least one rank")
        for rank, count in Counter(ranks).items():
            if count > 1:
                raise UsageError(f"group: a group holds each rank once; rank {rank} occurs twice")
            if not 0 <= rank < self.size:
                raise UsageError(
                    f"group: rank {rank} is not a rank; ranks are 0 to {self.size - 1}"
                )

    def _group_of(self, ranks: list[int], *what: Any) -> Communicator | None:
        """The same as `group`, and each time the same group for the same `what`."""
        self._refuse_no_group(ranks)
        return self._make_group(ranks, what) if self.rank in ranks else None

    def _make_group(self, ranks: Sequence[int], what: tuple[Any, ...]) -> Communicator:
        import hashlib

        text = repr((self._id(), *what)).encode()
        salt = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        own = self._numbers()
        return Communicator(self._shared, [own[rank] for rank in ranks], salt)

    def _reduce_by_mpi(self, operand: Operand, op: Reduction) -> None:
        from ringdl import _mpi

        if self._mpi is None:
            if self._shared.mpi is None:
                raise UsageError(
                    "this communicator is not over MPI, so MPI cannot reduce for it; take another "
                    "algorithm, or start with mpirun"
                )
            ranks = self._shared.ranks_of_mpi(self._ranks)
            self._mpi = _mpi.own_communicator(self._shared.mpi, ranks)
        _mpi.allreduce(self._mpi, operand, op)

    def __deepcopy__(self, memo: Any) -> Communicator:
        """The same one, in a copy of what refers to it."""
        return self

    def __repr__(self) -> str:
        return f"<ringdl.Communicator rank {self.rank} of {self.size}>"


def communicator_of_all(shared: Shared) -> Communicator:
    """The communicator of all ranks, from an earlier epoch if somebody holds it; bound."""
    for each in shared.bound():
        if isinstance(each, Communicator) and each._ranks is None:
            each._bind()
            return each
    return Communicator(shared)


def communicator_over(
    engine: _engine.Communicator, settings: Settings | None = None
) -> Communicator:
    """A communicator of all ranks of an engine, which are on one host."""
    shared = Shared()
    shared.renew(engine, settings or Settings())
    return Communicator(shared)
