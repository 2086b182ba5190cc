"""Averaging with one neighbour after the other, at each rank's own pace."""

from __future__ import annotations

from ringdl._errors import UsageError
from ringdl.policies._graphs import Topology, checked, graphs_of
from ringdl.policies._mean import Mean, average
from ringdl.policies._policy import Array, Model, Policy
from ringdl.policies._shards import Shards, wait_for_trainers


class AsyncGossip(Policy):
    """After each step, a rank and one of its neighbours move towards each other; nobody waits.

    Asynchronous decentralized SGD (AD-PSGD: Lian and others 2018). Each rank shows its parameters
    in memory as that of `ParameterServer`'s shards: a neighbour moves them there, whatever the rank
    does meanwhile, and it takes that over in its next step. Neighbours come by turns. Ranks'
    parameters differ; their mean is changed by steps alone, and most by the ranks that make most.

    A rank that has called `ringdl.policies.synchronize`, which gives all ranks the mean, still
    answers until the others have called it. Ranks may make different numbers of steps.

    Args:
        topology: as that of `Gossip`.
        mixing: the share of their difference by which both move, above 0 and at most a half, which
            gives both their mean.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(self, topology: Topology = "exponential", mixing: float = 0.5) -> None:
        self.topology = checked(topology)
        if not 0 < mixing <= 0.5:
            raise UsageError(f"mixing is {mixing!r}; pass a share, above 0 and at most 0.5")
        self.mixing = mixing

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._graphs = graphs_of(self.topology, model.communicator.size)
        self._shown = Shards(model, of_each=True)
        self._mean = Mean(model.parameters, model)
        self._before: dict[str, Array] = {}

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        self._shown.fill(model)
        self._before = {name: array.copy() for name, array in model.parameters.items()}

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        self._show(model)
        self._shown.pull(model.parameters, self.mixing, self._neighbour(model))

    def leave(self, model: Model) -> None:
        """See `Policy.leave`."""
        if self._before:  # it has made a step
            self._show(model)
        self._before = {}

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters."""
        import numpy as np

        self.leave(model)
        wait_for_trainers(model, "shown")
        its, parameters = model.communicator, model.parameters
        here = its.allgather(np.array([its.rank]), name=f"{model.key}.here").tolist()
        copies = [its.rank]
        if its.rank == here[0]:  # ranks that are in join() have it do their part
            copies += {*range(its.size)} - {*here}
        total = {name: np.zeros_like(array) for name, array in parameters.items()}
        for member in copies:
            self._shown.fetch(parameters, member)
            for name, array in parameters.items():
                total[name] += array / len(copies)
        average(self._mean, total, 0, weight=len(copies))
        for name, array in parameters.items():
            array[...] = total[name]
        self.start_over(model)

    def _show(self, model: Model) -> None:
        """Add what this rank has changed to what others see; take over what they have changed."""
        parameters, rank = model.parameters, model.communicator.rank
        for name, before in self._before.items():
            before -= parameters[name]  # the change, but for its sign
        try:
            self._shown.push(self._before, 1.0, rank)
            self._shown.fetch(parameters, rank)
        finally:
            for name, before in self._before.items():
                before[...] = parameters[name]

    def _neighbour(self, model: Model) -> int:
        turn, graph = divmod(model.step - 1, len(self._graphs))
        others = self._graphs[graph][model.communicator.rank]
        return others[turn % len(others)]

    def __repr__(self) -> str:
        return f"AsyncGossip(topology={self.topology!r}, mixing={self.mixing})"
