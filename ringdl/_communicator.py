"""A group of ranks and the collectives among them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ringdl import _arrays
from ringdl._engine import Reduction
from ringdl._settings import Settings
from ringdl._work import Work

if TYPE_CHECKING:
    from ringdl import _engine


class Communicator:
    """A group of ranks; every function of the module is a method here.

    Collectives are matched by name, or, without one, by their number among the calls of their kind;
    ranks may submit them in any order. Threads may share a communicator if MPI offers
    MPI_THREAD_MULTIPLE; else only the thread that made it may use it.

    Made by `ringdl.init`; use `ringdl.get_communicator` to get the default one.
    """

    def __init__(
        self,
        engine: _engine.Communicator,
        *,
        settings: Settings | None = None,
        local_rank: int = 0,
        local_size: int = 1,
        host_rank: int = 0,
        host_count: int = 1,
    ) -> None:
        self._engine = engine
        self._timeout = (settings or Settings()).timeout
        self._local_rank = local_rank
        self._local_size = local_size
        self._host_rank = host_rank
        self._host_count = host_count
        self._next_bucket = 0  # buckets have numbers that all ranks agree on

    @property
    def rank(self) -> int:
        """This process's number, 0 to ``size - 1``."""
        return self._engine.rank

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return self._engine.size

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        return self._local_rank

    @property
    def local_size(self) -> int:
        """How many ranks are on this host."""
        return self._local_size

    @property
    def host_rank(self) -> int:
        """This host's number; hosts are ordered by their lowest rank."""
        return self._host_rank

    @property
    def host_count(self) -> int:
        """How many hosts take part."""
        return self._host_count

    def allreduce(
        self,
        x: Any,
        op: Reduction = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Reduce an array over all ranks; every rank gets the same bits.

        The ring algorithm of Patarasuk and Yuan (2009): each rank sends and receives 2(P-1)/P of
        the array, in segments, so that sending, receiving and reducing overlap. Below fp32, each
        hop adds in fp32 and rounds once.

        Args:
            x: a NumPy array or torch CPU tensor of any shape; same shape and dtype on all ranks.
            op: Average (default), Sum, Min, Max or Product. Integers wrap, and their average
                truncates towards zero. bool: sum and max are "or", the others "and". Min and max
                propagate NaN.
            name: what the call is matched by; by default its number among unnamed allreduces.
            timeout: seconds until StallError.

        Returns:
            A new array of the same kind; `x` is not changed.

        Raises:
            MismatchError: shapes, dtypes or reductions differ; on every rank.
            StallError: some rank has not come in time.
            UsageError: not an array that can be reduced.
        """
        return self.allreduce_async(x, op, name).wait(timeout)

    def allreduce_(
        self,
        x: Any,
        op: Reduction = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Like `allreduce`, in place: no copy is made of a contiguous array. Returns `x`."""
        return self._allreduce(x, op, name).wait(timeout)

    def allreduce_async(
        self, x: Any, op: Reduction = Reduction.Average, name: str | None = None
    ) -> Work:
        """Like `allreduce`, but return at once. Wait for the returned work to get the array."""
        work = self._allreduce(_arrays.copy_of(x), op, name)
        self._engine.wake()
        return work

    def allreduce_async_(
        self, x: Any, op: Reduction = Reduction.Average, name: str | None = None
    ) -> Work:
        """Like `allreduce_`, but return at once. `x` is off limits until the work has ended."""
        work = self._allreduce(x, op, name)
        self._engine.wake()
        return work

    def allgather(self, x: Any, name: str | None = None, timeout: float | None = None) -> Any:
        """Collect the arrays of all ranks along axis 0, in rank order.

        Around the ring: first the lengths, then the blocks, each received once.

        Args:
            x: an array; the ranks' may differ in the length of axis 0 only. One without axes counts
                as one row.
            name: as in `allreduce`.
            timeout: as in `allreduce`.

        Returns:
            An array of the same kind, the same on all ranks.

        Raises:
            MismatchError: dtypes or the shapes beyond axis 0 differ; on every rank.
            StallError: some rank has not come in time.
            UsageError: not an array that can travel.
        """
        source = _arrays.operand(x, written=False)
        if x.ndim == 0:
            x = x.reshape(1)
        work = self._engine.allgather(source.array, source.dtype, name or "")

        def finish() -> Any:
            lengths, data = work.take_gathered()
            row_bytes = math.prod(x.shape[1:]) * _arrays.item_bytes(x)
            if row_bytes == 0:  # the bytes do not tell how many rows there are
                import numpy as np

                rows = int(self.allgather(np.array([len(x)]), name, timeout).sum())
            else:
                rows = sum(lengths) // row_bytes
            return _arrays.gathered(x, rows, data)

        return Work(self._engine, work, self._timeout, finish).wait(timeout)

    def broadcast(
        self, x: Any, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Like `broadcast_`, into a new array; `x` is not changed."""
        return self.broadcast_(_arrays.copy_of(x), root, name, timeout)

    def broadcast_(
        self, x: Any, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Copy the root's array to all ranks, in place.

        In segments along the chain of ranks. Ends on no rank before all have called with the same
        shape, dtype and root.

        Args:
            x: an array; same shape and dtype on all ranks.
            root: the rank whose array it becomes.
            name: as in `allreduce`.
            timeout: as in `allreduce`.

        Returns:
            `x`.

        Raises:
            MismatchError: shapes, dtypes or roots differ; on every rank.
            StallError: some rank has not come in time.
            UsageError: no such root, or not an array that can travel.
        """
        target = _arrays.operand(x, written=True)
        work = self._engine.broadcast(target.array, target.dtype, root, name or "")
        return Work(self._engine, work, self._timeout, target.write_back).wait(timeout)

    def barrier(self, name: str | None = None, timeout: float | None = None) -> None:
        """Return once all ranks have called.

        By dissemination (Hensgen, Finkel and Manber 1988): ceil(log2(size)) rounds.
        """
        work = self._engine.barrier(name or "")
        Work(self._engine, work, self._timeout, lambda: None).wait(timeout)

    def broadcast_object(
        self, obj: Any, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Copy a Python object from the root to all ranks, by pickle.

        Args:
            obj: the object on the root; what others pass is ignored.
            root: the rank that sends.
            name: as in `allreduce`.
            timeout: as in `allreduce`, for each of its two broadcasts.

        Returns:
            The root's object; on the root `obj` itself.
        """
        import pickle

        import numpy as np

        payload = pickle.dumps(obj) if self.rank == root else b""
        length = self.broadcast_(np.array([len(payload)]), root, name, timeout)
        data = np.frombuffer(bytearray(payload.ljust(int(length[0]))), np.uint8)
        self.broadcast_(data, root, name, timeout)
        return obj if self.rank == root else pickle.loads(data.tobytes())

    def stats(self) -> dict[str, int | float]:
        """Count what happened since `init` on this rank.

        Among others ``works`` that ended, ``messages_sent`` and ``bytes_sent`` (all messages),
        ``grants_sent``, and ``wait_seconds`` spent in waits.
        """
        return {
            key: value if key == "wait_seconds" else int(value)
            for key, value in self._engine.stats().items()
        }

    def shutdown(self) -> None:
        """Wait for the works in flight and for all ranks to call this, then end. Idempotent."""
        self._engine.shutdown()

    def _allreduce(self, x: Any, op: Reduction, name: str | None) -> Work:
        target = _arrays.operand(x, written=True)
        work = self._engine.allreduce(target.array, target.dtype, op, name or "")
        return Work(self._engine, work, self._timeout, target.write_back)

    def __repr__(self) -> str:
        return f"<ringdl.Communicator rank {self.rank} of {self.size}>"
