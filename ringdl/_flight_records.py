"""The flight records of a job's ranks, read from their files, and the works that they share.

A *use* is one work as all its ranks see it: they have the same key and instance.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ringdl import _engine
from ringdl._mpirun import LaunchError

_TERMS = ("kind", "dtype", "compression", "reduction", "memory", "shape", "root")
"""What all members of a use mean alike."""

_SYMMETRIC = ("allreduce", "allgather", "barrier", "reducescatter", "alltoall")
"""No rank ends these before all have begun them."""

_CLOCKS_SECONDS = 1.0
"""By how much the clocks of hosts may differ."""


@dataclass(frozen=True)
class Work:
    """One work of one rank; times in seconds since 1970, or None: not (yet)."""

    number: int
    key: str
    instance: int
    label: str
    kind: str
    dtype: str
    compression: str
    reduction: str
    memory: str
    shape: str
    root: int
    ranks: list[int] | None  # all; []: not known
    begin: float
    end: float | None
    waited_since: float | None
    why: str | None

    @property
    def use(self) -> tuple[str, int]:
        """What other ranks' are matched by."""
        return self.key, self.instance

    @property
    def name(self) -> str:
        """With the number of its use, where that is no part of the label."""
        space, again = self.key.partition(".")[0], self.instance > 0
        return f"{self.label} (use {self.instance + 1})" if again and space != "1" else self.label


@dataclass(frozen=True)
class Record:
    """What one rank has left; see `FlightRecorder::json_of` in csrc/engine/flight_recorder.h."""

    rank: int
    size: int
    process: int
    host: str
    version: str
    begin: float
    seen: float
    has_thread: bool
    state: str
    why: str | None
    begun: int
    overwritten: int
    works: list[Work]

    @cached_property
    def uses(self) -> set[tuple[str, int]]:
        """What it has begun."""
        return {work.use for work in self.works}

    @cached_property
    def latest(self) -> dict[str, int]:
        """The last instance of each key."""
        latest: dict[str, int] = {}
        for work in self.works:
            latest[work.key] = max(work.instance, latest.get(work.key, 0))
        return latest

    @cached_property
    def reaches_back_to(self) -> float:
        """All works that it has begun since then are there."""
        expected, first = self.begun, self.seen
        for work in reversed(self.works):
            if work.number == expected:
                expected, first = expected - 1, work.begin
        return first if expected > 0 else 0.0

    def has_begun(self, use: Use) -> bool | None:
        """Whether it has begun its part; None: its record does not reach back so far."""
        if self.latest.get(use.key, -1) >= use.instance:
            return True
        if self.overwritten > 0:
            return None
        first = use.begin - _CLOCKS_SECONDS
        if use.first.kind in _SYMMETRIC:
            # It would have been in flight here, too, until then, and such works keep their place.
            first = max(self.seen if work.end is None else work.end for work in use.works.values())
        return None if self.reaches_back_to > first else False


@dataclass(frozen=True)
class Use:
    """One work as its members have begun it.

    Attributes:
        key, instance: what they match it by.
        works: by rank.
    """

    key: str
    instance: int
    works: dict[int, Work]

    @property
    def first(self) -> Work:
        """Of the rank that has begun it first."""
        return min(self.works.values(), key=lambda work: work.begin)

    @property
    def begin(self) -> float:
        """When that was."""
        return self.first.begin

    @property
    def name(self) -> str:
        """How it is told of."""
        return self.first.name

    @property
    def is_in_flight(self) -> bool:
        """On some rank."""
        return any(work.end is None for work in self.works.values())

    @property
    def has_failed(self) -> bool:
        """On some rank."""
        return any(work.why is not None for work in self.works.values())

    def members(self, size: int) -> Iterable[int]:
        """The ranks that it is for, as far as is known."""
        if self.first.ranks is None:
            return range(size)
        return self.first.ranks or self.works

    def difference(self) -> str | None:
        """In what its members disagree."""
        for term in _TERMS:
            is_digest = term == "root" and self.first.kind == "allreduce"
            if not is_digest and len({getattr(work, term) for work in self.works.values()}) > 1:
                return term
        return None


def find_jobs(directory: Path) -> list[Path]:
    """The folders of jobs in a directory, the newest first, or the directory if it is one."""
    folders = [directory, *sorted((p for p in directory.glob("*") if p.is_dir()), reverse=True)]
    found = [folder for folder in folders if any(folder.glob("rank*.flight"))]
    if not found:
        raise LaunchError(
            f"there is no flight record in {directory}: start the job with RINGDL_FLIGHT_RECORDER="
            f"{directory}, which must be the same directory on all hosts"
        )
    return found


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """The records of a job, by rank, and which files cannot be read, and why."""
    records, problems = [], []
    for path in sorted(folder.glob("rank*.flight")):
        try:
            found: dict[str, Any] = json.loads(_engine.read_flight_record(path.read_bytes()))
            works = [Work(**work) for work in found.pop("works")]
        except (OSError, ValueError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        records.append(Record(works=works, **found))
    if not records:
        raise LaunchError("; ".join(problems))
    return sorted(records, key=lambda record: record.rank), problems
