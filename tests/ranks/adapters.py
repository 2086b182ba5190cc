"""A framework that ringdl has never met, told to it by an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import ringdl
from ringdl import Communicator, policies
from ringdl.policies import ParameterAveraging
from tests.ranks.numpy_optimizers import batches, gradients, parameters
from tests.ranks.policies import MAKERS, all_policies, part_of, train
from tests.ranks.support import assert_same_bits, expect, needs

Ready = Callable[[str], None]


class Parameter:
    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.grad: np.ndarray | None = None


class Trainer:
    """The framework's optimizer: gradients are its parameters', with momentum."""

    def __init__(self, values: Mapping[str, np.ndarray], rate: float = 0.1) -> None:
        self.slots = {name: Parameter(value.copy()) for name, value in values.items()}
        self.velocities = {name: np.zeros_like(value) for name, value in values.items()}
        self.rate = rate
        self.on_gradient: list[Ready] = []

    def backward(self, produced: Mapping[str, np.ndarray]) -> None:
        for name in reversed(produced):
            self.slots[name].grad = produced[name]
            for hook in self.on_gradient:
                hook(name)

    def update(self, note: str = "") -> str:
        for name, slot in self.slots.items():
            if slot.grad is not None:
                self.velocities[name] = 0.9 * self.velocities[name] + slot.grad
                slot.value -= self.rate * self.velocities[name]
        for slot in self.slots.values():
            slot.grad = None
        return note


class TrainerAdapter(ringdl.Adapter):
    step = "update"

    def parameters(self, optimizer: Trainer) -> Mapping[str, Parameter]:
        return optimizer.slots

    def value(self, parameter: Parameter) -> np.ndarray:
        return parameter.value

    def gradient(self, parameter: Parameter) -> np.ndarray | None:
        return parameter.grad

    def set_gradient(self, parameter: Parameter, average: np.ndarray) -> None:
        parameter.grad = average


class FullAdapter(TrainerAdapter):
    """What policies need, too. Values are copies, as those of a framework on a device."""

    def value(self, parameter: Parameter) -> np.ndarray:
        return parameter.value.copy()

    def set_value(self, parameter: Parameter, array: np.ndarray) -> None:
        parameter.value = array

    def state(self, optimizer: Trainer) -> Mapping[str, np.ndarray]:
        return optimizer.velocities

    def reset_state(self, optimizer: Trainer) -> None:
        optimizer.velocities = {
            name: np.zeros_like(each) for name, each in optimizer.velocities.items()
        }


class WatchingAdapter(TrainerAdapter):
    def watch(self, optimizer: Trainer, ready: Ready) -> None:
        optimizer.on_gradient.append(ready)


def check_training(comm: Communicator) -> None:
    """Split batches are whole ones, and the object stays the same."""
    for adapter in (TrainerAdapter(), WatchingAdapter()):
        ringdl.register_adapter(f"{__name__}.Trainer", adapter)
        bare = Trainer(parameters())
        together, alone = ringdl.DistributedOptimizer(bare), Trainer(parameters())
        assert together is bare
        assert isinstance(together, Trainer)
        for inputs, targets in batches():
            mine = slice(comm.rank, None, comm.size)
            values = {name: slot.value for name, slot in together.slots.items()}
            together.backward(gradients(values, inputs[mine], targets[mine]))
            assert together.update("done") == "done"
            values = {name: slot.value for name, slot in alone.slots.items()}
            alone.backward(gradients(values, inputs, targets))
            alone.update()
        for name, slot in together.slots.items():
            if 24 % comm.size == 0:
                np.testing.assert_allclose(slot.value, alone.slots[name].value, rtol=1e-9)
            assert_same_bits(comm, slot.value)


def check_gradients_travel_when_they_are_ready(comm: Communicator) -> None:
    ringdl.register_adapter(f"{__name__}.Trainer", WatchingAdapter())
    trainer = ringdl.DistributedOptimizer(Trainer({"a": np.zeros(3), "b": np.zeros(2)}))
    averaging = trainer._ringdl_averaging
    for _ in range(2):  # in the first pass nothing is known of their order
        trainer.update()
        trainer.backward({"a": np.ones(3), "b": np.ones(2)})
    assert averaging.gradients.is_launched(1)
    trainer.update()
    with expect(ringdl.UsageError, "the parameters are ['a', 'b']"):
        averaging.ready("c")


def check_missing_gradients(comm: Communicator) -> None:
    ringdl.register_adapter(f"{__name__}.Trainer", TrainerAdapter())
    trainer = Trainer({"all": np.zeros(3), "none": np.ones(2), "one": np.zeros(2)}, rate=1.0)
    ringdl.DistributedOptimizer(trainer, op=ringdl.Sum)
    trainer.velocities["none"] += 1  # a zero for a gradient would move it
    trainer.backward({"all": np.ones(3)} | ({"one": np.ones(2)} if comm.rank == 0 else {}))
    trainer.update()
    assert trainer.slots["all"].value.tolist() == [-comm.size] * 3
    assert trainer.slots["none"].value.tolist() == [1, 1]
    assert trainer.slots["one"].value.tolist() == [-1, -1]


@needs(ranks=2)
def check_wrong_use_is_heard_by_all(comm: Communicator) -> None:
    ringdl.register_adapter(f"{__name__}.Trainer", TrainerAdapter())
    last = comm.size - 1
    is_last = comm.rank == last
    with expect(ringdl.MismatchError, '"a"', '"b"'):
        ringdl.DistributedOptimizer(Trainer({"b" if is_last else "a": np.zeros(3)}))
    wrong = {"a": np.zeros(3, int) if is_last else np.zeros(3)}
    with expect(ringdl.Error, "int64", "float64, float32 or float16"):
        ringdl.DistributedOptimizer(Trainer(wrong))
    with expect(ringdl.MismatchError, "replicas differ", "'a'", "broadcast them from rank 0"):
        unequal = ringdl.DistributedOptimizer(Trainer({"a": np.full(3, float(is_last))}))
        unequal.backward({"a": np.ones(3)})
        unequal.update()
    trainer = ringdl.DistributedOptimizer(Trainer({"a": np.zeros(3), "b": np.zeros(2)}))
    trainer.backward({"a": np.ones(2 if is_last else 3)})
    kind = ringdl.UsageError if is_last else ringdl.MismatchError
    who = () if is_last else (f"rank {last} has no gradients for step 1",)
    with expect(kind, "the gradient of 'a' has shape (2,), its parameter (3,)", *who):
        trainer.update()
    trainer.backward({"a": np.ones(3)})
    trainer.update()  # which goes on
    np.testing.assert_array_equal(trainer.slots["a"].value, np.full(3, -0.1))
    assert_same_bits(comm, trainer.slots["a"].value)


def check_any_object_with_a_step(comm: Communicator) -> None:
    class Plain:
        def step(self, weights: Any, its: Any) -> None:
            weights[0] -= its[0]

    optimizer = ringdl.DistributedOptimizer(Plain())
    weights = [np.zeros(4)]
    optimizer.step(weights, [np.full(4, float(comm.rank))])
    assert weights[0].tolist() == [-(comm.size - 1) / 2] * 4
    lists = ringdl.DistributedOptimizer(Plain())
    with expect(ringdl.UsageError, "arrays of NumPy or CuPy"):
        lists.step([[1.0]], [[1.0]])


def check_policies(comm: Communicator) -> None:
    """They are those of NumPy's optimizers."""
    ringdl.register_adapter(f"{__name__}.Trainer", FullAdapter())
    for own, other in zip(all_policies(comm.size), all_policies(comm.size), strict=True):
        its = ringdl.DistributedOptimizer(Trainer(parameters()), policy=own)
        for batch in batches(2):
            values = {name: slot.value for name, slot in its.slots.items()}
            its.backward(gradients(values, *part_of(batch, comm.rank, comm.size)))
            its.update()
        expected = train(comm, other, MAKERS["momentum"])[1]
        for name, slot in its.slots.items():
            np.testing.assert_allclose(slot.value, expected[name], 1e-10, 1e-12, err_msg=repr(own))
        policies.synchronize(its)
        assert_same_bits(comm, *(slot.value for slot in its.slots.values()))

    class WithoutState(FullAdapter):
        state = ringdl.Adapter.state

    ringdl.register_adapter(f"{__name__}.Trainer", TrainerAdapter())
    with expect(ringdl.UsageError, "TrainerAdapter has no set_value(), which policies need"):
        ringdl.DistributedOptimizer(Trainer(parameters()), policy=ParameterAveraging(1, "keep"))
    ringdl.register_adapter(f"{__name__}.Trainer", WithoutState())
    if comm.size > 1:
        with expect(ringdl.UsageError, "WithoutState has no state()", "optimizer_state='keep'"):
            ringdl.DistributedOptimizer(Trainer(parameters()), policy=ParameterAveraging(1))
