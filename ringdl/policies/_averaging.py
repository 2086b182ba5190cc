"""Gradients are averaged, or parameters every few steps, or first these, then those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from ringdl._errors import UsageError
from ringdl.policies._mean import Mean
from ringdl.policies._policy import Array, Model, Policy

StateRule: TypeAlias = Literal["average", "keep", "reset"]
Spec: TypeAlias = tuple[str, tuple[int, ...], str]
"""An array's name, shape and dtype."""


class AllReduce(Policy):
    """Gradients are averaged in every step: what `DistributedOptimizer` does by default.

    All ranks have the same bits in their parameters, always.
    """

    def averages_gradients(self, step: int) -> bool:
        """Always."""
        del step
        return True

    def __repr__(self) -> str:
        return "AllReduce()"


class ParameterAveraging(Policy):
    """Ranks train by themselves, and average their parameters every few steps.

    With ``every=1``, and an optimizer that is linear in the gradient, as plain SGD, that is what
    averaging gradients is. Else it is local SGD (Stich 2019), or federated averaging (McMahan and
    others 2017) of equal parts: fewer bytes, and gradients of parameters that have drifted apart.

    With ``overlap=True`` the mean travels during the next steps, and arrives one round late: then a
    rank adds the difference between that mean and what it had sent (CoCoD-SGD, Shen and others
    2019). So parameters are never quite equal, until `synchronize`.

    Args:
        every: so many steps are made between two means.
        optimizer_state: what becomes of the optimizer's state, as momentum, in a mean: it is
            averaged, too; each rank keeps its own; or it is reset.
        overlap: whether the mean arrives one round later.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self, every: int, optimizer_state: StateRule = "average", overlap: bool = False
    ) -> None:
        check_count("every", every)
        if optimizer_state not in get_args(StateRule):
            raise UsageError(
                f"optimizer_state is {optimizer_state!r}; pass 'average', 'keep' or 'reset'"
            )
        if overlap and optimizer_state == "reset":
            raise UsageError("overlap=True has no step in which state is reset; pass 'keep'")
        self.every, self.optimizer_state, self.overlap = every, optimizer_state, overlap

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._parameters = _Averaged(Mean(model.parameters, model, self.every))
        self._state = _State(model, self.every) if self.optimizer_state == "average" else None

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        if model.step % self.every == 0:
            self._average(model)

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        del model
        self._parameters.drop()
        if self._state is not None:
            self._state.drop()

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters."""
        self._parameters.take(model.parameters)
        self._parameters.replace(model.parameters)

    def _average(self, model: Model) -> None:
        self._exchange(self._parameters, model.parameters)  # finds ranks that are out of step
        if self.optimizer_state == "reset":
            model.reset_state()
        if self._state is not None:
            self._state.agree(model)
            if self._state.averaged is not None:
                self._exchange(self._state.averaged, self._state.of(model))

    def _exchange(self, averaged: _Averaged, arrays: Mapping[str, Array]) -> None:
        if self.overlap:
            averaged.take(arrays)
            averaged.send(arrays)
        else:
            averaged.replace(arrays)

    def __repr__(self) -> str:
        return (
            f"ParameterAveraging(every={self.every}, optimizer_state={self.optimizer_state!r}, "
            f"overlap={self.overlap})"
        )


class PostLocalSGD(Policy):
    """Gradients are averaged in the first steps; then ranks average parameters every few steps.

    From Lin and others (2020): the first steps, in which parameters change most, are synchronous.
    Each rank keeps its optimizer's state.

    Args:
        after: so many steps average gradients.
        every: of later steps, so many are made between two means of parameters.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(self, after: int, every: int) -> None:
        check_count("after", after, at_least=0)
        self.after, self.every = after, every
        self._later = ParameterAveraging(every, "keep")

    def averages_gradients(self, step: int) -> bool:
        """In the first steps."""
        return step < self.after

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._later.attach(model)

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        if model.step > self.after and (model.step - self.after) % self.every == 0:
            self._later.synchronize(model)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters."""
        self._later.synchronize(model)

    def __repr__(self) -> str:
        return f"PostLocalSGD(after={self.after}, every={self.every})"


def check_count(name: str, count: object, at_least: int = 1, what: str = "steps") -> None:
    """Check an argument that is a number of steps, or of something else.

    Raises:
        UsageError: it is none, or too small.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < at_least:
        raise UsageError(f"{name} is {count!r}; pass a number of {what}, at least {at_least}")


class _Averaged:
    """Arrays that are averaged, at once or one round late."""

    def __init__(self, mean: Mean) -> None:
        self._mean = mean
        self._sent: dict[str, Array] | None = None

    def replace(self, arrays: Mapping[str, Array]) -> None:
        """Write their mean into the arrays. Collective."""
        self._mean.begin(arrays)
        for name, average in self._mean.end().items():
            arrays[name][...] = average

    def send(self, arrays: Mapping[str, Array]) -> None:
        """Start a mean, which `take` adds. Collective."""
        self._mean.begin(arrays)
        self._sent = {name: array.copy() for name, array in arrays.items()}

    def take(self, arrays: Mapping[str, Array]) -> None:
        """Add the difference between the mean that was started and what was sent, if any was."""
        sent, self._sent = self._sent, None
        if sent is not None:
            for name, average in self._mean.end().items():
                arrays[name][...] += average - sent[name]

    def drop(self) -> None:
        """Forget what was sent: others have been given new arrays meanwhile. Collective."""
        if self._sent is not None:
            self._sent = None
            self._mean.end()


class _State:
    """The arrays of the optimizer's state that all ranks have."""

    def __init__(self, model: Model, every: int) -> None:
        _ = model.state  # raises where there is no such thing
        self.averaged: _Averaged | None = None
        self._every = every
        self._told: list[Spec] = []
        self._names: list[str] = []

    def agree(self, model: Model) -> None:
        """Find out what all ranks have, where one has other arrays than in the last mean."""
        own = [(name, each.shape, each.dtype.name) for name, each in model.state.items()]
        is_changed, self._told = own != self._told, own
        name = f"{model.key}.state"
        if not any(model.communicator.allgather_object(is_changed, f"{name} changed")):
            return
        first, *others = model.communicator.allgather_object(own, name)
        common = [spec for spec in first if all(spec in other for other in others)]
        self._names = [name for name, _, _ in common]
        if self.averaged is not None:
            self.averaged.drop()
        self.averaged = None
        if common:
            self.averaged = _Averaged(Mean(self.of(model), model, self._every))

    def of(self, model: Model) -> dict[str, Array]:
        """The arrays."""
        state = model.state
        return {name: state[name] for name in self._names}

    def drop(self) -> None:
        """See `_Averaged.drop`."""
        if self.averaged is not None:
            self.averaged.drop()
