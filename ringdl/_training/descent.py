"""Optimizers of training loops without a framework: over arrays that change in place.

Written once for NumPy, CuPy and whatever else has their operators: arrays are only added,
multiplied and raised to powers, in place where they are the optimizer's own.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ringdl._errors import UsageError

Arrays: TypeAlias = "Sequence[Any] | Mapping[str, Any]"


class _Descent:
    """What all have: a state that is kept and loaded again, as `ringdl.elastic.State` does."""

    def state_dict(self) -> dict[str, Any]:
        """Its options and arrays: the arrays are the optimizer's own, which steps change."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take copies of what `state_dict` has given.

        Raises:
            UsageError: it is of another kind of optimizer.
        """
        if state.keys() != vars(self).keys():
            raise UsageError(
                f"a {type(self).__name__} has {sorted(vars(self))}, and the state {sorted(state)}"
            )
        vars(self).update(copy.deepcopy(dict(state)))


class SGD(_Descent):
    """Stochastic gradient descent, with momentum as PyTorch has it.

    Args:
        lr: the learning rate; may be changed between steps.
        momentum: of the velocity, from 0 to 1.
        weight_decay: adds so much of the parameter to its gradient.
        nesterov: looks ahead by the momentum.
    """

    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.lr, self.momentum = lr, momentum
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
                    self.velocities[key] = velocity = _array(change + 0)
                else:
                    velocity *= self.momentum
                    velocity += change
                change = change + self.momentum * velocity if self.nesterov else velocity
            parameter -= self.lr * change

    @property
    def state(self) -> dict[str, Any]:
        """The velocities, for policies."""
        return {f"velocity of {key}": array for key, array in self.velocities.items()}

    def reset(self) -> None:
        """Forget the velocities."""
        self.velocities = {}


class Adam(_Descent):
    """Adam (Kingma and Ba 2015), as PyTorch computes it.

    Args:
        lr: the learning rate; may be changed between steps.
        betas: of the means of gradients and of their squares.
        eps: added to the root of the second.
        weight_decay: adds so much of the parameter to its gradient.
    """

    _is_decoupled = False

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.means: dict[Any, tuple[Any, Any, int]] = {}
        """By key or index: the means of gradients and of their squares, and of how many."""

    def step(self, parameters: Arrays, gradients: Arrays) -> None:
        """Change the parameters in place; those without a gradient stay, and so do their means."""
        first_beta, second_beta = self.betas
        for key, parameter, given in _pairs(parameters, gradients):
            gradient = given
            if self.weight_decay and self._is_decoupled:
                parameter *= 1 - self.lr * self.weight_decay
            elif self.weight_decay:
                gradient = gradient + self.weight_decay * parameter
            first, second, count = self.means.get(key) or (
                _array(gradient * 0),
                _array(gradient * 0),
                0,
            )
            first *= first_beta
            first += (1 - first_beta) * gradient
            second *= second_beta
            second += (1 - second_beta) * (gradient * gradient)
            count += 1
            self.means[key] = first, second, count
            root = (second / (1 - second_beta**count)) ** 0.5 + self.eps
            parameter -= self.lr / (1 - first_beta**count) * (first / root)

    @property
    def state(self) -> dict[str, Any]:
        """The means, for policies."""
        return {
            f"{name} of {key}": array
            for key, (first, second, _) in self.means.items()
            for name, array in (("mean", first), ("mean of squares", second))
        }

    def reset(self) -> None:
        """Forget the means."""
        self.means = {}


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        lr: see `Adam`.
        betas: see `Adam`.
        eps: see `Adam`.
        weight_decay: shrinks parameters by so much of the learning rate.
    """

    _is_decoupled = True

    def __init__(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)


def _array(computed: Any) -> Any:
    """What was computed, as an array: without axes, NumPy makes numbers of it."""
    return np.array(computed) if isinstance(computed, np.generic) else computed


def _pairs(parameters: Arrays, gradients: Arrays) -> list[tuple[Any, Any, Any]]:
    """Keys, parameters and gradients, without those that are None."""
    keys = [*parameters] if isinstance(parameters, Mapping) else range(len(parameters))
    found: Any = gradients
    its: Any = parameters
    return [(key, its[key], found[key]) for key in keys if found[key] is not None]
