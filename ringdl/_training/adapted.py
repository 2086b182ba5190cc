"""Optimizers of frameworks that an `Adapter` describes: their steps average."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringdl
from ringdl._reductions import CompressionName
from ringdl._training.gradients import Gradients, agreeing
from ringdl._training.in_numpy import Array, ArrayReplica, spec_of
from ringdl._training.plain import PlainStore
from ringdl._training.replicas import Replica
from ringdl._training.store import Spec


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
    """

    def __init__(
        self,
        optimizer: Any,
        adapter: ringdl.Adapter,
        op: ringdl.Reduction,
        compression: CompressionName | None,
        communicator: ringdl.Communicator,
    ) -> None:
        self._adapter = adapter
        with agreeing(communicator):
            found = adapter.parameters(optimizer)
            self._names, self._parameters = [*found], [*found.values()]
            values = [adapter.value(parameter) for parameter in self._parameters]
            self._store = _Store(self._names, values, "ringdl.DistributedOptimizer(optimizer)")
        self.gradients = Gradients(self._store, op, compression, 1, communicator)
        self._index = {name: index for index, name in enumerate(self._names)}
        self._is_open = False
        adapter.watch(optimizer, self.ready)

    def ready(self, name: str) -> None:
        """A gradient does not change any more before the step."""
        if name not in self._index:
            raise ringdl.UsageError(f"ready({name!r}): the parameters are {self._names}")
        self._open()
        self._arrive(self._index[name])

    def average(self) -> None:
        """Write averages in place of gradients, before a step. Collective."""
        self._open()
        for index in reversed(range(len(self._parameters))):
            if not self.gradients.is_launched(index):
                self._arrive(index)
        self._is_open = False
        self.gradients.end_pass()
        replicas = (
            (name, ArrayReplica(self._adapter.value(parameter)))
            for name, parameter in zip(self._names, self._parameters, strict=True)
        )
        self.gradients.check_replicas(replicas, "broadcast them from rank 0 before the first step")
        for parameter, average in zip(self._parameters, self._store.gradients, strict=True):
            if average is not None:
                self._adapter.set_gradient(parameter, average)

    def finish_step(self) -> None:
        """The optimizer has stepped."""
        self._store.gradients = [None] * len(self._parameters)
        self.gradients.finish_step()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self.gradients.begin_pass()

    def _arrive(self, index: int) -> None:
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


class _Adapted:
    """What the class of a wrapped optimizer derives from, before its own."""

    _ringdl_averaging: Averaging


def wrap(
    optimizer: Any,
    adapter: ringdl.Adapter,
    *,
    op: ringdl.Reduction = ringdl.Average,
    compression: CompressionName | None = None,
    communicator: ringdl.Communicator | None = None,
) -> Any:
    """Change the class of an optimizer to a subclass whose steps average. Collective.

    Args:
        optimizer: the framework's; wrapped before, it gets new buckets.
        adapter: how its gradients are seen.
        op: Average or Sum.
        compression: as `ringdl.Buckets` takes it.
        communicator: by default the one of `ringdl.init`.

    Returns:
        The same object.
    """
    ranks = ringdl.get_communicator() if communicator is None else communicator
    averaging = Averaging(optimizer, adapter, op, compression, ranks)
    if not isinstance(optimizer, _Adapted):
        optimizer.__class__ = _wrapped(type(optimizer), adapter.step)
    optimizer._ringdl_averaging = averaging
    return optimizer


def _wrapped(bare: type, step_name: str) -> type:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        averaging: Averaging = self._ringdl_averaging
        averaging.average()
        result = getattr(super(wrapped, self), step_name)(*args, **kwargs)
        averaging.finish_step()
        return result

    step.__name__, step.__doc__ = step_name, getattr(bare, step_name).__doc__
    wrapped = type(bare.__name__, (_Adapted, bare), {step_name: step})
    return wrapped
