"""A model's parameters in shards that ranks push to and fetch from, by themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringdl import _engine
from ringdl._engine import DType, Update, UpdateRule
from ringdl.policies._policy import Array, Model

_EPSILON = {UpdateRule.sgd: 0.0, UpdateRule.adagrad: 1e-10, UpdateRule.adam: 1e-8}
"""As PyTorch has them."""


class Shards:
    """The parameters of a model, as the ranks know them together. Collective.

    Args:
        model: whose; all ranks have the same parameters now.
        rule: how pushed gradients change them.
        servers: how many ranks have shards in their memory.

    Raises:
        UsageError: on all ranks: they are on several hosts, or a parameter has 16 bits.
    """

    def __init__(
        self, model: Model, rule: UpdateRule = UpdateRule.sgd, servers: int | None = None
    ) -> None:
        import numpy as np

        its = model.communicator
        self._communicator = its
        self._rule = rule
        self._names: dict[DType, list[str]] = {}
        for name, array in model.parameters.items():
            self._names.setdefault(DType[array.dtype.name], []).append(name)
        self._servers: list[tuple[_engine.ParameterServer, list[str]]] = []
        for dtype, names in self._names.items():
            count = sum(model.parameters[name].size for name in names)
            server = _engine.ParameterServer(
                its._engine, dtype, count, rule, servers or its.size, its._group
            )
            places = its.allgather(np.array([server.place()]), name=f"{model.key}.{dtype.name}")
            server.connect(places.tolist())
            self._servers.append((server, names))
        self.fill(model)

    def fill(self, model: Model) -> None:
        """Make the shards what the parameters are here, and begin to count. Collective."""
        its, name = self._communicator, f"{model.key}.fill"
        its.barrier(name)  # nobody pushes any more
        for server, names in self._servers:
            server.fill(_contiguous(model.parameters, names))
            server.set_clock(0)
        its.barrier(name)

    def push(self, gradients: Mapping[str, Array], rate: float) -> None:
        """Change the shards by gradients, of all parameters.

        Raises:
            StallError: a rank that was stopped holds a part of the parameters.
        """
        for server, names in self._servers:
            how = Update(self._rule, rate, epsilon=_EPSILON[self._rule])
            server.push(_contiguous(gradients, names), how, self._communicator._timeout)

    def fetch(self, into: Mapping[str, Array]) -> None:
        """Write what the shards hold into arrays. Errors as `push`."""
        for server, names in self._servers:
            arrays = _contiguous(into, names)
            server.fetch(arrays, self._communicator._timeout)
            _write_back(arrays, into, names)

    def pull(self, parameters: Mapping[str, Array], share: float) -> None:
        """Move parameters here and in the shards towards one another. Errors as `push`."""
        for server, names in self._servers:
            arrays = _contiguous(parameters, names)
            server.pull(arrays, share, self._communicator._timeout)
            _write_back(arrays, parameters, names)

    def count(self, clock: int | None) -> None:
        """Tell others how often this rank has pushed; None: it does not push any more."""
        server, _ = self._servers[0]
        if clock is None:
            server.end_clock()
        else:
            server.set_clock(clock)

    def wait_for(self, clock: int) -> None:
        """Until all ranks have pushed so often.

        Raises:
            StallError: some rank has not, within the timeout.
        """
        server, _ = self._servers[0]
        if clock > 0:
            server.wait_for(clock, self._communicator._timeout)


def _contiguous(arrays: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
    import numpy as np

    return [np.ascontiguousarray(arrays[name]) for name in names]


def _write_back(
    written: Sequence[Array], arrays: Mapping[str, Array], names: Sequence[str]
) -> None:
    for each, name in zip(written, names, strict=True):
        if each is not arrays[name]:
            arrays[name][...] = each.reshape(arrays[name].shape)
