"""Averages for training loops without a framework, which pass gradients to a function."""

from __future__ import annotations

import importlib
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol

import numpy as np

import ringdl
from ringdl._reductions import CompressionName
from ringdl._training.descent import Arrays
from ringdl._training.following import Following, Model
from ringdl._training.gradients import Gradients, agreeing
from ringdl._training.options import check_passes, check_policy
from ringdl._training.replicas import Replica
from ringdl._training.store import A, Spec, Store
from ringdl.policies import Policy
from ringdl.policies._policy import Array

_HOW_TO_MEND = (
    "broadcast them from rank 0 before the first step: ringdl.broadcast_(parameter); or, if they "
    "are meant to differ, set RINGDL_CHECK_REPLICAS=0"
)


class Optimizer(Protocol):
    """What `DistributedOptimizer` wraps.

    For policies that use its state, it has a mapping ``state`` of arrays, which they change in
    place, and a method ``reset()``.
    """

    def step(self, parameters: Any, gradients: Any) -> Any:
        """Change the parameters by gradients of the same structure, in which some may be None."""


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

    def own(self, index: int, gradient: Any, is_kept: bool) -> Any:
        """A gradient that stays this rank's, which policies may change.

        Args:
            index: of its parameter.
            gradient: what `step` was given; or None.
            is_kept: whether others are added to it.
        """
        del index
        return gradient.copy() if is_kept and gradient is not None else gradient

    def read(self, array: A) -> Array:
        """An array in the CPU's memory, for policies: the same one, if it is there."""
        return np.asarray(array)

    def write(self, array: A, values: Array) -> None:
        """Take back what `read` has given."""


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
        policy: when ranks exchange what: one of `ringdl.policies`, by default ``AllReduce()``, all
            that is said above.
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
        policy: Policy | None = None,
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
        self._policy = check_policy(policy, op, compression)
        self._ringdl_following: Any = None if self._policy is None else _NotYet(self)
        self._gradients: Gradients[A] | None = None
        self._names: list[str] | None = None
        self._epoch = 0
        """Of the ranks that have agreed on names and shapes."""
        self._passes_made = self._times = 0

    def __getattr__(self, name: str) -> Any:
        """What the optimizer itself has, as its learning rate."""
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_own = name.startswith("_") or name == "optimizer" or hasattr(type(self), name)
        if not is_own and not hasattr(self.optimizer, name):
            raise AttributeError(f"{type(self.optimizer).__name__} has no {name!r} to be set")
        object.__setattr__(self if is_own else self.optimizer, name, value)

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
        if self._epoch != self._communicator.epoch:  # some ranks may be new: all agree
            self._wrap(names, arrays)
        averages = self._ringdl_following is None or self._ringdl_following.averages_gradients
        if not (self._average if averages else self._add)(names, gradients):
            return False
        if self._ringdl_following is None:
            assert self._gradients is not None
            replicas = (
                (name, self._kept.replica(each)) for name, each in zip(names, arrays, strict=True)
            )
            self._gradients.check_replicas(replicas, _HOW_TO_MEND)
        else:
            self._model.parameters_now = arrays
            self._ringdl_following.before_step()
        its: Any = self._kept.gradients
        if isinstance(parameters, Mapping):
            its = dict(zip(names, its, strict=True))
        self.optimizer.step(parameters, its)
        self._kept.gradients = [None] * len(names)
        if self._gradients is not None:
            self._gradients.finish_step()
        if self._ringdl_following is not None:
            self._ringdl_following.after_step()
        return True

    def _wrap(self, names: list[str], arrays: list[Any]) -> None:
        ranks = self._communicator
        self._gradients = None
        with agreeing(ranks):
            store: Any = self._store or _store_of(arrays)
            self._kept: PlainStore[A] = store(names, arrays, "DistributedOptimizer(optimizer)")
        if self._policy is not None:
            self._model = _Model(self.optimizer, self._kept, names, arrays, ranks)
            self._ringdl_following = Following(self._policy, self._model, _HOW_TO_MEND)
        if self._policy is None or self._policy.averages_gradients(0):
            self._gradients = Gradients(
                self._kept, self._op, self._compression, self._passes, ranks
            )
        self._names, self._epoch = names, ranks.epoch

    def _average(self, names: list[str], gradients: Arrays) -> bool:
        """A pass: the last gradients first, as a backward pass has them. Whether it is the last."""
        assert self._gradients is not None
        its = self._gradients
        with its.telling():
            given = self._like(names, gradients)
        its.begin_pass()
        for index in reversed(range(len(given))):
            if self._accumulate(index, given[index]):
                its.arrived(index)
        its.end_pass()
        return its.averages_at_end

    def _add(self, names: list[str], gradients: Arrays) -> bool:
        """The same where gradients stay this rank's own."""
        if self._times != self._ringdl_following.times:
            self._times, self._passes_made = self._ringdl_following.times, 0
            self._kept.gradients = [None] * len(names)
        for index, gradient in enumerate(self._like(names, gradients)):
            self._accumulate(index, self._kept.own(index, gradient, self._passes > 1))
        self._passes_made += 1
        return self._passes_made % self._passes == 0

    def _like(self, names: list[str], gradients: Arrays) -> list[Any]:
        assert self._names is not None
        return _like(gradients, names, self._names, self._kept.specs)

    def _accumulate(self, index: int, gradient: Any) -> bool:
        """Add a gradient to those of earlier passes; False if there is none."""
        if gradient is None:
            return False
        before = self._kept.gradients[index]
        if before is not None and before is not gradient:
            before += gradient
            gradient = before
        self._kept.gradients[index] = gradient
        return True


class _NotYet:
    """Before the first step, which tells ranks of the parameters."""

    def __init__(self, optimizer: DistributedOptimizer[Any]) -> None:
        self._optimizer = weakref.ref(optimizer)

    def synchronize(self, parameters: Arrays | None = None) -> None:
        optimizer = self._optimizer()
        if parameters is None or optimizer is None:
            raise ringdl.UsageError(
                "the optimizer has not made a step yet, and knows no parameters; pass them, or "
                "make a step on all ranks first"
            )
        optimizer._wrap(*_listed(parameters))
        optimizer._ringdl_following.synchronize()

    def start_over(self) -> None:
        """Nothing: it has not begun."""


class _Model(Model, Generic[A]):
    """What policies see: arrays that change in place, or copies of those on a device."""

    def __init__(
        self,
        optimizer: Any,
        store: PlainStore[A],
        names: Sequence[str],
        parameters: Sequence[A],
        communicator: ringdl.Communicator,
    ) -> None:
        super().__init__(communicator)
        self._optimizer, self._store, self._names = optimizer, store, names
        self.parameters_now = parameters
        """Those of this step."""

    def take(self, parameters: Arrays) -> None:
        """See `Model`."""
        self.parameters_now = _listed(parameters)[1]

    def read_parameters(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._read(dict(zip(self._names, self.parameters_now, strict=True)))

    def write_parameters(self, arrays: Mapping[str, Array]) -> None:
        """See `Model`."""
        for its, name in zip(self.parameters_now, self._names, strict=True):
            self._store.write(its, arrays[name])

    def read_gradients(self) -> Mapping[str, Array | None]:
        """See `Model`."""
        named = zip(self._names, self._store.gradients, strict=True)
        return {name: None if each is None else self._store.read(each) for name, each in named}

    def write_gradients(self, arrays: Mapping[str, Array | None]) -> None:
        """See `Model`."""
        for its, values in zip(self._store.gradients, arrays.values(), strict=True):
            if its is not None and values is not None:
                self._store.write(its, values)

    def read_state(self) -> Mapping[str, Array]:
        """See `Model`."""
        if not isinstance(getattr(self._optimizer, "state", None), Mapping):
            raise ringdl.UsageError(
                f"{self._optimizer!r} has no mapping `state` of arrays, which the policy "
                "exchanges; give it one, or pass optimizer_state='keep'"
            )
        return self._read(self._optimizer.state)

    def write_state(self, arrays: Mapping[str, Array]) -> None:
        """See `Model`."""
        for name, its in self._optimizer.state.items():
            self._store.write(its, arrays[name])

    def reset_state(self) -> None:
        """See `Model`."""
        if not callable(getattr(self._optimizer, "reset", None)):
            raise ringdl.UsageError(
                f"{self._optimizer!r} has no reset(), and the policy resets its state; give it one"
            )
        self._optimizer.reset()

    @property
    def learning_rate(self) -> float:
        """See `Model`."""
        if not hasattr(self._optimizer, "lr"):
            return super().learning_rate
        return float(self._optimizer.lr)

    def _read(self, arrays: Mapping[str, A]) -> Mapping[str, Array]:
        return {name: self._store.read(each) for name, each in arrays.items()}


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
