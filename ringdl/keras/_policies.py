"""Policies for Keras: what an optimizer's `apply` is put between, on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import ringdl
from ringdl._training.handed import Handed
from ringdl.keras._averaging import HOW_TO_MEND, dtype_name, path_of
from ringdl.policies import Policy
from ringdl.policies._policy import Array

Tensors = dict[str, Any]


class Followed:
    """A policy for an optimizer of Keras 3.

    Args:
        policy: when ranks exchange what.
        communicator: the ranks.
    """

    def __init__(self, policy: Policy, communicator: ringdl.Communicator) -> None:
        self._policy, self._communicator = policy, communicator
        self._carry_out = _CARRIERS[keras.backend.backend()](policy, communicator)
        self._variables: list[Any] = []
        """Those of the first step."""

    def apply(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """A step. Collective, as the policy is."""
        if self._communicator.size == 1:
            apply(gradients)
            if hasattr(self._policy, "rounds"):  # which scripts may end by
                nothing: dict[str, Tensors] = {"gradients": {}, "parameters": {}, "state": {}}
                self._carry_out("before", {}, nothing)
                self._carry_out("after", {}, nothing)
            return
        if not self._variables:
            self._variables = [*variables]
        if [*map(id, variables)] != [*map(id, self._variables)]:
            raise ringdl.UsageError(
                "these variables are not those of the first step; with a policy pass the same ones "
                "in each step, None for a gradient that there is not, and wrap an optimizer for "
                "each network"
            )
        parameters = _named(variables)
        given = {
            name: _dense(gradient, variable)
            for (name, variable), gradient in zip(parameters.items(), gradients, strict=True)
            if gradient is not None
        }
        read = {"parameters": _values(parameters), "state": _values(_state_of(optimizer))}
        used = self._carry_out("before", {"gradients": given}, read)["gradients"]
        apply([used.get(name) for name in parameters])
        states = _state_of(optimizer)
        changed = self._carry_out(
            "after", {"parameters": _values(parameters), "state": _values(states)}, {}
        )
        for part, its in (("parameters", parameters), ("state", states)):
            for name, variable in its.items():
                if changed[part][name] is not variable.value:
                    variable.assign(changed[part][name])

    def synchronize(self, variables: Sequence[Any]) -> None:
        """See `ringdl.policies.synchronize`."""
        parameters = _named(variables)
        arrays = {name: np.array(keras.ops.convert_to_numpy(v)) for name, v in parameters.items()}
        self._carry_out.handed.synchronize(arrays)
        for name, variable in parameters.items():
            variable.assign(arrays[name])

    def start_over(self) -> None:
        """See `ringdl.policies.start_over`."""
        self._carry_out.handed.start_over()


class _OnTorch:
    """Tensors are changed in their own memory."""

    def __init__(self, policy: Policy, communicator: ringdl.Communicator) -> None:
        self.handed = Handed(policy, communicator, HOW_TO_MEND)

    def __call__(
        self, when: str, changed: Mapping[str, Tensors], read: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """See `Handed.carry_out`. The results are `changed`, as they are then."""
        from ringdl.torch._policies import in_numpy

        parts = {**changed, **read}
        arrays = {
            part: {name: in_numpy(each) for name, each in its.items()}
            for part, its in parts.items()
        }
        self.handed.carry_out(when, arrays)
        return changed


class _OnJax:
    """In compiled steps, too."""

    def __init__(self, policy: Policy, communicator: ringdl.Communicator) -> None:
        from ringdl.jax._followers import Follower
        from ringdl.jax._ranks import ranks_of

        self._follower = Follower(policy, ranks_of(communicator), HOW_TO_MEND)
        self.handed = self._follower.handed

    def __call__(
        self, when: str, changed: Mapping[str, Tensors], read: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """See `_OnTorch`."""
        return self._follower.call(when, changed, read)


class _OnTensorFlow:
    """In graphs, too."""

    def __init__(self, policy: Policy, communicator: ringdl.Communicator) -> None:
        self.handed = Handed(policy, communicator, HOW_TO_MEND)

    def __call__(
        self, when: str, changed: Mapping[str, Tensors], read: Mapping[str, Tensors]
    ) -> Mapping[str, Tensors]:
        """See `_OnTorch`."""
        from ringdl.tensorflow._graph import call

        parts = {**changed, **read}
        places = [(part, name) for part, its in parts.items() for name in its]
        results = [(part, name) for part, its in changed.items() for name in its]

        def run(_: Any, *arrays: Array) -> Sequence[Array]:
            whole: dict[str, dict[str, Array]] = {part: {} for part in parts}
            for (part, name), array in zip(places, arrays, strict=True):
                whole[part][name] = array.copy() if part in changed else array
            self.handed.carry_out(when, whole)
            return [whole[part][name] for part, name in results] or [np.zeros((), np.bool_)]

        tensors = [parts[part][name] for part, name in places]
        dtypes = [parts[part][name].dtype for part, name in results] or ["bool"]  # one at least
        made = call(f"policy {when}", run, tensors, dtypes, None)
        found: dict[str, Tensors] = {part: {} for part in changed}
        for (part, name), tensor in zip(results, made if results else [], strict=True):
            tensor.set_shape(parts[part][name].shape)
            found[part][name] = tensor
        return found


_CARRIERS: dict[str, Any] = {"torch": _OnTorch, "jax": _OnJax, "tensorflow": _OnTensorFlow}


def _named(variables: Sequence[Any]) -> dict[str, Any]:
    return {f"variable {index}": variable for index, variable in enumerate(variables)}


def _values(variables: Mapping[str, Any]) -> Tensors:
    return {name: keras.ops.convert_to_tensor(each.value) for name, each in variables.items()}


def _state_of(optimizer: Any) -> dict[str, Any]:
    """The floating-point variables of the optimizer's state, but for the learning rate."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return {
        f"{index} {path_of(each)}": each
        for index, each in enumerate(inner.variables)
        if each is not inner._learning_rate and dtype_name(each).startswith(("float", "bfloat"))
    }


def _dense(gradient: Any, variable: Any) -> Any:
    """Sparse gradients, too, as policies see them."""
    return keras.ops.cast(keras.ops.convert_to_tensor(gradient, sparse=False), variable.dtype)
