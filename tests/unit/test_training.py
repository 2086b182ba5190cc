"""What training is for any framework, driven by the smallest of adapters: gradients in a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringdl
from ringdl import Communicator, MismatchError, UsageError
from ringdl._training import Gradients, SparseStore, Store, replicas
from tests.conftest import RunRanks

SHAPES = [(3, 2), (5,), (), (4, 1)]
Rows = tuple[np.ndarray, np.ndarray]
"""A sparse gradient: numbers of rows, and the rows."""


class Listed(Store[Any]):
    """Gradients of a framework that passes them to a function."""

    how_to_wrap = "averaged(...)"

    def __init__(self, dtype: str = "float64") -> None:
        self.specs = [
            (f"w{index}", shape, dtype, _strides(shape)) for index, shape in enumerate(SHAPES)
        ]
        self.gradients: list[Any] = [None] * len(SHAPES)

    def get(self, index: int) -> Any:
        return self.gradients[index]

    def set(self, index: int, gradient: Any) -> None:
        self.gradients[index] = gradient

    def view(self, index: int, memory: Any) -> Any:
        return np.from_dlpack(memory)

    def copy(self, view: Any, gradient: Any) -> None:
        view[...] = gradient

    def scale(self, view: Any, factor: float) -> None:
        view *= factor


class ListedRows(Listed, SparseStore[Any]):
    """The same, where a gradient may be some rows."""

    def sparse_dim(self, gradient: Any) -> int:
        return int(isinstance(gradient, tuple))

    def begin_sparse(
        self,
        index: int,
        gradient: Any,
        sparse_dim: int,
        op: ringdl.Reduction,
        communicator: Communicator,
        name: str,
    ) -> Callable[[], Any]:
        gathered = communicator.allgather_object(gradient, name=name)

        def end() -> Any:
            total = np.zeros(SHAPES[index])
            for each in gathered:
                if isinstance(each, tuple):
                    np.add.at(total, each[0], each[1])
                elif each is not None:
                    total += each
            total /= communicator.size if op == ringdl.Average else 1
            rows = np.flatnonzero(total.any(axis=tuple(range(1, total.ndim))))
            return None if all(each is None for each in gathered) else (rows, total[rows])

        return end

    def add_dense(self, gradient: Any, view: Any, sparse_dim: int) -> Any:
        total = view.copy()
        np.add.at(total, gradient[0], gradient[1])
        return np.arange(len(total)), total


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(stride // 8 for stride in np.zeros(shape).strides)


class Trained:
    """A script's loop: passes of given gradients, and steps."""

    def __init__(self, communicator: Communicator, dtype: str = "float64", **options: Any) -> None:
        self.store = options.pop("store", Listed)(dtype)
        self.gradients = Gradients(
            self.store,
            options.pop("op", ringdl.Average),
            None,
            options.pop("passes_per_round", 1),
            communicator,
            **options,
        )

    def backward(self, produced: dict[int, Any], order: tuple[int, ...] = (3, 2, 1, 0)) -> None:
        """Add to the gradients as autograd does, and tell of each."""
        self.gradients.begin_pass()
        for index in order:
            if index not in produced:
                continue
            known = self.store.gradients[index]
            self.store.gradients[index] = (
                produced[index] if known is None else known + produced[index]
            )
            self.gradients.arrived(index)
        self.gradients.end_pass()

    def step(self) -> list[Any]:
        """What the optimizer finds; then gradients are let go."""
        self.gradients.synchronize()
        found = [
            gradient.copy() if isinstance(gradient, np.ndarray) else gradient
            for gradient in self.store.gradients
        ]
        self.gradients.finish_step()
        self.store.gradients = [None] * len(SHAPES)
        return found


def made(rank: int, step: int, index: int) -> np.ndarray:
    return np.random.default_rng([rank, step, index]).standard_normal(SHAPES[index])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_averages(run_ranks: RunRanks, size: int, dtype: str) -> None:
    """Gradient 1 is missing on odd ranks, 2 on all; who has no pass joins in at the step."""

    def train(communicator: Communicator) -> list[list[Any]]:
        trained = Trained(communicator, dtype)
        rank = communicator.rank
        found = []
        for step in range(4):
            indices = [0, 3] if rank % 2 else [0, 1, 3]
            if step < 3 or rank == 0:
                trained.backward({index: made(rank, step, index) for index in indices})
            found.append(trained.step())
        return found

    results = run_ranks(size, train)
    for step in range(4):
        ranks = range(size) if step < 3 else range(1)
        for index in (0, 1, 3):
            expected = sum(made(rank, step, index) for rank in ranks if index != 1 or rank % 2 == 0)
            for found in results:
                average = found[step][index]
                np.testing.assert_allclose(average, expected / size, rtol=1e-5)
                assert average.tobytes() == results[0][step][index].tobytes()
        assert all(found[step][2] is None for found in results)


def test_accumulates_over_passes(run_ranks: RunRanks) -> None:
    def train(communicator: Communicator) -> None:
        trained = Trained(communicator, passes_per_round=2)
        own = [made(communicator.rank, number, 0) for number in range(2)]
        trained.backward({0: own[0]})
        np.testing.assert_array_equal(trained.store.gradients[0], own[0])
        trained.backward({0: own[1]})
        mean = sum(made(rank, 0, 0) + made(rank, 1, 0) for rank in range(2)) / 2
        np.testing.assert_allclose(trained.step()[0], mean, rtol=1e-12)
        with trained.gradients.local():
            trained.backward({0: own[0]})
            trained.backward({0: own[1]})
        np.testing.assert_array_equal(trained.store.gradients[0], own[0] + own[1])
        np.testing.assert_allclose(trained.step()[0], mean, rtol=1e-12)

    run_ranks(2, train)


def test_predivides(run_ranks: RunRanks) -> None:
    def train(communicator: Communicator) -> None:
        trained = Trained(communicator, predivisor=8.0)
        trained.backward({0: made(communicator.rank, 0, 0)})
        mean = (made(0, 0, 0) + made(1, 0, 0)) / 2
        np.testing.assert_allclose(trained.step()[0], mean, rtol=1e-12)

    run_ranks(2, train)


def test_ranks_out_of_step(run_ranks: RunRanks) -> None:
    def train(communicator: Communicator) -> None:
        trained = Trained(communicator)
        trained.backward({0: made(communicator.rank, 0, 0)})
        if communicator.rank == 1:
            trained.gradients.finish_step()
        with pytest.raises(MismatchError, match="step 1 on rank 0 and step 2 on rank 1"):
            trained.backward({0: made(communicator.rank, 0, 0)})

    run_ranks(2, train)


def test_order_of_the_first_pass(run_ranks: RunRanks) -> None:
    def train(communicator: Communicator) -> None:
        trained = Trained(communicator)
        with pytest.raises(UsageError, match="before the first"):
            trained.gradients.replan()
        trained.backward({index: made(0, 0, index) for index in range(4)}, order=(1, 3, 0, 2))
        before = [gradient.copy() for gradient in trained.store.gradients]
        trained.gradients.replan()
        gradients = trained.store.gradients
        addresses = [gradient.ctypes.data for gradient in gradients]
        assert sorted(range(4), key=lambda index: addresses[index]) == [1, 3, 0, 2]
        for gradient, old in zip(gradients, before, strict=True):
            np.testing.assert_array_equal(gradient, old)

    run_ranks(2, train)


def test_sparse_gradients_leave_the_buckets(run_ranks: RunRanks) -> None:
    """The first one of rank 1 turns up where rank 0 has a dense one."""

    def train(communicator: Communicator) -> None:
        trained = Trained(communicator, store=ListedRows)
        for step in range(3):
            dense = made(communicator.rank, step, 1)
            own: Any = np.ones((3, 2))
            if communicator.rank == 1:
                own = (np.array([0, 2, 2]), np.full((3, 2), 2.0))
            trained.backward({0: own, 1: dense})
            found = trained.step()
            rows, values = found[0]
            total = np.zeros((3, 2))
            total[rows] = values
            np.testing.assert_allclose(total, np.array([[3, 3], [1, 1], [5, 5]]) / 2)
            mean = (made(0, step, 1) + made(1, step, 1)) / 2
            np.testing.assert_allclose(found[1], mean, rtol=1e-12)

    run_ranks(2, train)


class ArrayReplica:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes

    def read(self) -> replicas.Bytes:
        return np.ascontiguousarray(self.array).reshape(-1).view(np.uint8)

    def write(self, elements: replicas.Bytes) -> None:
        self.array[...] = elements.view(self.array.dtype).reshape(self.array.shape)


def test_replicas_are_made_equal(run_ranks: RunRanks) -> None:
    """Small ones together, large ones alone, with and without gaps between their elements."""

    def train(communicator: Communicator) -> None:
        arrays = [
            np.full((400, 500), communicator.rank, np.float64)[:, ::2],
            np.full((300, 500), communicator.rank, np.float64),
            np.full(7, communicator.rank, np.int16),
            np.full((5, 3), communicator.rank, np.float32).T,
            np.zeros(0),
        ]
        named = [(f"a{index}", ArrayReplica(array)) for index, array in enumerate(arrays)]
        with pytest.raises(MismatchError, match=r"'a0', ranks 1, 2 have other .*; mend it"):
            replicas.check(named, communicator, "checked", "mend it")
        replicas.broadcast((replica for _, replica in named), 2, communicator)
        assert all((array == 2).all() for array in arrays)
        replicas.check(named, communicator, "checked again", "mend it")

    run_ranks(3, train)


def test_arrays_that_the_root_does_not_have(run_ranks: RunRanks) -> None:
    def train(communicator: Communicator) -> None:
        specs = [("a", (3,), "float32"), ("b", (communicator.rank // 2,), "int64")]
        with pytest.raises(MismatchError, match=r"call: 'b' is int64\[1\] on rank 2, but int64"):
            replicas.agree_with_root(specs, None, 0, communicator, "call")
        unfit = "of no use" if communicator.rank == 1 else None
        with pytest.raises(MismatchError, match="call: of no use"):
            replicas.agree_with_root(specs[:1], unfit, 0, communicator, "call")
        names = replicas.agree_with_root(specs[:1], None, 0, communicator, "call")
        assert names == ["a"]

    run_ranks(3, train)
