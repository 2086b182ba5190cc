"""Ranks in a grid: an axis for each way of cutting what they train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ringdl._errors import MismatchError, UsageError
from ringdl._numbers import is_count
from ringdl._startup import get_communicator

if TYPE_CHECKING:
    from ringdl._communicator import Communicator


class Place(NamedTuple):
    """Where a rank is in a grid: its number along each axis."""

    data: int
    pipeline: int
    model: int


class Grid:
    """All ranks of a communicator, in a grid of three axes. Collective.

    ```
    data      ranks that differ in this alone hold the same parameters, and train on other data
    pipeline  the network's layers are cut into stages, one after the other
    model     each layer is cut
    ```

    Ranks along ``model`` talk most, in each layer, and along ``data`` in each step; so those along
    ``model`` are on one host, as far as its ranks allow, and those along ``data`` are next.

    Args:
        data: how many ranks train on different data; by default as many as are left by the others.
        pipeline: how many stages the network is cut into.
        model: over how many ranks each layer is cut.
        communicator: the ranks; by default all.

    Raises:
        UsageError: the axes' product is not the number of ranks.
        MismatchError: ranks have passed different axes; on all of them.
    """

    def __init__(
        self,
        data: int | None = None,
        pipeline: int = 1,
        model: int = 1,
        *,
        communicator: Communicator | None = None,
    ) -> None:
        its = get_communicator() if communicator is None else communicator
        told = its.allgather_object((data, pipeline, model), "ringdl.grid")
        if len(told) < its.size:
            raise UsageError("Grid: a rank has joined; make it before any rank calls join()")
        for rank, other in enumerate(told):
            if other != told[0]:
                raise MismatchError(
                    f"ranks make different grids: (data, pipeline, model) is {told[0]} on rank 0 "
                    f"and {other} on rank {rank}. Pass the same on all ranks"
                )
        self.shape = shape_for(its.size, data, pipeline, model)
        self._hosts = its.memory_hosts()
        self._places = place_ranks(self._hosts, self.shape)
        self.communicator = its
        self.place = self._places[its.rank]
        """This rank's."""
        self.data = self._along("data")
        """The ranks that train on other data, as a communicator; so below."""
        self.pipeline = self._along("pipeline")
        """The ranks of the other stages, in their order."""
        self.model = self._along("model")
        """The ranks that have the other parts of this rank's layers."""

    def place_of(self, rank: int) -> Place:
        """Where a rank is."""
        return self._places[rank]

    def rank_at(self, data: int = 0, pipeline: int = 0, model: int = 0) -> int:
        """The rank at a place.

        Raises:
            UsageError: there is none.
        """
        place = Place(data, pipeline, model)
        if place not in self._places:
            raise UsageError(f"there is no {place} in a grid of {self.shape}")
        return self._places.index(place)

    def _along(self, axis: str) -> Communicator:
        others = [(getattr(place, axis), rank) for rank, place in enumerate(self._places)]
        members = [
            rank
            for _, rank in sorted(others)
            if self._places[rank]._replace(**{axis: 0}) == self.place._replace(**{axis: 0})
        ]
        made = self.communicator.group(members)
        assert made is not None
        return made

    def __str__(self) -> str:
        return describe(self._hosts, self.shape)

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{axis}={n}' for axis, n in self.shape._asdict().items())})"


def shape_for(size: int, data: Any, pipeline: Any, model: Any) -> Place:
    """The axes' lengths.

    Raises:
        UsageError: they are none, or are not those of so many ranks.
    """
    for axis, length in (("data", data), ("pipeline", pipeline), ("model", model)):
        if axis == "data" and length is None:
            continue
        if not is_count(length):
            raise UsageError(f"{axis} is {length!r}; pass a number of ranks, at least 1")
    if data is None and size % (pipeline * model) == 0:
        data = size // (pipeline * model)
    if data is None or data * pipeline * model != size:
        product = f"{'data' if data is None else data} x {pipeline} x {model}"
        raise UsageError(
            f"a grid of data x pipeline x model = {product} is not one of {size} ranks; start as "
            "many as the product, or change an axis"
        )
    return Place(data, pipeline, model)


def place_ranks(hosts: Sequence[int], shape: Place) -> list[Place]:
    """Where each rank is. Pure.

    Each host's ranks are cut into groups along ``model``; those that are left over on several
    hosts are put together. Groups that follow one another differ in ``data``.

    Args:
        hosts: the number of each rank's host.
        shape: the axes' lengths; their product is the number of ranks.
    """
    groups: list[list[int]] = []
    left: list[int] = []
    for host in dict.fromkeys(hosts):
        here = [rank for rank, its in enumerate(hosts) if its == host]
        whole = len(here) // shape.model * shape.model
        groups += [here[i : i + shape.model] for i in range(0, whole, shape.model)]
        left += here[whole:]
    groups += [left[i : i + shape.model] for i in range(0, len(left), shape.model)]
    places: dict[int, Place] = {}
    for number, group in enumerate(groups):
        pipeline, data = divmod(number, shape.data)
        for model, rank in enumerate(group):
            places[rank] = Place(data, pipeline, model)
    return [places[rank] for rank in range(len(hosts))]


def describe(hosts: Sequence[int], shape: Place) -> str:
    """A grid in lines of text: which ranks are in it where, and which axes leave a host."""
    places = place_ranks(hosts, shape)
    ranks = {place: rank for rank, place in enumerate(places)}
    width = len(str(len(hosts) - 1))
    lines = []
    for pipeline in range(shape.pipeline):
        row = []
        for data in range(shape.data):
            group = [ranks[Place(data, pipeline, model)] for model in range(shape.model)]
            row.append(" ".join(f"{rank:{width}}" for rank in group))
        lines.append(f"stage {pipeline}: {' | '.join(row)}")
    crossing = [axis for axis in Place._fields if _leaves_hosts(hosts, places, axis)]
    axes = f"data {shape.data} ( | ), pipeline {shape.pipeline} (lines), model {shape.model}"
    lines.insert(0, f"{axes}; between hosts: {', '.join(crossing) or 'nothing'}")
    return "\n".join(lines)


def _leaves_hosts(hosts: Sequence[int], places: Sequence[Place], axis: str) -> bool:
    its_hosts: dict[Place, set[int]] = {}
    for host, place in zip(hosts, places, strict=True):
        its_hosts.setdefault(place._replace(**{axis: 0}), set()).add(host)
    return any(len(each) > 1 for each in its_hosts.values())
