"""Gradients are averaged, or parameters every few steps, or first these, then those."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from ringdl._errors import UsageError
from ringdl._numbers import is_count
from ringdl.policies._mean import Mean, average
from ringdl.policies._policy import Array, Model, Policy
from ringdl.policies._rounds import Rounds

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
    2019). So parameters are never quite equal, until `synchronize`, with which training ends: the
    last mean is still on its way.

    With ``balance=True`` nobody waits long for a slower rank: it makes fewer steps between two
    means, as many as fit into the time in which the fastest makes `every`, and counts as much less
    in the mean. Ranks then make different numbers of steps, which end with ``join()``, or when
    `rounds` has reached a number.

    Args:
        every: so many steps are made between two means.
        optimizer_state: what becomes of the optimizer's state, as momentum, in a mean: "average":
            it is averaged, too; "keep": each rank keeps its own; "reset": it is forgotten. By
            default it is averaged, but with `overlap` kept.
        overlap: whether the mean arrives one round later.
        balance: whether slower ranks make fewer steps.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        every: int,
        optimizer_state: StateRule | None = None,
        overlap: bool = False,
        balance: bool = False,
    ) -> None:
        check_count("every", every)
        rule: StateRule = optimizer_state or ("keep" if overlap else "average")
        if rule not in get_args(StateRule):
            raise UsageError(f"optimizer_state is {rule!r}; pass 'average', 'keep' or 'reset'")
        if overlap and rule != "keep":
            raise UsageError(
                f"overlap=True with optimizer_state={rule!r}: a mean that arrives late is for "
                "parameters; pass 'keep'"
            )
        self.every, self.optimizer_state, self.overlap = every, rule, overlap
        self.balance = balance
        self._rounds = Rounds(every, balance)

    @property
    def rounds(self) -> int:
        """How many means were taken since training began: in step with the other ranks."""
        return self._rounds.number

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._mean = Mean(model.parameters, model, self._rounds.rule)
        self._sent: dict[str, Array] = {}
        self._state = _State(model) if self.optimizer_state == "average" else None

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        self.begin_rounds(model.step)
        if self._sent:  # others have given parameters meanwhile
            self._sent = {}
            self._mean.end()

    def count_alone(self, step: int) -> None:
        """See `Policy.count_alone`."""
        self._rounds.number = max(0, step) // self.every

    def begin_rounds(self, step: int) -> None:
        """Count steps from this one."""
        self._rounds.start_over(step)

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`: the mean, if it is time; with `overlap` the one before."""
        if not self._rounds.is_due(model.step):
            return
        number, weight = self._rounds.mark(model.step), self._rounds.weight(model.step)
        seconds = self._rounds.seconds(model.step)
        if self.overlap:
            told = self._take(model.parameters)
            self._mean.begin(model.parameters, number, weight, seconds)
            self._sent = {name: array.copy() for name, array in model.parameters.items()}
        else:
            # Finds ranks that are out of step.
            average(self._mean, model.parameters, number, weight, seconds)
            told = self._mean.told
            if self.optimizer_state == "reset":
                model.reset_state()
            if self._state is not None:
                self._state.average(model, number, weight)
        self._rounds.end(model.step, seconds, told)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters, after one that is on its way."""
        self._take(model.parameters)
        weight = self._rounds.weight(model.step)
        average(self._mean, model.parameters, self._rounds.mark(model.step), weight)

    def _take(self, parameters: Mapping[str, Array]) -> list[float]:
        """Add the mean that is on its way, if there is one; what the ranks have told with it."""
        if not self._sent:
            return []
        for name, mean in self._mean.end().items():
            parameters[name][...] += mean - self._sent[name]
        self._sent = {}
        return self._mean.told

    def __repr__(self) -> str:
        return (
            f"ParameterAveraging(every={self.every}, optimizer_state={self.optimizer_state!r}, "
            f"overlap={self.overlap}, balance={self.balance})"
        )


class PostLocalSGD(Policy):
    """Gradients are averaged in the first steps; then ranks average parameters every few steps.

    From Lin and others (2020): the first steps, in which parameters change most, are synchronous.
    Each rank keeps its optimizer's state.

    Args:
        after: so many steps average gradients.
        every: of later steps, so many are made between two means of parameters.
        balance: whether slower ranks make fewer steps then; see `ParameterAveraging`.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(self, after: int, every: int, balance: bool = False) -> None:
        check_count("after", after, at_least=0)
        self.after, self.every, self.balance = after, every, balance
        self._later = ParameterAveraging(every, "keep", balance=balance)

    @property
    def rounds(self) -> int:
        """How many means of parameters were taken since training began."""
        return self._later.rounds

    def averages_gradients(self, step: int) -> bool:
        """In the first steps."""
        return step < self.after

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._later.attach(model)

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        self._later.start_over(model)

    def count_alone(self, step: int) -> None:
        """See `Policy.count_alone`."""
        self._later.count_alone(step - self.after)

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        if model.step == self.after:
            self._later.begin_rounds(model.step)
        elif model.step > self.after:
            self._later.after_step(model)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters."""
        self._later.synchronize(model)

    def __repr__(self) -> str:
        return f"PostLocalSGD(after={self.after}, every={self.every}, balance={self.balance})"


def check_count(name: str, count: object, at_least: int = 1, what: str = "steps") -> None:
    """Check an argument that is a number of steps, or of something else.

    Raises:
        UsageError: it is none, or too small.
    """
    if not is_count(count, at_least):
        raise UsageError(f"{name} is {count!r}; pass a number of {what}, at least {at_least}")


class _State:
    """The arrays of the optimizer's state that all ranks have."""

    def __init__(self, model: Model) -> None:
        _ = model.state  # raises where there is no such thing
        self._mean: Mean | None = None
        self._told: list[Spec] = []
        self._names: list[str] = []

    def average(self, model: Model, number: int, weight: float) -> None:
        """Average it; not, if there is more of it than before, while some ranks have joined."""
        own = [(name, each.shape, each.dtype.name) for name, each in model.state.items()]
        name = f"{model.key}.state"
        news = model.communicator.allgather_object(own != self._told, f"{name} changed")
        if any(news):
            if len(news) < model.communicator.size:
                return
            self._agree(model, own, name)
        if self._mean is not None:
            state = model.state
            average(self._mean, {name: state[name] for name in self._names}, number, weight)

    def _agree(self, model: Model, own: list[Spec], name: str) -> None:
        self._told = own
        first, *others = model.communicator.allgather_object(own, name)
        common = [spec for spec in first if all(spec in other for other in others)]
        state = model.state
        self._names = [name for name, _, _ in common]
        its = {name: state[name] for name in self._names}
        self._mean = Mean(its, model) if its else None
