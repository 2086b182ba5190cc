"""Parameters are averaged rarely, and the mean is a step of an outer optimizer."""

from __future__ import annotations

from ringdl._errors import UsageError
from ringdl._numbers import is_positive
from ringdl.policies._averaging import check_count
from ringdl.policies._mean import Mean
from ringdl.policies._policy import Array, Model, Policy
from ringdl.policies._rounds import Rounds


class DiLoCo(Policy):
    """Ranks train by themselves for many steps; what these have changed is an outer gradient.

    From Douillard and others (2023). After `inner_steps` the mean over ranks of what their steps
    have changed is the gradient that an outer optimizer, SGD with momentum, steps by, from where
    all ranks were after its last step. Each rank keeps the state of its own optimizer. It is the
    policy for slow links: a mean per hundreds of steps, of which the momentum makes the most.

    Args:
        inner_steps: of a rank by itself, between two outer ones.
        outer_lr: the outer learning rate. 1, without momentum, is `ParameterAveraging`.
        nesterov: whether the outer momentum looks ahead.
        outer_momentum: from 0 to 1.
        balance: whether slower ranks make fewer steps; see `ParameterAveraging`.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        inner_steps: int,
        outer_lr: float = 0.7,
        nesterov: bool = True,
        outer_momentum: float = 0.9,
        balance: bool = False,
    ) -> None:
        check_count("inner_steps", inner_steps)
        if not is_positive(outer_lr):
            raise UsageError(f"outer_lr is {outer_lr!r}; pass a positive number")
        if not 0 <= outer_momentum < 1:
            raise UsageError(
                f"outer_momentum is {outer_momentum!r}; pass a number from 0 to below 1"
            )
        self.inner_steps, self.outer_lr = inner_steps, outer_lr
        self.nesterov, self.outer_momentum = nesterov, outer_momentum
        self.balance = balance
        self._rounds = Rounds(inner_steps, balance)

    @property
    def rounds(self) -> int:
        """How many outer steps were made since training began: in step with the other ranks."""
        return self._rounds.number

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._mean = Mean(model.parameters, model, self._rounds.rule)

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`: the outer momentum begins anew, too."""
        self._last_step = model.step
        """After which the last outer step was made."""
        self._rounds.start_over(model.step)
        self._outer = {name: array.copy() for name, array in model.parameters.items()}
        self._velocities: dict[str, Array] = {}

    def count_alone(self, step: int) -> None:
        """See `Policy.count_alone`."""
        self._rounds.number = step // self.inner_steps

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        if self._rounds.is_due(model.step):
            seconds = self._rounds.seconds(model.step)
            self._outer_step(model, seconds)
            self._rounds.end(model.step, seconds, self._mean.told)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: an outer step, unless one has just been made."""
        made = model.step - self._last_step
        if made > 0 or self.balance:  # then ranks may have made different numbers of steps
            self._outer_step(model, made)
        for name, outer in self._outer.items():
            model.parameters[name][...] = outer

    def _outer_step(self, model: Model, told: float) -> None:
        parameters = model.parameters
        weight = self._rounds.weight(model.step)
        self._mean.begin(parameters, self._rounds.mark(model.step), weight, told)
        means = self._mean.end()
        if model.step == self._last_step and not any(self._mean.told):
            return  # nobody has made a step
        self._last_step = model.step
        for name, mean in means.items():
            outer = self._outer[name]
            gradient = outer - mean
            velocity = self._velocities.get(name)
            if velocity is not None:
                velocity = self.outer_momentum * velocity + gradient
            else:
                velocity = gradient
            self._velocities[name] = velocity
            step = gradient + self.outer_momentum * velocity if self.nesterov else velocity
            outer -= self.outer_lr * step
            parameters[name][...] = outer

    def __repr__(self) -> str:
        return (
            f"DiLoCo(inner_steps={self.inner_steps}, outer_lr={self.outer_lr}, "
            f"nesterov={self.nesterov}, outer_momentum={self.outer_momentum}, "
            f"balance={self.balance})"
        )
