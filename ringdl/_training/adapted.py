"""Optimizers of frameworks that an `Adapter` describes: their steps average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import ringdl
from ringdl._reductions import CompressionName
from ringdl._training.following import Following, Model
from ringdl._training.gradients import Gradients, agreeing
from ringdl._training.in_numpy import Array, ArrayReplica, spec_of
from ringdl._training.options import check_policy
from ringdl._training.plain import PlainStore
from ringdl._training.replicas import Replica
from ringdl._training.store import Spec
from ringdl.policies import Policy

_HOW_TO_MEND = "broadcast them from rank 0 before the first step"


class _Store(PlainStore[Array]):
    def spec(self, name: str, parameter: Array) -> Spec:
        return spec_of(name, parameter)

    def view(self, index: int, memory: Any) -> Array:
        return np.from_dlpack(memory)

    def replica(self, parameter: Array) -> Replica:
        return ArrayReplica(parameter)


class Averaging:
    """Averages the gradients of one optimizer at each of its steps. Collective.

    Args:
        optimizer: the framework's.
        adapter: how its gradients are seen.
        op: Average or Sum.
        compression: as `ringdl.Buckets` takes it.
        communicator: the ranks.
        policy: when ranks exchange what, if it is not gradients in each step.
    """

    def __init__(
        self,
        optimizer: Any,
        adapter: ringdl.Adapter,
        op: ringdl.Reduction,
        compression: CompressionName | None,
        communicator: ringdl.Communicator,
        policy: Policy | None,
    ) -> None:
        self._adapter = adapter
        with agreeing(communicator):
            chosen = check_policy(policy, op, compression)
            found = adapter.parameters(optimizer)
            self._names, self._parameters = [*found], [*found.values()]
            values = [adapter.value(parameter) for parameter in self._parameters]
            self._store = _Store(self._names, values, "ringdl.DistributedOptimizer(optimizer)")
        self.following = None
        if chosen is not None:
            model = _Model(optimizer, adapter, found, communicator)
            self.following = Following(chosen, model, _HOW_TO_MEND)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._is_open = False
        self.gradients: Gradients[Array] | None = None
        if chosen is None or chosen.averages_gradients(0):
            self.gradients = Gradients(self._store, op, compression, 1, communicator)
            adapter.watch(optimizer, self.ready)

    def ready(self, name: str) -> None:
        """A gradient does not change any more before the step."""
        if name not in self._index:
            raise ringdl.UsageError(f"ready({name!r}): the parameters are {self._names}")
        if self._averages:
            self._open()
            self._arrive(self._index[name])

    def begin_step(self) -> None:
        """Write averages in place of gradients, before a step. Collective."""
        if self._averages:
            self._average()
        if self.following is not None:
            self.following.before_step()

    def finish_step(self) -> None:
        """The optimizer has stepped."""
        self._store.gradients = [None] * len(self._parameters)
        if self.gradients is not None:
            self.gradients.finish_step()
        if self.following is not None:
            self.following.after_step()

    @property
    def _averages(self) -> bool:
        return self.following is None or self.following.averages_gradients

    def _average(self) -> None:
        assert self.gradients is not None
        self._open()
        for index in reversed(range(len(self._parameters))):
            if not self.gradients.is_launched(index):
                self._arrive(index)
        self._is_open = False
        self.gradients.end_pass()
        if self.following is None:
            self.gradients.check_replicas(self._replicas(), _HOW_TO_MEND)
        for parameter, average in zip(self._parameters, self._store.gradients, strict=True):
            if average is not None:
                self._adapter.set_gradient(parameter, average)

    def _replicas(self) -> Iterator[tuple[str, Replica]]:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            yield name, ArrayReplica(self._adapter.value(parameter))

    def _open(self) -> None:
        assert self.gradients is not None
        if not self._is_open:
            self._is_open = True
            self.gradients.begin_pass()

    def _arrive(self, index: int) -> None:
        assert self.gradients is not None
        with self.gradients.telling():
            gradient = self._adapter.gradient(self._parameters[index])
            shape = self._store.specs[index][1]
            if gradient is not None and tuple(gradient.shape) != shape:
                raise ringdl.UsageError(
                    f"the gradient of {self._names[index]!r} has shape {tuple(gradient.shape)}, "
                    f"its parameter {shape}"
                )
        if gradient is not None:
            self._store.gradients[index] = gradient
            self.gradients.arrived(index)


class _Model(Model):
    """What policies see."""

    def __init__(
        self,
        optimizer: Any,
        adapter: ringdl.Adapter,
        parameters: Mapping[str, Any],
        communicator: ringdl.Communicator,
    ) -> None:
        super().__init__(communicator)
        self._optimizer, self._adapter, self._its = optimizer, adapter, parameters

    def read_parameters(self) -> Mapping[str, Array]:
        """See `Model`."""
        found = {name: self._adapter.value(each) for name, each in self._its.items()}
        return {name: _writable(each) for name, each in found.items()}

    def write_parameters(self, arrays: Mapping[str, Array]) -> None:
        """See `Model`."""
        for name, array in arrays.items():
            self._adapter.set_value(self._its[name], array)

    def read_gradients(self) -> Mapping[str, Array | None]:
        """See `Model`."""
        found = {name: self._adapter.gradient(each) for name, each in self._its.items()}
        return {name: None if each is None else _writable(each) for name, each in found.items()}

    def write_gradients(self, arrays: Mapping[str, Array | None]) -> None:
        """See `Model`."""
        for name, array in arrays.items():
            if array is not None:
                self._adapter.set_gradient(self._its[name], array)

    def read_state(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._adapter.state(self._optimizer)

    def reset_state(self) -> None:
        """See `Model`."""
        self._adapter.reset_state(self._optimizer)


def _writable(array: Array) -> Array:
    """The array; a copy of one that belongs to the framework alone."""
    return array if array.flags.writeable else array.copy()


class _Adapted:
    """What the class of a wrapped optimizer derives from, before its own."""

    _ringdl_averaging: Averaging

    @property
    def _ringdl_following(self) -> Following | None:
        return self._ringdl_averaging.following


def wrap(
    optimizer: Any,
    adapter: ringdl.Adapter,
    *,
    op: ringdl.Reduction = ringdl.Average,
    compression: CompressionName | None = None,
    communicator: ringdl.Communicator | None = None,
    policy: Policy | None = None,
) -> Any:
    """Change the class of an optimizer to a subclass whose steps average. Collective.

    Args:
        optimizer: the framework's; wrapped before, it gets new buckets.
        adapter: how its gradients are seen.
        op: Average or Sum.
        compression: as `ringdl.Buckets` takes it.
        communicator: by default the one of `ringdl.init`.
        policy: when ranks exchange what: one of `ringdl.policies`.

    Returns:
        The same object.
    """
    ranks = ringdl.get_communicator() if communicator is None else communicator
    if isinstance(optimizer, _Adapted) and optimizer._ringdl_following is not None:
        optimizer._ringdl_following.end()
    averaging = Averaging(optimizer, adapter, op, compression, ranks, policy)
    if not isinstance(optimizer, _Adapted):
        optimizer.__class__ = _wrapped(type(optimizer), adapter.step)
    optimizer._ringdl_averaging = averaging
    return optimizer


def _wrapped(bare: type, step_name: str) -> type:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        averaging: Averaging = self._ringdl_averaging
        averaging.begin_step()
        result = getattr(super(wrapped, self), step_name)(*args, **kwargs)
        averaging.finish_step()
        return result

    step.__name__, step.__doc__ = step_name, getattr(bare, step_name).__doc__
    wrapped = type(bare.__name__, (_Adapted, bare), {step_name: step})
    return wrapped
