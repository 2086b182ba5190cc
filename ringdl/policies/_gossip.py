"""Averaging with neighbours only: nobody waits for all ranks."""

from __future__ import annotations

from typing import Any

from ringdl._errors import UsageError
from ringdl._work import Work
from ringdl.policies._flat import Flat
from ringdl.policies._graphs import Topology, checked, graphs_of, is_even, shares_of
from ringdl.policies._policy import Array, Model, Policy


class Gossip(Policy):
    """After each step, a rank averages its parameters with those of its neighbours.

    Nobody waits for all ranks: one that is late delays its neighbours, and these theirs a step
    later. Parameters of ranks differ, while their mean is changed by each step as that of
    `ParameterAveraging` is (Lian and others 2017).

    - "ring": it sends to the ranks before and behind it, a third of its parameters each.
    - "exponential": to one rank, half of its parameters: that 1, 2, 4, ... ranks further, by turns
      (Ying and others 2021). If the number of ranks is a power of two, all have the mean of all
      after a turn of each.
    - A graph: to those that the graph names for it, in each step.

    In a graph, a rank may get more than it gives away, and the mean would be more of its making
    than of others'. So each rank keeps a weight, which travels along, and by which it divides
    (push-sum: stochastic gradient push, Assran and others 2019).

    All ranks have to make the same number of steps.

    Args:
        topology: "ring", "exponential", or a graph, the same on all ranks: for each rank those
            that it sends to. Each rank has to be reached from each other.
        mixing: the share of its parameters that a rank gives away in a step, in equal parts; by
            default it keeps as much as each of the others gets.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(self, topology: Topology = "exponential", mixing: float | None = None) -> None:
        self.topology = checked(topology)
        if mixing is not None and not 0 < mixing < 1:
            raise UsageError(f"mixing is {mixing!r}; pass a share between 0 and 1")
        self.mixing = mixing

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        size = model.communicator.size
        self._graphs = graphs_of(self.topology, size)
        self._shares = [shares_of(graph, self.mixing) for graph in self._graphs]
        self._is_even = all(map(is_even, self._shares))
        self._flat = Flat(model)
        most = max(len(self._sources(model, turn)) for turn in range(len(self._graphs)))
        self._got = [self._flat.empty() for _ in range(most)]

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        del model
        self._weight = 1.0
        self._before: dict[str, Array] = {}

    def before_step(self, model: Model) -> None:
        """See `Policy.before_step`."""
        if self._weight != 1.0:
            self._before = {name: array.copy() for name, array in model.parameters.items()}

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        parameters = model.parameters
        self._flat.gather(parameters)
        if self._weight != 1.0:
            # What is exchanged is what they were by weight, and the step's change: by weight, too,
            # it would change the mean more than the others' do.
            self._flat.add(self._before, self._weight - 1)
        self._exchange(model, (model.step - 1) % len(self._graphs))
        self._flat.spread(parameters, 1 / self._weight)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the mean of all parameters."""
        parameters, its = model.parameters, model.communicator
        self._flat.gather(parameters)
        for dtype, own in self._flat.own.items():
            if self._weight != 1.0:
                own *= self._weight  # all weights add up to the number of ranks
            its.allreduce_(own, name=f"{model.key}.mean.{dtype}")
        self._weight = 1.0
        self._flat.spread(parameters)

    def _exchange(self, model: Model, turn: int) -> None:
        """Send to neighbours, and add up what they have sent by its shares."""
        import numpy as np

        rank = model.communicator.rank
        own, got = dict(self._flat.own), [dict(each) for each in self._got]
        if not self._is_even:
            own["weight"] = np.full(1, self._weight)
            for each in got:
                each["weight"] = np.empty(1)
        sources = self._sources(model, turn)
        works: list[Work[Any]] = []
        for part, array in own.items():
            name = f"{model.key}.{part}"
            for dest in self._graphs[turn][rank]:
                works.append(model.communicator.send_async(array, dest, name))
            for source, each in zip(sources, got, strict=False):
                works.append(model.communicator.recv_async_(each[part], source, name))
        for work in works:
            work.wait()
        shares = self._shares[turn][rank]
        for part, array in own.items():
            array *= shares[rank]
            for source, each in zip(sources, got, strict=False):
                array += shares[source] * each[part]
        if not self._is_even:
            self._weight = float(own["weight"][0])

    def _sources(self, model: Model, turn: int) -> list[int]:
        rank = model.communicator.rank
        return [source for source, others in enumerate(self._graphs[turn]) if rank in others]

    def __repr__(self) -> str:
        return f"Gossip(topology={self.topology!r}, mixing={self.mixing})"
