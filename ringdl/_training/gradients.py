r"""When gradients are averaged: passes, rounds and steps, for any framework.

A *pass* accumulates gradients (a backward). In every n-th pass each gradient that is final is
launched, and the *round* ends with the pass: all ranks average. Then the optimizer *steps*. A step
averages what passes leave unaveraged.

```
pass     begin_pass   arrived(i)   arrived(j) ...                       end_pass
bucket                           \__ full: its allreduce is in flight      |
round                                      zeros for what is missing; wait for all buckets
step     synchronize (joins in, if this rank had no pass)   the optimizer   finish_step
```

Each gradient has one view into the buckets. `arrived` moves what the framework has made elsewhere
into the view, and makes the view the gradient.

Each rank's step travels with each round (see ``rounds``), so a mix of steps is detected. Sparse
gradients are summed apart, at the end of the round. The same note announces a new sparse gradient:
in that round it leaves the buckets on all ranks, and the others get new ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol

import numpy as np

import ringdl
from ringdl import _steps, _timeline
from ringdl._buckets import AGREEING
from ringdl._engine import Kind
from ringdl._joining import starts_over
from ringdl._reductions import CompressionName
from ringdl._training import replicas
from ringdl._training.replicas import Replica
from ringdl._training.rounds import Rounds, raise_failed
from ringdl._training.store import A, SparseStore, Store

_numbers = itertools.count()

_RULE = "call backward() equally often between two steps (or not at all), and step() equally often"
"""What keeps ranks in step."""


def end_passes(all_gradients: Iterable[Gradients[Any]]) -> None:
    """End the passes of several optimizers' gradients, in the order in which these were made.

    Ranks may reach them in different orders, and each would wait for the other.
    """
    for gradients in sorted(all_gradients, key=lambda gradients: gradients.number):
        gradients.end_pass()


def agreeing(communicator: ringdl.Communicator) -> AbstractContextManager[None]:
    """Around what precedes `Gradients(...)`: the other ranks hear of an error raised in it."""
    return communicator._telling(Kind.allgather, AGREEING)


class Averages(Protocol):
    """What `Following` has."""

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step is to use averages."""


class Gradients(Generic[A]):
    """The gradients of one optimizer. Collective: ranks construct in the same order.

    Args:
        store: where they are.
        op: Average or Sum over the ranks.
        compression: as `ringdl.Buckets` takes it.
        passes_per_round: average once in this many passes.
        communicator: the ranks.
        predivisor: of dense gradients before they are summed; averages are multiplied by it.
        check_replicas: whether the first step is to compare the parameters of all ranks.

    Raises:
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """

    def __init__(
        self,
        store: Store[A],
        op: ringdl.Reduction,
        compression: CompressionName | None,
        passes_per_round: int,
        communicator: ringdl.Communicator,
        predivisor: float = 1.0,
        check_replicas: bool = True,
    ) -> None:
        self.number = next(_numbers)
        """See `end_passes`."""
        self.op = op
        self.compression = compression
        self.communicator = communicator
        self.step = 0
        """How many steps of the optimizer have ended, since all ranks last joined."""
        self._checks_replicas = check_replicas
        self.are_replicas_checked = not check_replicas
        """Whether parameters were found to be equal on all ranks since then, or need not be."""
        self.is_local = False
        self.following: Averages | None = None
        """Says whether gradients are averaged now, if not always."""
        self.is_pending = False
        """Whether a pass has added to the gradients since they were averaged."""
        self.averages_at_end = False
        """Whether the current pass ends a round."""
        self.is_learning = True
        """Whether the first pass has not ended: nothing is known yet of the order of gradients."""
        self._replaced_by = ""
        self._is_averaged = False
        self._store = store
        self._sparse_store = store if isinstance(store, SparseStore) else None
        self._predivisor = predivisor
        self._rounds = self._make_rounds(range(len(store.specs)))
        self._epoch = communicator.epoch
        self.key = self._new_key()
        """What its collectives are matched by."""
        self._sparse_dims: dict[int, int] = {}
        self._sums: dict[int, tuple[A, Any]] = {}
        """For op=Sum: the gradients as the last round left them, and their versions."""
        self._observed: dict[int, None] = {}
        """In their order: the gradients that the first pass has accumulated."""
        self._passes = 0
        self._passes_per_round = passes_per_round
        starts_over(self)

    def replace(self, how: str) -> None:
        """Others average these gradients from now on; `how` is what refusals say."""
        self._replaced_by = how

    def refuse_replaced(self) -> None:
        """Refuse a call that would average.

        Raises:
            UsageError: others average these gradients.
        """
        if self._replaced_by:
            raise ringdl.UsageError(self._replaced_by)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Passes in this context add to the local gradients; nothing is averaged."""
        was_local, self.is_local = self.is_local, True
        try:
            yield
        finally:
            self.is_local = was_local

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Around what finds the gradients of a pass: the other ranks hear of an error raised in it.

        They get a MismatchError where they end the round, and none is averaged.
        """
        try:
            yield
        except Exception as error:
            if self._is_last_pass() and self._epoch == self.communicator.epoch:
                self._rounds.end(self.step, False, has_failed=True)
                raise_failed(error, self.step, self.communicator, f"{self.key}.failed")
            raise

    def _is_last_pass(self) -> bool:
        if self.is_local or not (self.following is None or self.following.averages_gradients):
            return False
        return (self._passes + 1) % self._passes_per_round == 0

    def begin_pass(self) -> None:
        """Gradients are going to be accumulated."""
        self.averages_at_end = self._is_last_pass()
        if self.averages_at_end:
            self._follow()
        self.end_failed_pass()

    def end_failed_pass(self) -> None:
        """If the last pass failed half-way: the other ranks wait for what it has begun."""
        if self._rounds.ready and self._epoch == self.communicator.epoch:
            self._reduce([None] * len(self._store.specs))

    def arrived(self, index: int, is_final: bool = True) -> bool:
        """A gradient was accumulated: it is in its view now. False if it stays sparse.

        Args:
            index: which one.
            is_final: whether nothing more is added to it in this pass. Then it is averaged as soon
                as its bucket is full, from the second pass on, if this pass ends a round.
        """
        self.is_pending = True
        if self.is_learning:
            self._observed.setdefault(index)
        if not is_final or not self.averages_at_end or self.is_learning:
            return self._adopt(index)
        return self._launch(index)

    def is_launched(self, index: int) -> bool:
        """Whether a gradient that has arrived is being averaged, and must not change."""
        return index in self._rounds.ready

    def end_pass(self) -> None:
        """Nothing more is accumulated in this pass. Collective, if it ends a round."""
        self.is_learning = False
        self._passes += 1
        if self.averages_at_end:
            self._average()

    def synchronize(self) -> None:
        """Average what is not averaged yet; without any pass, join in. Collective."""
        self.refuse_replaced()
        self._follow()
        if self.is_pending or not self._is_averaged:
            self._average()

    @property
    def is_averaged(self) -> bool:
        """Whether all that was accumulated in this step is averaged."""
        return self._is_averaged and not self.is_pending

    def expect_round(self) -> None:
        """The gradients have been used or discarded: all ranks average before the next step."""
        self._is_averaged = False
        self._passes = 0

    def finish_step(self) -> None:
        """The optimizer has stepped."""
        self.step += 1
        self.expect_round()

    def check_replicas(self, named: Iterable[tuple[str, Replica]], how_to_mend: str) -> None:
        """Before the first step: compare the parameters of all ranks. Collective.

        Args:
            named: the parameters, under the same names in the same order on every rank.
            how_to_mend: the end of the error's sentence.

        Raises:
            MismatchError: on every rank, if they differ.
        """
        self._follow()
        if not self.are_replicas_checked:
            name = f"{self.key}.replicas"
            replicas.check(list(named), self.communicator, name, how_to_mend)
            self.are_replicas_checked = True

    def start_over(self) -> None:
        """Begin anew on all ranks, which may have made different numbers of steps."""
        self.step = 0
        self.is_local = False
        self.are_replicas_checked = not self._checks_replicas
        self._sums = {}
        self.expect_round()

    def set_passes_per_round(self, passes: int) -> None:
        """Average once in this many passes from now on."""
        self._passes_per_round = passes

    def replan(self) -> None:
        """Put gradients into buckets in the order of rank 0's first pass. Collective.

        Raises:
            UsageError: on every rank, if rank 0 has had none; on this one, if gradients are being
                averaged.
        """
        self.refuse_replaced()
        self._follow()
        if self._rounds.ready:
            raise ringdl.UsageError(
                "replan() while gradients are being averaged: call it after step()"
            )
        order = self.communicator.broadcast_object([*self._observed], name=f"{self.key}.order")
        if not order:
            raise ringdl.UsageError("replan() before the first backward(): call it after step()")
        last = self._rounds.views.keys() - set(order)  # those that never arrived are last
        ready = [index for index in order if index in self._rounds.views] + sorted(last)
        self._move(reversed(ready))

    def _follow(self) -> None:
        """After `ringdl.init` anew: go on with the ranks that there are now. Collective then.

        Some may be new. All take the order of rank 0, less what some rank has found to be sparse.
        """
        if self._epoch == self.communicator.epoch:
            return
        self.key = self._new_key()
        own = [*self._rounds.views], self._sparse_dims
        learnt = self.communicator.allgather_object(own, name=f"{self.key}.learnt")
        self._sparse_dims = {index: dim for _, dims in learnt for index, dim in dims.items()}
        self._move(index for index in learnt[0][0] if index not in self._sparse_dims)
        self._epoch = self.communicator.epoch
        self.start_over()

    def _new_key(self) -> str:
        return f"ringdl.gradients.{self.communicator._count('gradients') - 1}"

    def _launch(self, index: int) -> bool:
        """Average a gradient, which nothing is added to any more; False if it stays sparse."""
        view, gradient = self._rounds.view(index), self._store.get(index)
        assert gradient is not None
        is_elsewhere = view is not None and gradient is not view and not self._sparse_dim(gradient)
        if is_elsewhere and self._rounds.pack(index, gradient):
            return True
        is_dense = self._adopt(index)
        if is_dense:
            self._rounds.mark_ready(index)
        return is_dense

    def _adopt(self, index: int) -> bool:
        """Move a gradient that was made elsewhere into its view; False if it stays sparse."""
        view, gradient = self._rounds.view(index), self._store.get(index)
        assert gradient is not None
        if view is None or self._sparse_dim(gradient):
            return False
        if gradient is not view:
            self._store.copy(view, gradient)
            self._store.set(index, view)
        return True

    def _average(self) -> None:
        with _timeline.span("average", f"gradients of {self.key}"):
            self._average_all()

    def _average_all(self) -> None:
        silent = {index for index in self._sums if self._is_summed_already(index)}
        own = [
            None if index in silent else self._store.get(index)
            for index in range(len(self._store.specs))
        ]
        for index, gradient in enumerate(own):
            if gradient is not None and index not in self._rounds.ready and self._launch(index):
                own[index] = self._store.get(index)
        for index, average in self._reduce(own).items():
            average = self._store.result(average)
            if self._store.get(index) is not average:
                self._store.set(index, average)
        if self.op == ringdl.Sum:
            gradients = {index: self._store.get(index) for index in range(len(own))}
            self._sums = {
                index: (gradient, self._store.version(gradient))
                for index, gradient in gradients.items()
                if gradient is not None
            }
        self.is_learning = False
        self.is_pending = False
        self._is_averaged = True

    def _is_untouched_sum(self, index: int, gradient: A | None) -> bool:
        known, version = self._sums[index]
        return gradient is known and self._store.version(known) == version

    def _is_summed_already(self, index: int) -> bool:
        """Whether the gradient is the sum over the ranks, untouched, which rank 0 contributes."""
        return self.communicator.rank > 0 and self._is_untouched_sum(index, self._store.get(index))

    def _reduce(self, gradients: list[A | None]) -> dict[int, A]:
        """End the round on all ranks; returns what some rank has produced, by index.

        Args:
            gradients: of these, those in views count if they are ready, and sparse ones always.
        """
        unknown = {
            index: (gradient, sparse_dim)
            for index, gradient in enumerate(gradients)
            if gradient is not None
            and index in self._rounds.views
            and (sparse_dim := self._sparse_dim(gradient))
        }
        ended = self._rounds.end(self.step, bool(unknown))
        if ended.has_failed:
            raise_failed(None, self.step, self.communicator, f"{self.key}.failed")
        if not ended.is_in_step:
            name = f"{self.key}.steps"
            _steps.raise_out_of_step(self.step, self.communicator, name, "gradients", _RULE)
        dense_parts: dict[int, A] = {}
        if ended.has_sparse:
            views, known = self._rounds.views, set(self._sparse_dims)
            self._learn_sparse({index: dim for index, (_, dim) in unknown.items()})
            for index in self._sparse_dims.keys() - known:
                gradients[index] = unknown[index][0] if index in unknown else None
                if index in ended.produced:
                    dense_parts[index] = views[index]
        averages = {
            index: view for index, view in self._rounds.views.items() if index in ended.produced
        }
        return averages | self._reduce_sparse(gradients, dense_parts)

    def _reduce_sparse(self, gradients: list[A | None], dense_parts: dict[int, A]) -> dict[int, A]:
        """What some rank has produced of the gradients that are known to be sparse, by index."""
        store = self._sparse_store
        if store is None:
            return {}
        begun = {
            index: store.begin_sparse(
                index,
                gradients[index],
                sparse_dim,
                self.op,
                self.communicator,
                f"{self.key}.{index}",
            )
            for index, sparse_dim in self._sparse_dims.items()
        }
        averages: dict[int, A] = {}
        for index, end in begun.items():
            average = end()
            if average is not None and index in dense_parts:
                average = store.add_dense(average, dense_parts[index], self._sparse_dims[index])
            if average is not None:
                averages[index] = average
        return averages

    def _sparse_dim(self, gradient: A) -> int:
        return 0 if self._sparse_store is None else self._sparse_store.sparse_dim(gradient)

    def _make_rounds(self, indices: Iterable[int]) -> Rounds[A]:
        return Rounds(
            self._store, indices, self.op, self.compression, self.communicator, self._predivisor
        )

    def _learn_sparse(self, unknown: dict[int, int]) -> None:
        """Take what is sparse on any rank out of the buckets; the others move to new ones."""
        count = len(self._store.specs)
        own = np.zeros((1, count), np.int64)
        for index, sparse_dim in unknown.items():
            own[0, index] = sparse_dim
        dims = self.communicator.allgather(own, name=f"{self.key}.sparse").max(axis=0)
        self._sparse_dims |= {int(index): int(dims[index]) for index in np.flatnonzero(dims)}
        self._move(index for index in range(count) if index not in self._sparse_dims)

    def _move(self, indices: Iterable[int]) -> None:
        """Move gradients to new buckets, which hold them in another order, or fewer of them."""
        old_views = self._rounds.views
        self._rounds = self._make_rounds(indices)
        for index, view in self._rounds.views.items():
            old = old_views[index]
            self._store.copy(view, old)
            if self._store.get(index) is old:
                self._store.set(index, view)
            if index in self._sums and self._is_untouched_sum(index, old):
                self._sums[index] = (view, self._store.version(view))
