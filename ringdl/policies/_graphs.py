"""Who sends to whom, and how much: pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ringdl._errors import UsageError

Topology: TypeAlias = "str | Mapping[int, Iterable[int]]"
Graph: TypeAlias = list[list[int]]
"""For each rank, those that it sends to."""


def checked(topology: Topology) -> Topology:
    """The topology, a graph in one order: two that are equal look alike.

    Raises:
        UsageError: it is none.
    """
    if isinstance(topology, str):
        if topology not in ("ring", "exponential"):
            raise UsageError(f"topology is {topology!r}; pass 'ring', 'exponential', or a graph")
        return topology
    if not isinstance(topology, Mapping):
        raise UsageError(
            f"topology is {topology!r}; a graph is a dictionary: for each rank those that it sends "
            "to, as {0: [1], 1: [0]}"
        )
    return {rank: sorted(others) for rank, others in sorted(topology.items())}


def graphs_of(topology: Topology, size: int) -> list[Graph]:
    """The graphs that steps use by turns.

    Args:
        topology: "ring", "exponential", or for each rank those that it sends to.
        size: the number of ranks.

    Raises:
        UsageError: it is no graph of these ranks, or does not connect them.
    """
    if topology == "ring":
        return [[sorted({(r - 1) % size, (r + 1) % size} - {r}) for r in range(size)]]
    if topology == "exponential":
        turns = max(1, (size - 1).bit_length())
        return [
            [sorted({(r + (1 << turn)) % size} - {r}) for r in range(size)] for turn in range(turns)
        ]
    assert not isinstance(topology, str)
    graph = {rank: sorted(set(others) - {rank}) for rank, others in topology.items()}
    named = {*graph, *(other for others in graph.values() for other in others)}
    if named != set(range(size)) or len(graph) < size:
        raise UsageError(
            f"the graph {graph} is not one of {size} ranks; for each of the ranks 0 to {size - 1} "
            "name those that it sends to"
        )
    listed = [graph[rank] for rank in range(size)]
    backwards = [[rank for rank in range(size) if r in listed[rank]] for r in range(size)]
    if len(_reached(listed)) < size or len(_reached(backwards)) < size:
        raise UsageError(
            f"the graph {graph} is not strongly connected: some ranks never hear of others"
        )
    return [listed]


def _reached(graph: Graph) -> set[int]:
    """From rank 0."""
    found, new = {0}, [0]
    while new:
        new = [other for rank in new for other in graph[rank] if other not in found]
        found |= {*new}
    return found


def shares_of(graph: Graph, mixing: float | None) -> list[list[float]]:
    """A row for each rank: which part of each rank's parameters it gets. Columns add up to 1.

    Args:
        graph: who sends to whom.
        mixing: what a rank gives away; by default it keeps as much as each of the others gets.
    """
    size = len(graph)
    rows = [[0.0] * size for _ in range(size)]
    for source, others in enumerate(graph):
        away = len(others) / (len(others) + 1) if mixing is None else mixing
        rows[source][source] = 1 - away if others else 1.0
        for other in others:
            rows[other][source] = away / len(others)
    return rows


def is_even(rows: Sequence[Sequence[float]]) -> bool:
    """Whether each rank gets as much as it gives away."""
    return all(abs(sum(row) - 1) < 1e-12 for row in rows)
