"""A model's parameters in shards that ranks push to and fetch from, by themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ringdl import _engine
from ringdl._engine import DType, Update, UpdateRule
from ringdl._errors import Error, UsageError
from ringdl.policies._policy import Array, Model

_FAILED = -2
"""In place of where a rank's shard is."""

_EPSILON = {UpdateRule.sgd: 0.0, UpdateRule.adagrad: 1e-10, UpdateRule.adam: 1e-8}
"""As PyTorch has them."""


class Shards:
    """The parameters of a model, as the ranks know them together; `fill` comes first. Collective.

    Args:
        model: whose.
        rule: how pushed gradients change them.
        servers: how many ranks have shards in their memory.
        of_each: each rank has a shard of all parameters, its own ones; calls then name whose is
            meant.

    Raises:
        UsageError: on all ranks: a parameter has 16 bits; or they are on several hosts, and the MPI
            does not let threads answer in the background.
    """

    def __init__(
        self,
        model: Model,
        rule: UpdateRule = UpdateRule.sgd,
        servers: int | None = None,
        *,
        of_each: bool = False,
    ) -> None:
        import numpy as np

        its = model.communicator
        self._communicator = its
        self._rule = rule
        self._names: dict[DType, list[str]] = {}
        for name, array in model.parameters.items():
            self._names.setdefault(DType[array.dtype.name], []).append(name)
        self._servers: list[tuple[_engine.ParameterServer, list[str]]] = []
        self._count = servers or its.size
        self._of_each = of_each
        for dtype, names in self._names.items():
            count = sum(array.size for array in self._readable(model.parameters, names))
            count *= its.size if of_each else 1
            error: Error | MemoryError | None = None
            place = _FAILED
            try:
                name = f"parameters {its._count('parameters')} of {dtype.name}"
                goes_on = its._shared.connections is not None  # see `elastic.run`
                how = (dtype, count, rule, self._count, its._group, goes_on)
                server = _engine.ParameterServer(its._engine, name, *how)
                place = server.place()
            except (Error, MemoryError) as caught:  # the others must be notified
                error = caught
            places = its.allgather(np.array([place]), name=f"{model.key}.{dtype.name}").tolist()
            if error is not None:
                raise error
            if len(places) < its.size:
                raise UsageError(
                    "a rank has joined: make a step on all ranks before any rank calls join()"
                )
            if _FAILED in places:
                raise Error(f"rank {places.index(_FAILED)} has no memory for its parameters' shard")
            server.connect(places)
            self._servers.append((server, names))

    def fill(self, model: Model) -> None:
        """Make the shards what the parameters are here, and begin to count. Collective.

        Ranks that have joined are left out; the first of the others fills their shards.
        """
        import numpy as np

        its, name = self._communicator, f"{model.key}.fill"
        here = its.allgather(np.array([its.rank]), name=f"{name}, here").tolist()
        for server, names in self._servers:
            for member in range(self._count):
                if its.rank == (member if member in here else here[0]):
                    arrays = self._readable(model.parameters, names)
                    arrays *= its.size if self._of_each else 1
                    server.fill(arrays, member, its._timeout)
            for absent in {*range(its.size)} - {*here}:
                server.end_clock(absent)
        self.count(0)
        self.flush()
        its.barrier(name)

    def push(self, gradients: Mapping[str, Array], rate: float, member: int | None = None) -> None:
        """Change the shards by gradients, of all parameters.

        Raises:
            StallError: a rank that was stopped holds a part of the parameters.
            RankFailedError: one has ended that had a part, on another host.
        """
        for server, names in self._servers:
            how = Update(self._rule, rate, epsilon=_EPSILON[self._rule])
            arrays = self._readable(gradients, names)
            server.push(arrays, how, self._communicator._timeout, member)

    def fetch(self, into: Mapping[str, Array], member: int | None = None) -> None:
        """Write what the shards hold into arrays. Errors as `push`."""
        for server, names in self._servers:
            arrays = self._writable(into, names)
            server.fetch(arrays, self._communicator._timeout, member)
            _write_back(arrays, into, names)

    def pull(
        self, parameters: Mapping[str, Array], share: float, member: int | None = None
    ) -> None:
        """Move parameters here and in the shards towards one another. Errors as `push`."""
        for server, names in self._servers:
            arrays = self._writable(parameters, names)
            server.pull(arrays, share, self._communicator._timeout, member)
            _write_back(arrays, parameters, names)

    def count(self, clock: int | None) -> None:
        """Tell others how often this rank has pushed; None: it does not push any more."""
        for server, _ in self._servers[:1]:
            server.set_clock(clock)

    def flush(self) -> None:
        """Wait until others know."""
        for server, _ in self._servers[:1]:
            server.flush_clock(self._communicator._timeout)

    def wait_for(self, clock: int) -> None:
        """Until all ranks have pushed so often.

        Raises:
            StallError: some rank has not, within the timeout.
        """
        for server, _ in self._servers[:1]:
            if clock > 0:
                server.wait_for(clock, self._communicator._timeout)

    def _readable(self, arrays: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
        import numpy as np

        return self._filled_up([np.ascontiguousarray(arrays[name]) for name in names])

    def _writable(self, arrays: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
        import numpy as np

        return self._filled_up(
            [np.require(arrays[name], requirements=["C", "W"]) for name in names]
        )

    def _filled_up(self, arrays: list[Any]) -> list[Any]:
        """With zeros, to what a shard holds if it is a rank's own."""
        import numpy as np

        lack = -sum(each.size for each in arrays) % _engine.ParameterServer.MULTIPLE
        return [*arrays, np.zeros(lack, arrays[0].dtype)] if self._of_each and lack else arrays


def wait_for_trainers(model: Model, what: str) -> None:
    """Until all ranks are here, however long others train: this one serves meanwhile."""
    model.communicator.barrier(f"{model.key}.{what}", math.inf)


def _write_back(
    written: Sequence[Array], arrays: Mapping[str, Array], names: Sequence[str]
) -> None:
    for each, name in zip(written, names, strict=False):
        if each is not arrays[name]:
            arrays[name][...] = each.reshape(arrays[name].shape)
