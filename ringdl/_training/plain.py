"""Optimizers of training loops without a framework: over arrays that change in place.

Written once for NumPy, CuPy and whatever else has their operators: arrays are only added,
multiplied and raised to powers, in place where they are the optimizer's own.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias

import ringdl
from ringdl._reductions import CompressionName
from ringdl._training.gradients import Gradients, agreeing
from ringdl._training.options import check_passes
from ringdl._training.replicas import Replica
from ringdl._training.store import A, Spec, Store

Arrays: TypeAlias = "Sequence[Any] | Mapping[str, Any]"


class Optimizer(Protocol):
    """What `DistributedOptimizer` wraps."""

    def step(self, parameters: Any, gradients: Any) -> Any:
        """Change the parameters by gradients of the same structure, in which some may be None."""


class SGD:
    """Stochastic gradient descent, with momentum as PyTorch has it.

    Args:
        rate: the learning rate; may be changed between steps.
        momentum: of the velocity, from 0 to 1.
        weight_decay: adds so much of the parameter to its gradient.
        nesterov: looks ahead by the momentum.
    """

    def __init__(
        self,
        rate: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.rate, self.momentum = rate, momentum
        self.weight_decay, self.nesterov = weight_decay, nesterov
        self.velocities: dict[Any, Any] = {}
        """By key or index, once there are any."""

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Change the parameters in place; those without a gradient stay, and their velocity."""
        for key, parameter, gradient in _pairs(parameters, gradients):
            change = gradient
            if self.weight_decay:
                change = change + self.weight_decay * parameter
            if self.momentum:
                velocity = self.velocities.get(key)
                if velocity is None:
                    velocity = change + 0
                else:
                    velocity *= self.momentum
                    velocity += change
                self.velocities[key] = velocity  # one without axes is a new one
                change = change + self.momentum * velocity if self.nesterov else velocity
            parameter -= self.rate * change


class Adam:
    """Adam (Kingma and Ba 2015), as PyTorch computes it.

    Args:
        rate: the learning rate; may be changed between steps.
        betas: of the means of gradients and of their squares.
        epsilon: added to the root of the second.
        weight_decay: adds so much of the parameter to its gradient.
    """

    _is_decoupled = False

    def __init__(
        self,
        rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.rate, self.betas, self.epsilon, self.weight_decay = rate, betas, epsilon, weight_decay
        self.means: dict[Any, tuple[Any, Any, int]] = {}
        """By key or index: the means of gradients and of their squares, and of how many."""

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Change the parameters in place; those without a gradient stay, and so do their means."""
        first_beta, second_beta = self.betas
        for key, parameter, given in _pairs(parameters, gradients):
            gradient = given
            if self.weight_decay and self._is_decoupled:
                parameter *= 1 - self.rate * self.weight_decay
            elif self.weight_decay:
                gradient = gradient + self.weight_decay * parameter
            first, second, count = self.means.get(key) or (gradient * 0, gradient * 0, 0)
            first *= first_beta
            first += (1 - first_beta) * gradient
            second *= second_beta
            second += (1 - second_beta) * (gradient * gradient)
            count += 1
            self.means[key] = first, second, count
            root = (second / (1 - second_beta**count)) ** 0.5 + self.epsilon
            parameter -= self.rate / (1 - first_beta**count) * (first / root)


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        rate: see `Adam`.
        betas: see `Adam`.
        epsilon: see `Adam`.
        weight_decay: shrinks parameters by so much of the rate.
    """

    _is_decoupled = True

    def __init__(
        self,
        rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(rate, betas, epsilon, weight_decay)


class PlainStore(Store[A]):
    """Gradients that are passed to a function: those of the current round, in a list."""

    def __init__(self, names: Sequence[str], parameters: Sequence[A], how_to_wrap: str) -> None:
        self.how_to_wrap = how_to_wrap
        self.specs = [
            self.spec(name, parameter) for name, parameter in zip(names, parameters, strict=True)
        ]
        self.gradients: list[A | None] = [None] * len(self.specs)

    @abstractmethod
    def spec(self, name: str, parameter: A) -> Spec:
        """What its gradient is like.

        Raises:
            UsageError: there is no such gradient.
        """

    @abstractmethod
    def replica(self, parameter: A) -> Replica:
        """A parameter, for comparing those of all ranks."""

    def get(self, index: int) -> A | None:
        return self.gradients[index]

    def set(self, index: int, gradient: A) -> None:
        self.gradients[index] = gradient

    def copy(self, view: A, gradient: A) -> None:
        view[...] = gradient  # type: ignore[index]

    def scale(self, view: A, factor: float) -> None:
        view *= factor  # type: ignore[operator, assignment]


class DistributedOptimizer(Generic[A]):
    """Averages gradients over all ranks; then the optimizer that it wraps changes the parameters.

    The first `step` agrees on names and shapes, and compares the parameters of all ranks. A
    gradient that is None is missing: if all ranks lack it, it stays None, and the optimizer gets it
    so; else those that lack it count as zeros.

    Args:
        optimizer: any object with ``step(parameters, gradients)``, as `SGD` and `Adam`. It gets
            what `step` gets, with averages in place of gradients: ringdl's memory, which the next
            step overwrites.
        op: Average, or Sum.
        compression: as `ringdl.Buckets` takes it.
        backward_passes_per_step: add up the gradients of so many calls of `step`, of which the last
            one averages and steps.
        communicator: by default the one of `ringdl.init`.
    """

    _store: type[PlainStore[A]] | None = None
    """By default found by the first parameter."""

    def __init__(
        self,
        optimizer: Optimizer,
        op: ringdl.Reduction = ringdl.Average,
        compression: CompressionName | None = None,
        backward_passes_per_step: int = 1,
        communicator: ringdl.Communicator | None = None,
    ) -> None:
        if not callable(getattr(optimizer, "step", None)):
            raise ringdl.UsageError(
                f"{optimizer!r} has no step(parameters, gradients); pass an optimizer"
            )
        check_passes(backward_passes_per_step)
        self.optimizer = optimizer
        self._op, self._compression = op, compression
        self._passes = backward_passes_per_step
        self._communicator = ringdl.get_communicator() if communicator is None else communicator
        self._gradients: Gradients[A] | None = None
        self._names: list[str] = []

    def step(self, parameters: Arrays, gradients: Arrays) -> bool:
        """Average the gradients, and change the parameters. Collective.

        Args:
            parameters: floating-point arrays, by name or in a sequence; the same in each call, and
                alike on all ranks.
            gradients: of the same structure and shapes; None where there is none.

        Returns:
            Whether the optimizer has stepped: not in the first of several passes per step.

        Raises:
            MismatchError: on every rank, if parameters differ in names, shapes, dtypes or, at the
                first step, values; or if ranks are at different steps.
            UsageError: the gradients are not like the parameters.
        """
        names, arrays = _listed(parameters)
        if self._gradients is None:
            self._wrap(names, arrays)
        assert self._gradients is not None
        self._add(self._gradients, names, gradients)
        if not self._gradients.averages_at_end:
            return False
        how = "broadcast them from rank 0 before the first step: ringdl.broadcast_(parameter)"
        replicas = (
            (name, self._kept.replica(each)) for name, each in zip(names, arrays, strict=True)
        )
        self._gradients.check_replicas(replicas, how)
        averages: Any = self._kept.gradients
        if isinstance(parameters, Mapping):
            averages = dict(zip(names, averages, strict=True))
        self.optimizer.step(parameters, averages)
        self._kept.gradients = [None] * len(names)
        self._gradients.finish_step()
        return True

    def _wrap(self, names: list[str], arrays: list[Any]) -> None:
        with agreeing(self._communicator):
            store: Any = self._store or _store_of(arrays)
            self._kept: PlainStore[A] = store(names, arrays, "DistributedOptimizer(optimizer)")
        self._names = names
        self._gradients = Gradients(
            self._kept, self._op, self._compression, self._passes, self._communicator
        )

    def _add(self, its: Gradients[A], names: list[str], gradients: Arrays) -> None:
        """A pass: the last gradients first, as a backward pass has them."""
        with its.telling():
            given = _like(gradients, names, self._names, self._kept.specs)
        its.begin_pass()
        for index in reversed(range(len(given))):
            if given[index] is None:
                continue
            before = self._kept.gradients[index]
            total = given[index]
            if before is not None and before is not total:
                before += total
                total = before
            self._kept.gradients[index] = total
            its.arrived(index)
        its.end_pass()


def _store_of(arrays: Sequence[Any]) -> Any:
    """The store of the adapter whose arrays they are.

    Raises:
        UsageError: there is none.
    """
    framework = type(arrays[0]).__module__.partition(".")[0] if arrays else "no parameters"
    if framework not in ("numpy", "cupy"):
        raise ringdl.UsageError(
            f"step() gets parameters of {framework}, and takes arrays of NumPy or CuPy, which the "
            "optimizer changes in place"
        )
    return importlib.import_module(f"ringdl.{framework}").DistributedOptimizer._store


def _listed(arrays: Arrays) -> tuple[list[str], list[Any]]:
    if isinstance(arrays, Mapping):
        return [*arrays], [*arrays.values()]
    return [f"parameter {index}" for index in range(len(arrays))], [*arrays]


def _like(
    gradients: Arrays, names: list[str], wrapped: list[str], specs: Sequence[Spec]
) -> list[Any]:
    """The gradients in the order of the parameters.

    Raises:
        UsageError: they are not like these.
    """
    own, given = _listed(gradients)
    if names != wrapped or sorted(own) != sorted(names):
        raise ringdl.UsageError(
            f"step() gets gradients for {own}, and the parameters of the first step were "
            f"{wrapped}; pass the same ones each time, with None for a gradient that there is not"
        )
    by_name = dict(zip(own, given, strict=True))
    for name, shape, _, _ in specs:
        found = getattr(by_name[name], "shape", shape)
        if tuple(found) != tuple(shape):
            raise ringdl.UsageError(
                f"the gradient of {name!r} has shape {tuple(found)}, its parameter {tuple(shape)}"
            )
    return [by_name[name] for name in wrapped]


def _pairs(parameters: Arrays, gradients: Arrays) -> list[tuple[Any, Any, Any]]:
    """Keys, parameters and gradients, without those that are None."""
    keys = [*parameters] if isinstance(parameters, Mapping) else range(len(parameters))
    found: Any = gradients
    its: Any = parameters
    return [(key, its[key], found[key]) for key in keys if found[key] is not None]
