"""Policies: what adapters drive them by."""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

import ringdl
from ringdl._buckets import agree
from ringdl._engine import DType
from ringdl._joining import leaves
from ringdl._training import replicas
from ringdl._training.gradients import agreeing
from ringdl._training.in_numpy import ArrayReplica
from ringdl.policies._mean import Mean
from ringdl.policies._policy import Array, Policy
from ringdl.policies._policy import Model as ModelOfPolicies

_PRESENT = "ringdl.present"

_followed: weakref.WeakValueDictionary[int, Following] = weakref.WeakValueDictionary()
"""By the policy's id, which is not reused: it is kept alive."""


class Model(ABC):
    """What an adapter says of an optimizer and its parameters. See `ringdl.policies.Model`.

    Args:
        communicator: the ranks.
    """

    def __init__(self, communicator: ringdl.Communicator) -> None:
        self.communicator = communicator
        self.key = ""
        self.step = 0
        self._parameters: Mapping[str, Array] | None = None
        self._gradients: Mapping[str, Array | None] | None = None
        self._state: Mapping[str, Array] | None = None

    @property
    def parameters(self) -> Mapping[str, Array]:
        """See `ringdl.policies.Model`."""
        if self._parameters is None:
            self._parameters = self.read_parameters()
        return self._parameters

    @property
    def gradients(self) -> Mapping[str, Array | None]:
        """See `ringdl.policies.Model`."""
        if self._gradients is None:
            self._gradients = self.read_gradients()
        return self._gradients

    @property
    def state(self) -> Mapping[str, Array]:
        """See `ringdl.policies.Model`."""
        if self._state is None:
            self._state = self.read_state()
        return self._state

    def take(self, parameters: Any) -> None:  # noqa: B027
        """Read and write these from now on, if the framework hands parameters over."""

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Around a policy's method: what it has asked for is written back in the end."""
        try:
            yield
            if self._parameters is not None:
                self.write_parameters(self._parameters)
            if self._gradients is not None:
                self.write_gradients(self._gradients)
            if self._state is not None:
                self.write_state(self._state)
        finally:
            self._parameters = self._gradients = self._state = None

    @abstractmethod
    def read_parameters(self) -> Mapping[str, Array]:
        """The parameters: their own memory, or copies."""

    @abstractmethod
    def read_gradients(self) -> Mapping[str, Array | None]:
        """The gradients, likewise."""

    @abstractmethod
    def read_state(self) -> Mapping[str, Array]:
        """The optimizer's state, likewise."""

    def write_parameters(self, arrays: Mapping[str, Array]) -> None:  # noqa: B027
        """Take back what was read; nothing is to be done for their own memory."""

    def write_gradients(self, arrays: Mapping[str, Array | None]) -> None:  # noqa: B027
        """See `write_parameters`."""

    def write_state(self, arrays: Mapping[str, Array]) -> None:  # noqa: B027
        """See `write_parameters`."""

    @abstractmethod
    def reset_state(self) -> None:
        """See `ringdl.policies.Model`."""

    @property
    def learning_rate(self) -> float:
        """See `ringdl.policies.Model`."""
        raise ringdl.UsageError("the learning rate is not known here; pass the policy its lr")


class Following:
    """Drives a policy by the steps of one optimizer. Collective.

    A policy that drives another optimizer leaves that one, whose steps are refused then.

    Args:
        policy: when ranks exchange what.
        model: what they exchange.
        how_to_mend: what to do if parameters differ at the first step.
        check_replicas: whether they are compared.
        averages: whether to average gradients where the policy wants them so, as the adapter has no
            averages.

    Raises:
        UsageError: parameters cannot be read; the other ranks get a MismatchError.
        MismatchError: on every rank, if policies or parameters differ.
    """

    def __init__(
        self,
        policy: Policy,
        model: Model,
        how_to_mend: str,
        check_replicas: bool = True,
        averages: bool = False,
    ) -> None:
        self._policy, self._model = policy, model
        self._averages = averages
        self._mean: Mean | None = None
        self._how_to_mend, self._checks_replicas = how_to_mend, check_replicas
        with agreeing(model.communicator), model.lent():
            if type(policy).__repr__ is object.__repr__:
                raise ringdl.UsageError(
                    f"{type(policy).__name__} has no __repr__, by which ranks agree on a policy "
                    "and its arguments; give it one"
                )
            specs: list[Any] = [
                (name, [*each.shape], DType[each.dtype.name], [])
                for name, each in model.parameters.items()
            ]
        agree(model.communicator, specs, {"policy": repr(policy)})
        if id(policy) in _followed:
            _followed[id(policy)].end()
        _followed[id(policy)] = self
        self.times = 0
        """How often training has begun."""
        self._has_begun = self._has_ended = self._have_joined = False
        self._last = 0
        self._attach()
        leaves(self)

    def end(self) -> None:
        """The policy is not this optimizer's any more."""
        self._has_ended = True

    @property
    def averages_gradients(self) -> bool:
        """Whether the next step is to use averages."""
        is_going_on = self._has_begun and self._epoch == self._model.communicator.epoch
        return self._policy.averages_gradients(self._model.step if is_going_on else 0)

    @property
    def lets_ranks_differ(self) -> bool:
        """Whether they do not average gradients for good."""
        return not self._has_ended and not self._policy.averages_gradients(sys.maxsize)

    def leave(self) -> None:
        """This rank joins."""
        is_its = self._has_begun and not self._has_ended
        if is_its and self._epoch == self._model.communicator.epoch:
            self._call(self._policy.leave)

    def start_over(self) -> None:
        """All ranks have joined."""
        self._has_begun = False

    def joined(self, last: int) -> None:
        """Who joined last: it has the newest parameters."""
        self._last, self._have_joined = last, True

    def before_step(self) -> None:
        """The gradients are there, averaged where the policy wants them so."""
        self._begin()
        if self._averages and self._policy.averages_gradients(self._model.step):
            self._call(self._average)
        self._call(self._policy.before_step)

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._model.step += 1
        self._call(self._policy.after_step)
        self._count_alone()

    def synchronize(self, parameters: Any = None) -> None:
        """See `ringdl.policies.synchronize`. Collective."""
        if parameters is not None:
            self._model.take(parameters)
        self._refuse_ended()
        have_joined = self._have_joined and self._epoch == self._model.communicator.epoch
        if have_joined and type(self._policy).leave is Policy.leave:
            with self._model.lent():
                newest = [ArrayReplica(each) for each in self._model.parameters.values()]
                replicas.broadcast(newest, self._newest(), self._model.communicator)
            return
        if not have_joined:
            self._begin()
        self._call(self._policy.synchronize)

    def _newest(self) -> int:
        """The rank that joined last; of a part of the ranks, the one that has made most steps."""
        its = self._model.communicator
        if its._group is None:
            return self._last
        steps = its.allgather_object(self._model.step, f"{self._model.key}.steps")
        return max(range(its.size), key=lambda rank: (steps[rank], rank))

    def _average(self, model: ModelOfPolicies) -> None:
        """Those that all ranks have; what no rank has stays missing."""
        names, gradients = [*model.parameters], model.gradients
        if self._mean is None:
            flags = {_PRESENT: np.zeros(len(names), np.float32)}
            self._mean = Mean({**model.parameters, **flags}, model)
        has = [gradients.get(name) is not None for name in names]
        zero = np.zeros(())
        arrays = {
            name: zero if each is None else each
            for name, each in ((name, gradients.get(name)) for name in names)
        }
        self._mean.begin({**arrays, _PRESENT: np.array(has, np.float32)}, model.step)
        means = self._mean.end()
        for name, share in zip(names, means[_PRESENT], strict=True):
            if 0 < share < 1 - 0.5 / model.communicator.size:
                raise ringdl.MismatchError(
                    f"some ranks have a gradient of {name!r}, and others do not, which this "
                    "framework cannot be given; have all ranks compute the same ones (a loss times "
                    "zero has gradients)"
                )
        for name, each in gradients.items():
            if each is not None:
                each[...] = means[name]

    def _call(self, method: Callable[[ModelOfPolicies], None]) -> None:
        if self._model.communicator.size > 1:
            with self._model.lent():
                method(self._model)

    def _count_alone(self) -> None:
        if self._model.communicator.size == 1:
            self._policy.count_alone(self._model.step)

    def _refuse_ended(self) -> None:
        if self._has_ended:
            raise ringdl.UsageError(
                f"{self._policy!r} was given to another optimizer, and is not this one's any more; "
                "make a policy for each"
            )

    def _attach(self) -> None:
        its = self._model.communicator
        self._epoch, self._mean = its.epoch, None
        self._model.key = f"ringdl.policy.{its._count('policies') - 1}"
        self._call(self._policy.attach)

    def _begin(self) -> None:
        """Where it has not begun: see that replicas are equal. Collective then."""
        self._refuse_ended()
        its = self._model.communicator
        if self._epoch != its.epoch:
            self._has_begun = self._have_joined = False
            self._attach()
        if self._has_begun:
            return
        if self._checks_replicas:
            key = f"{self._model.key}.replicas"
            with self._model.lent():
                parameters = self._model.parameters.items()
                named = [(name, ArrayReplica(each)) for name, each in parameters]
                replicas.check(named, its, key, self._how_to_mend)
        self._model.step = 0
        self.times += 1
        self._call(self._policy.start_over)
        self._count_alone()
        self._has_begun, self._have_joined = True, False
