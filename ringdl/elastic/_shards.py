"""Arrays of which each rank has a part: who keeps a copy for whom, and how they are cut anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from ringdl._communicator import Communicator
from ringdl._errors import Error
from ringdl._parts import split
from ringdl._safetensors import Array, Arrays

Kept: TypeAlias = dict[int, Arrays]
"""A rank's parts at one commit, and those of the ranks whose copies it keeps, by their numbers."""


def ring(hosts: Sequence[int]) -> list[int]:
    """The ranks in an order in which neighbours are on different hosts as far as possible.

    That is the first rank of each host, then the second of each, and so on.

    Args:
        hosts: the number of each rank's host.
    """
    seen: defaultdict[int, int] = defaultdict(int)
    places = []
    for rank, host in enumerate(hosts):
        places.append((seen[host], host, rank))
        seen[host] += 1
    return [rank for _, _, rank in sorted(places)]


def keep(parts: Mapping[str, Array], copies: int, ranks: Communicator) -> Kept:
    """Copy this rank's parts, here and to those that follow it in the `ring`. Collective.

    Args:
        parts: this rank's.
        copies: how many others get them.
        ranks: all of them.
    """
    order = ring(ranks._hosts())
    place = order.index(ranks.rank)
    copies = min(copies, ranks.size - 1)
    others = {order[(place - distance) % ranks.size]: Arrays() for distance in range(1, copies + 1)}
    own = {name: np.array(parts[name]) for name in sorted(parts)}  # the same order on all
    for name, part in own.items() if copies else ():
        splits = [0] * ranks.size
        for distance in range(1, copies + 1):
            splits[order[(place + distance) % ranks.size]] = len(part)
        sent = np.concatenate([part] * copies)
        got, lengths = ranks.alltoall(sent, splits, f"ringdl.elastic.keep.{name}")
        ends = np.cumsum(lengths)
        for rank, arrays in others.items():
            arrays[name] = got[ends[rank] - lengths[rank] : ends[rank]]
    return {ranks.rank: own} | others


def cut_anew(
    kept: Kept,
    former: Sequence[tuple[int, int] | None],
    ranks: Communicator,
) -> Arrays | None:
    """Give each rank its part of the whole again. Collective over the ranks that there are now.

    The parts of all ranks, in their order, are the whole; it is cut along axis 0 as a
    reducescatter cuts: earlier ranks take the remainder.

    Args:
        kept: at the commit; nothing on ranks that have joined since.
        former: the number that each of the ranks had then, and how many there were; None of ranks
            that have joined since.
        ranks: all of them.

    Returns:
        The new parts of this rank; None on every rank if there are none.

    Raises:
        Error: on every rank: the parts of some rank are lost with those that kept their copies.
    """
    tables = ranks.allgather_object(
        {
            number: {name: (len(part), part[:0]) for name, part in parts.items()}
            for number, parts in kept.items()
        },
        name="ringdl.elastic.parts",
    )
    if not any(tables):
        return None
    numbers = [None if each is None else each[0] for each in former]
    (size,) = {each[1] for each in former if each is not None}
    holder: dict[int, int] = {}
    for number in range(size):
        holding = [rank for rank, table in enumerate(tables) if number in table]
        if not holding:
            raise Error(
                f"what rank {number} has kept in `own` is lost: it has failed, and so have all "
                "that kept a copy; start again from a checkpoint, and make the state with more "
                "copies"
            )
        holder[number] = numbers.index(number) if number in numbers else holding[0]
    mine = [number for number in range(size) if holder[number] == ranks.rank]
    described = [tables[holder[number]][number] for number in range(size)]
    return {
        name: _exchange(
            name,
            [none, *(kept[number][name] for number in mine)],
            [each[name][0] for each in described],
            [holder[number] for number in range(size)],
            ranks,
        )
        for name, (_, none) in described[0].items()
    }


def _exchange(
    name: str,
    parts: Sequence[Array],
    lengths: Sequence[int],
    holders: Sequence[int],
    ranks: Communicator,
) -> Array:
    """Rows to those that they belong to now.

    Args:
        name: of the array.
        parts: no rows, and those that this rank holds, in their order.
        lengths: of all parts.
        holders: of all parts.
        ranks: all of them.
    """
    begins = [sum(lengths[:part]) for part in range(len(lengths))]

    def common(part: int, rank: int) -> range:
        """Those rows of the whole that a part has and a rank gets."""
        begin, count = split(sum(lengths), ranks.size, rank)
        first = max(begins[part], begin)
        return range(first, max(first, min(begins[part] + lengths[part], begin + count)))

    held = [part for part, holder in enumerate(holders) if holder == ranks.rank]
    none, *parts = parts
    sent, splits = [none], []
    for rank in range(ranks.size):
        takes = [common(part, rank) for part in held]
        splits.append(sum(map(len, takes)))
        for part, own, take in zip(held, parts, takes, strict=True):
            sent.append(own[take.start - begins[part] : take.stop - begins[part]])
    got, _ = ranks.alltoall(np.concatenate(sent), splits, f"ringdl.elastic.cut.{name}")
    first_row, count = split(sum(lengths), ranks.size, ranks.rank)
    result = np.empty((count, *got.shape[1:]), got.dtype)
    at = 0
    for rank in range(ranks.size):
        for part in (part for part, holder in enumerate(holders) if holder == rank):
            rows = common(part, ranks.rank)
            first = rows.start - first_row
            result[first : first + len(rows)] = got[at : at + len(rows)]
            at += len(rows)
    return result
