"""What moves arrays without reducing: broadcast, gathers, alltoall, messages, barrier."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any, overload

from ringdl import _arrays
from ringdl._arrays import AnyArray
from ringdl._base import Base, refusing
from ringdl._engine import Kind
from ringdl._errors import UsageError
from ringdl._work import seconds_of

if TYPE_CHECKING:
    from ringdl import _engine
    from ringdl._work import Work


class Exchanges(Base):
    """The exchanges of `ringdl.Communicator`."""

    def broadcast(
        self, x: AnyArray, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> AnyArray:
        """Like `broadcast_`, into a new array; `x` is not changed."""
        copy: AnyArray = self._copy_of(x, Kind.broadcast, name)
        return self.broadcast_(copy, root, name, timeout)

    def broadcast_(
        self, x: AnyArray, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> AnyArray:
        """Copy the root's array to all ranks, in place.

        Ranks of one host copy it in memory that they share (see `empty`); else it travels in
        segments along the chain of ranks. Ends on no rank before all have called with the same
        shape, dtype and root.

        Args:
            x: an array; same shape and dtype on all ranks.
            root: the rank whose array it becomes.
            name: what the call is matched by; by default its number among unnamed broadcasts.
            timeout: seconds until StallError.

        Returns:
            `x`.

        Raises:
            MismatchError: shapes, dtypes or roots differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: no such root, or not an array that can travel.
        """
        self._refuse_timeout(timeout, Kind.broadcast, name)
        return self._broadcast(name, x, root, is_async=False).wait(timeout)

    def broadcast_async(
        self, x: AnyArray, root: int = 0, name: str | None = None
    ) -> Work[AnyArray]:
        """Like `broadcast`, but return at once."""
        return self._broadcast(name, self._copy_of(x, Kind.broadcast, name), root, is_async=True)

    def broadcast_async_(
        self, x: AnyArray, root: int = 0, name: str | None = None
    ) -> Work[AnyArray]:
        """Like `broadcast_`, but return at once. `x` is off limits until the work has ended."""
        return self._broadcast(name, x, root, is_async=True)

    def allgather(
        self, x: AnyArray, name: str | None = None, timeout: float | None = None
    ) -> AnyArray:
        """Collect the arrays of all ranks along axis 0, in rank order.

        Ranks of one host copy them in memory that they share (see `empty`). Between hosts around
        the ring: first the lengths, then the blocks, each received once.

        Args:
            x: an array; the ranks' may differ in the length of axis 0 only. One without axes counts
                as one row.
            name: as in `broadcast_`, among allgathers.
            timeout: as in `broadcast_`.

        Returns:
            An array of the same kind, the same on all ranks.

        Raises:
            MismatchError: dtypes or the shapes beyond axis 0 differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: not an array that can travel.
        """
        self._refuse_timeout(timeout, Kind.allgather, name)
        return self._allgather(name, x, is_async=False).wait(timeout)

    def allgather_async(self, x: AnyArray, name: str | None = None) -> Work[AnyArray]:
        """Like `allgather`, but return at once. `x` must not change until the work has ended."""
        return self._allgather(name, x, is_async=True)

    @overload
    def alltoall(
        self,
        x: AnyArray,
        splits: None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AnyArray: ...
    @overload
    def alltoall(
        self,
        x: AnyArray,
        splits: Sequence[int],
        name: str | None = None,
        timeout: float | None = None,
    ) -> tuple[AnyArray, list[int]]: ...
    def alltoall(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Send each rank its part of the rows, and collect the parts that are meant for this rank.

        Ranks of one host copy them in memory that they share (see `empty`). Between hosts pairwise
        exchange (Thakur, Rabenseifner and Gropp 2005), first of lengths, then of blocks.

        Args:
            x: an array of at least one axis; ranks' may differ in the length of axis 0.
            splits: rows for each rank; their sum is ``len(x)``. By default all get the same.
            name: as in `broadcast_`, among alltoalls.
            timeout: as in `broadcast_`.

        Returns:
            The received rows in rank order, an array of the same kind; if `splits` is given, also
            the list of how many came from each rank.

        Raises:
            MismatchError: dtypes or the shapes beyond axis 0 differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: splits that do not fit, or not an array that can travel.
        """
        self._refuse_timeout(timeout, Kind.alltoall, name)
        return self._alltoall(name, x, splits, is_async=False).wait(timeout)

    def alltoall_async(
        self, x: Any, splits: Sequence[int] | None = None, name: str | None = None
    ) -> Work[Any]:
        """Like `alltoall`, but return at once. `x` must not change until the work has ended."""
        return self._alltoall(name, x, splits, is_async=True)

    def gather(
        self, x: AnyArray, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> AnyArray | None:
        """Collect the arrays of all ranks along axis 0 on the root, in rank order.

        Args:
            x: an array; the ranks' may differ in the length of axis 0 only. One without axes counts
                as one row.
            root: the rank that collects.
            name: as in `broadcast_`, among gathers.
            timeout: as in `broadcast_`.

        Returns:
            On the root an array of the same kind, elsewhere None.

        Raises:
            MismatchError: dtypes, roots or the shapes beyond axis 0 differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: no such root, or not an array that can travel.
        """
        self._refuse_timeout(timeout, Kind.gather, name)
        return self._gather(name, x, root, is_async=False).wait(timeout)

    def gather_async(
        self, x: AnyArray, root: int = 0, name: str | None = None
    ) -> Work[AnyArray | None]:
        """Like `gather`, but return at once. `x` must not change until the work has ended."""
        return self._gather(name, x, root, is_async=True)

    def scatter(
        self,
        x: AnyArray,
        root: int = 0,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AnyArray:
        """Give each rank its part of the rows of the root's array.

        Args:
            x: on the root the array; elsewhere any array of the same dtype and the same shape
                beyond axis 0, whose rows are ignored (``x[:0]`` will do).
            root: the rank that gives.
            splits: on the root, rows for each rank; their sum is ``len(x)``. By default as even as
                can be, earlier ranks take the remainder. Ignored elsewhere.
            name: as in `broadcast_`, among scatters.
            timeout: as in `broadcast_`.

        Returns:
            A new array of the same kind: this rank's rows.

        Raises:
            MismatchError: dtypes, roots or the shapes beyond axis 0 differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: no such root, splits that do not fit, or not an array that can travel.
        """
        self._refuse_timeout(timeout, Kind.scatter, name)
        return self._scatter(name, x, root, splits, is_async=False).wait(timeout)

    def scatter_async(
        self,
        x: AnyArray,
        root: int = 0,
        splits: Sequence[int] | None = None,
        name: str | None = None,
    ) -> Work[AnyArray]:
        """Like `scatter`, but return at once. `x` must not change until the work has ended."""
        return self._scatter(name, x, root, splits, is_async=True)

    def send(
        self, x: Any, dest: int, name: str | None = None, timeout: float | None = None
    ) -> None:
        """Send an array to one rank; return once that rank has called the matching `recv_`.

        Messages between two ranks are matched by name, or, without one, by their number.

        Args:
            x: an array.
            dest: the rank that receives; not this one.
            name: what the message is matched by.
            timeout: seconds until StallError.

        Raises:
            MismatchError: the receiver passes another shape or dtype, or the two wait for each
                other; on both.
            StallError: the receiver has not arrived in time.
            UsageError: no such rank, or not an array that can travel.
        """
        self._send(x, dest, name, is_async=False, timeout=timeout).wait(timeout)

    def send_async(self, x: Any, dest: int, name: str | None = None) -> Work[None]:
        """Like `send`, but return at once. `x` must not change until the work has ended."""
        return self._send(x, dest, name, is_async=True)

    def recv_(
        self,
        x: AnyArray,
        source: int | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AnyArray:
        """Receive what another rank sends by `send`, into `x`; returns `x`. Errors as there.

        Args:
            x: what the message goes to.
            source: the rank that sends. Without one, any rank that has sent a message of this name
                which no `recv_` has claimed: ranks in turn, a rank's messages in the order in which
                it sent them. A receive that names a rank claims its next message at once.
            name: what the message is matched by; the number is that of the two ranks' messages.
            timeout: seconds until StallError.
        """
        return self._recv(x, source, name, is_async=False, timeout=timeout).wait(timeout)

    def recv_async_(
        self, x: AnyArray, source: int | None = None, name: str | None = None
    ) -> Work[AnyArray]:
        """Like `recv_`, but return at once. `x` is off limits until the work has ended.

        `Work.source` then says which rank has sent it.
        """
        return self._recv(x, source, name, is_async=True)

    def barrier(self, name: str | None = None, timeout: float | None = None) -> None:
        """Return once all ranks have called.

        By dissemination (Hensgen, Finkel and Manber 1988): ceil(log2(size)) rounds.
        """
        self._refuse_timeout(timeout, Kind.barrier, name)
        self._barrier(name, is_async=False).wait(timeout)

    def barrier_async(self, name: str | None = None) -> Work[None]:
        """Like `barrier`, but return at once; the work ends when all ranks have called."""
        return self._barrier(name, is_async=True)

    @refusing(Kind.barrier)
    def _barrier(self, name: str | None, *, is_async: bool) -> Work[Any]:
        return self._submit(Kind.barrier, None, name, lambda _: None, is_async=is_async)

    @refusing(Kind.broadcast)
    def _broadcast(
        self, name: str | None, x: AnyArray, root: int, *, is_async: bool
    ) -> Work[AnyArray]:
        target = _arrays.operand(x, written=True)
        return self._submit(
            Kind.broadcast,
            target,
            name,
            lambda _: target.write_back(),
            root=_rank_number(root, "root"),
            is_async=is_async,
        )

    @refusing(Kind.allgather)
    def _allgather(self, name: str | None, x: AnyArray, *, is_async: bool) -> Work[AnyArray]:
        source = _arrays.operand(x, written=False)
        return self._submit(
            Kind.allgather, source, name, lambda work: _rows_of(x, work)[0], is_async=is_async
        )

    @refusing(Kind.alltoall)
    def _alltoall(
        self, name: str | None, x: Any, splits: Sequence[int] | None, *, is_async: bool
    ) -> Work[Any]:
        source = _arrays.operand(x, written=False)
        if x.ndim == 0:
            raise UsageError("alltoall deals rows, and an array without axes has none")
        if splits is None and x.shape[0] % self.size != 0:
            raise UsageError(
                f"alltoall without splits gives all ranks the same number of rows, but "
                f"{x.shape[0]} rows are not divisible by {self.size} ranks; pass splits"
            )
        dealt = (
            [x.shape[0] // self.size] * self.size if splits is None else _rows("alltoall", splits)
        )

        def finish(work: _engine.Work) -> Any:
            rows, counts = _rows_of(x, work)
            return rows if splits is None else (rows, counts)

        return self._submit(Kind.alltoall, source, name, finish, splits=dealt, is_async=is_async)

    @refusing(Kind.gather)
    def _gather(
        self, name: str | None, x: AnyArray, root: int, *, is_async: bool
    ) -> Work[AnyArray | None]:
        source = _arrays.operand(x, written=False)
        root = _rank_number(root, "root")
        is_root = self.rank == root
        return self._submit(
            Kind.gather,
            source,
            name,
            lambda work: _rows_of(x, work)[0] if is_root else None,
            root=root,
            is_async=is_async,
        )

    @refusing(Kind.scatter)
    def _scatter(
        self,
        name: str | None,
        x: AnyArray,
        root: int,
        splits: Sequence[int] | None,
        *,
        is_async: bool,
    ) -> Work[AnyArray]:
        source = _arrays.operand(x, written=False)
        root = _rank_number(root, "root")
        if x.ndim == 0:
            raise UsageError("scatter deals rows, and an array without axes has none")
        size, rows = self.size, x.shape[0]
        if splits is None:
            splits = [rows // size + (rank < rows % size) for rank in range(size)]
        return self._submit(
            Kind.scatter,
            source,
            name,
            lambda work: _rows_of(x, work)[0],
            root=root,
            splits=_rows("scatter", splits) if self.rank == root else [],
            is_async=is_async,
        )

    def _send(
        self,
        x: Any,
        dest: int,
        name: str | None,
        *,
        is_async: bool,
        timeout: float | None = None,
    ) -> Work[Any]:
        pair = self._engine.pair(self.rank, _rank_number(dest, "dest"), self._group)
        try:
            seconds_of(0 if timeout is None else timeout)
            source = _arrays.operand(x, written=False)
            return self._submit(
                Kind.message, source, name, lambda _: None, group=pair, is_async=is_async
            )
        except Exception as error:
            self._refuse(error, Kind.message, name, group=pair)
            raise

    def _recv(
        self,
        x: AnyArray,
        source: int | None,
        name: str | None,
        *,
        is_async: bool,
        timeout: float | None = None,
    ) -> Work[AnyArray]:
        from_any = source is None
        number = None if source is None else _rank_number(source, "source")
        pair = None if number is None else self._engine.pair(number, self.rank, self._group)
        try:
            seconds_of(0 if timeout is None else timeout)
            target = _arrays.operand(x, written=True)
            work = self._submit(
                Kind.message,
                target,
                name,
                lambda _: target.write_back(),
                group=pair,
                from_any=from_any,
                is_async=is_async,
            )
        except Exception as error:
            if pair is not None:  # else no rank was notified of a receive, nor has to be
                self._refuse(error, Kind.message, name, group=pair)
            raise
        work._source = number
        return work


def _rank_number(rank: Any, what: str) -> int:
    """The number of a rank that `root`, `dest` or `source` gives.

    Raises:
        UsageError: no whole number.
    """
    try:
        return index(rank)
    except TypeError:
        raise UsageError(f"{what} is {rank!r}; pass the number of a rank") from None


def _rows(what: str, splits: Any) -> list[int]:
    """How many rows each rank gets.

    Raises:
        UsageError: these are no whole numbers.
    """
    try:
        return [index(rows) for rows in (splits.tolist() if hasattr(splits, "tolist") else splits)]
    except TypeError:
        raise UsageError(
            f"{what}: splits is {splits!r}; pass a list of whole numbers, the rows for each rank"
        ) from None


def _rows_of(like: Any, work: _engine.Work) -> tuple[Any, list[int]]:
    """What a work has collected, as rows like those of an array, and how many from each rank."""
    lengths, data = work.take_gathered()
    row_bytes = _arrays.row_bytes(like)
    counts = [length // max(row_bytes, 1) for length in lengths]
    return _arrays.gathered(like, sum(counts), data), counts
