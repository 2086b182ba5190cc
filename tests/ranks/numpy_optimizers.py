"""ringdl.numpy: training loops without a framework."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringdl
import ringdl.numpy as rn
from ringdl import Communicator
from tests.ranks.support import assert_same_bits, expect, needs

Arrays = dict[str, Any]
STEPS = 6


def parameters(seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {"w": random.normal(size=(5, 7)), "b": np.zeros(7), "v": random.normal(size=(7, 3))}


def gradients(its: Arrays, inputs: Any, targets: Any) -> Arrays:
    """Of half the mean squared error of a network with one hidden layer."""
    hidden = np.tanh(inputs @ its["w"] + its["b"])
    error = (hidden @ its["v"] - targets) / len(inputs)
    flow = (error @ its["v"].T) * (1 - hidden**2)
    return {"w": inputs.T @ flow, "b": flow.sum(0), "v": hidden.T @ error}


def batches(passes: int = 1) -> list[tuple[Any, Any]]:
    random = np.random.default_rng(1)
    return [
        (random.normal(size=(24, 5)), random.normal(size=(24, 3))) for _ in range(STEPS * passes)
    ]


def check_training(comm: Communicator) -> None:
    """Split batches are whole ones, for each optimizer."""
    makers = {
        "SGD": lambda: rn.SGD(0.1, weight_decay=0.01),
        "momentum": lambda: rn.SGD(0.1, momentum=0.9),
        "Nesterov": lambda: rn.SGD(0.1, momentum=0.9, nesterov=True),
        "Adam": lambda: rn.Adam(0.01, weight_decay=0.1),
        "AdamW": lambda: rn.AdamW(0.01),
    }
    for name, make in makers.items():
        own, alone = parameters(), parameters()
        together, single = rn.DistributedOptimizer(make()), make()
        for inputs, targets in batches():
            mine = slice(comm.rank, None, comm.size)
            assert together.step(own, gradients(own, inputs[mine], targets[mine]))
            single.step(alone, gradients(alone, inputs, targets))
        if 24 % comm.size == 0:
            for key in own:
                np.testing.assert_allclose(own[key], alone[key], rtol=1e-9, err_msg=name)
        for each in own.values():
            assert_same_bits(comm, each)


def check_missing_gradients(comm: Communicator) -> None:
    """Zeros where some ranks have them; None, and no step, where none has."""

    class Noted(rn.SGD):
        seen: Any = None

        def step(self, parameters: Any, gradients: Any) -> None:
            self.seen = [None if each is None else each.copy() for each in gradients]
            super().step(parameters, gradients)

    inner = Noted(1.0)
    optimizer = rn.DistributedOptimizer(inner, op=ringdl.Sum)
    its = [np.ones(3), np.ones((2, 2), np.float32), np.ones(1)]
    for turn in range(3):
        given = [np.full(3, 2.0), None, np.ones(1) if comm.rank == turn % comm.size else None]
        optimizer.step(its, given)
        assert inner.seen[1] is None
        assert inner.seen[0].tolist() == [2.0 * comm.size] * 3
        assert inner.seen[2].tolist() == [1.0]
    assert (its[1] == 1).all()


def check_accumulation(comm: Communicator) -> None:
    one, two = rn.DistributedOptimizer(rn.SGD(0.1)), None
    two = rn.DistributedOptimizer(rn.SGD(0.1), backward_passes_per_step=2)
    a, b = parameters(), parameters()
    data = batches(2)
    for first, second in zip(data[::2], data[1::2], strict=True):
        mine = [
            gradients(a, *(x[comm.rank :: comm.size] for x in half)) for half in (first, second)
        ]
        one.step(a, {key: mine[0][key] + mine[1][key] for key in a})
        assert not two.step(b, mine[0])
        assert two.step(b, mine[1])
    for key in a:
        np.testing.assert_allclose(a[key], b[key], rtol=1e-12)


def check_joining(comm: Communicator) -> None:
    """A rank that is out of data counts as zeros."""
    optimizer = rn.DistributedOptimizer(rn.SGD(1.0), op=ringdl.Sum)
    its = [np.zeros(3)]
    optimizer.step(its, [np.ones(3)])
    assert (its[0] == -comm.size).all()
    for _ in range(comm.rank):
        optimizer.step(its, [np.ones(3)])
    comm.join()
    expected = -comm.size - sum(comm.size - 1 - turn for turn in range(comm.rank))
    assert (its[0] == expected).all(), "those that were left at each step"


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    with expect(ringdl.UsageError, "has no step(parameters, gradients)"):
        rn.DistributedOptimizer(np.ones(3))  # type: ignore[arg-type]
    with expect(ringdl.UsageError, "backward_passes_per_step must be at least 1, not 0"):
        rn.DistributedOptimizer(rn.SGD(0.1), backward_passes_per_step=0)
    for wrong, text in (
        ([1.0], "parameters are arrays of NumPy"),
        ([np.ones(3, int)], "has dtype"),
    ):
        with expect(ringdl.UsageError, text):
            rn.DistributedOptimizer(rn.SGD(0.1)).step(wrong, wrong)
    different = [np.full(3, comm.rank, np.float32)]
    with expect(ringdl.MismatchError, "the replicas differ"):
        rn.DistributedOptimizer(rn.SGD(0.1)).step(different, different)
    shapes = [np.ones(3 + (comm.rank == 1))]
    with expect(ringdl.MismatchError, "shape of gradient"):
        rn.DistributedOptimizer(rn.SGD(0.1)).step(shapes, shapes)
    optimizer = rn.DistributedOptimizer(rn.SGD(0.1))
    its = [np.ones(3), np.ones(2)]
    optimizer.step(its, its)
    with expect(ringdl.UsageError, "pass the same ones each time"):
        optimizer.step(its[:1], its[:1])
    with expect(ringdl.UsageError, "has shape (2,), its parameter (3,)"):
        optimizer.step(its, its[::-1])
    optimizer.step(its, its)
