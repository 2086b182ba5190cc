"""``python -m ringdl diagnose DIR``: which rank diverged first, by the flight records of all.

A *use* is one work as all its ranks see it: they have the same key and instance. All members of a
use begin it, and mean the same by it, unless ranks have parted: the first use for which that does
not hold is where. What is said of it follows from who has begun it, and from what the others have
begun since.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringdl import _engine
from ringdl._doctor import name_ranks
from ringdl._errors import UsageError
from ringdl._mpirun import LaunchError

_TERMS = ("kind", "dtype", "reduction", "memory", "shape", "root")
"""What all members of a use mean alike; algorithms of calls that meet in slots are not recorded."""

_SEEN_SECONDS = 2.0
"""A rank that was alive for so much less long than another has ended, or was stopped, before it:
engines are polled ten times a second, and one that no thread polls whenever something is called."""

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
    reduction: str
    memory: str
    algorithm: str
    shape: str
    root: int
    ranks: list[int] | None
    begin: float
    end: float | None
    waited_since: float | None
    why: str | None

    @property
    def terms(self) -> dict[str, object]:
        """What other members of the use have to mean, too."""
        found = {name: getattr(self, name) for name in _TERMS}
        if self.kind == "allreduce":
            del found["root"]
        return found


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
    has_shut_down: bool
    why: str | None
    begun: int
    works: list[Work]

    @property
    def has_dropped(self) -> bool:
        """Whether its first works are not there any more."""
        return self.begun > len(self.works)

    def has_begun(self, use: Use) -> bool:
        """Whether it has begun its part; yes, if that is so long ago that the record is silent."""
        for work in self.works:
            if work.key == use.key and work.instance >= use.instance:
                return True
        return self.has_dropped and (
            not self.works or self.works[0].begin > use.begin + _CLOCKS_SECONDS
        )


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
    def begin(self) -> float:
        """When the first rank has begun it."""
        return min(work.begin for work in self.works.values())

    @property
    def first(self) -> Work:
        """That rank's."""
        return min(self.works.values(), key=lambda work: work.begin)

    @property
    def label(self) -> str:
        """How errors name it."""
        return self.first.label

    def members(self, size: int) -> Iterable[int]:
        """The ranks that it is for."""
        ranks = self.first.ranks
        return range(size) if ranks is None else ranks

    def has_ended_well(self) -> bool:
        """On each rank that has begun it."""
        return all(work.end is not None and work.why is None for work in self.works.values())


@dataclass(frozen=True)
class Finding:
    """What the records say.

    Attributes:
        text: one paragraph.
        is_wrong: whether ranks have parted, something has failed, or does not end.
    """

    text: str
    is_wrong: bool


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit code: 1 if something is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ringdl diagnose",
        description="Say which rank diverged first, by what RINGDL_FLIGHT_RECORDER has recorded, "
        "also while the job runs or hangs.",
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="that directory, for the newest job in it, or one job's folder in it",
    )
    folder = find_job(parser.parse_args(arguments).directory)
    print(f"ringdl: {folder}")
    found = diagnose(read(folder))
    print(found.text)
    return 1 if found.is_wrong else 0


def find_job(directory: Path) -> Path:
    """The folder of the newest job, or the directory itself if it is a job's."""
    folders = [directory, *(path for path in sorted(directory.glob("*"), reverse=True))]
    for folder in folders:
        if any(folder.glob("rank*.flight")):
            return folder
    raise LaunchError(
        f"there is no flight record in {directory}: start the job with RINGDL_FLIGHT_RECORDER="
        f"{directory}, which must be the same directory on all hosts"
    )


def read(folder: Path) -> list[Record]:
    """All records of a job, by rank."""
    records = []
    for path in folder.glob("rank*.flight"):
        try:
            found: dict[str, Any] = json.loads(_engine.read_flight_record(path.read_bytes()))
        except UsageError as error:
            raise LaunchError(f"{path} cannot be read: {error}") from error
        works = [Work(**work) for work in found.pop("works")]
        records.append(Record(works=works, **found))
    return sorted(records, key=lambda record: record.rank)


def diagnose(records: Sequence[Record]) -> Finding:
    """Find where ranks have parted first.

    Args:
        records: of the same job, at least one.
    """
    return _Diagnosis(records).find()


class _Diagnosis:
    def __init__(self, records: Sequence[Record]) -> None:
        self.records = {record.rank: record for record in records}
        self.size = records[0].size
        self.last_seen = max(record.seen for record in records)
        self.lost = [rank for rank in range(self.size) if rank not in self.records]
        uses: dict[tuple[str, int], dict[int, Work]] = {}
        for record in records:
            for work in record.works:
                uses.setdefault((work.key, work.instance), {})[record.rank] = work
        self.uses = [Use(*key, works) for key, works in uses.items()]
        self.uses.sort(key=lambda use: use.begin)

    def find(self) -> Finding:
        for use in self.uses:
            if self.differences(use):
                return Finding(self.disagreement(use), True)
            if self.absent(use) and not use.has_ended_well():
                return Finding(self.parting(use), True)
        troubles = [f"Rank {rank} ended by {record.why}." for rank, record in self.ended_by_error()]
        stuck = [use for use in self.uses if not use.has_ended_well()]
        if stuck:
            return Finding(" ".join([self.standstill(stuck[0]), *troubles]), True)
        text = f"No rank diverged: what any of {name_ranks(list(self.records))} has begun, "
        text += f"{self.count_of_works()}, all of its ranks have, and it has ended well."
        if self.lost:
            text += f" There is no record of {name_ranks(self.lost)}."
        return Finding(" ".join([text, *troubles]), bool(troubles or self.lost))

    def absent(self, use: Use) -> list[int]:
        """The members that are not known to have begun it."""
        return [
            rank
            for rank in use.members(self.size)
            if rank not in use.works
            and (rank in self.lost or not self.records[rank].has_begun(use))
        ]

    def differences(self, use: Use) -> list[str]:
        """In what its members disagree."""
        return [
            name
            for name in use.first.terms
            if len({work.terms.get(name) for work in use.works.values()}) > 1
        ]

    def disagreement(self, use: Use) -> str:
        name = self.differences(use)[0]
        groups: dict[object, list[int]] = {}
        for rank, work in sorted(use.works.items()):
            groups.setdefault(work.terms.get(name), []).append(rank)
        sides = sorted(groups.items(), key=lambda side: len(side[1]))
        who = self.whose_fault(sides[0][1], sides[-1][1])
        means = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in sides)
        text = f"{who}: {use.label}, begun at {self.clock(use.begin)}, has {name} {means}."
        return text + self.consequence(use)

    def parting(self, use: Use) -> str:
        """Some ranks have begun it, and others have not."""
        present, absent = sorted(use.works), self.absent(use)
        elsewhere = {rank: other for rank in absent if (other := self.instead(rank, use))}
        alone = bool(elsewhere) and len(present) < len(absent)
        who = self.whose_fault(present, absent) if alone else self.whose_fault(absent, present)
        text = f"{who}: at {self.clock(use.begin)} {name_ranks(present)} began "
        text += f"{self.describe(use)}, which {name_ranks(absent)} did not."
        groups: dict[str, list[int]] = {}
        for rank in absent:
            groups.setdefault(self.state(rank, elsewhere.get(rank)), []).append(rank)
        for state, ranks in groups.items():
            text += f" {name_ranks(ranks).capitalize()} {state}."
        return text + self.consequence(use)

    def instead(self, rank: int, use: Use) -> Work | None:
        """What it has begun since others began the use, if anything."""
        record = self.records.get(rank)
        if record is None:
            return None
        later = [work for work in record.works if work.begin >= use.begin]
        return later[0] if later else None

    def state(self, rank: int, instead: Work | None) -> str:
        """What one that has not begun a use does."""
        if rank in self.lost:
            return "left no record"
        record = self.records[rank]
        parts = []
        if instead is not None:
            parts.append(f"began {instead.label} instead")
        if record.why is not None:
            parts.append(f"ended by {record.why}")
        elif record.has_shut_down:
            parts.append("has shut down")
        elif self.last_seen - record.seen > _SEEN_SECONDS:
            parts.append(
                f"was seen last at {self.clock(record.seen)}, "
                f"{self.last_seen - record.seen:.1f} s before the others: it was killed or stopped"
            )
        elif instead is None:
            last = max(record.works, key=lambda work: work.begin, default=None)
            waits = [work for work in record.works if work.waited_since is not None]
            if waits:
                parts.append(f"waits for {waits[0].label}")
            elif last is None:
                parts.append("has begun nothing")
            else:
                since = self.last_seen - (last.end or last.begin)
                what = "ended" if last.end is not None else "has not ended"
                parts.append(
                    f"began {last.label} last, which {what}, and has called nothing for "
                    f"{since:.1f} s"
                )
        return " and ".join(parts)

    def standstill(self, use: Use) -> str:
        """All its ranks have begun it; it has failed, or does not end."""
        text = f"No rank diverged: all its ranks began {self.describe(use)}, the first at "
        text += f"{self.clock(use.begin)}, the last {self.lateness(use)}."
        unseen = [
            rank
            for rank, record in self.records.items()
            if self.last_seen - record.seen > _SEEN_SECONDS
        ]
        for rank in unseen:
            text += f" Rank {rank} {self.state(rank, None)}."
        open_ = sorted(rank for rank, work in use.works.items() if work.end is None)
        if open_:
            text += f" It has not ended on {name_ranks(open_)}."
        return text + self.consequence(use)

    def lateness(self, use: Use) -> str:
        rank, work = max(use.works.items(), key=lambda item: item[1].begin)
        return f"(rank {rank}) {work.begin - use.begin:.1f} s after it"

    def consequence(self, use: Use) -> str:
        """What followed, for those that have begun it."""
        waits = sorted(rank for rank, work in use.works.items() if work.waited_since is not None)
        text = ""
        if waits:
            since = min(use.works[rank].waited_since or 0.0 for rank in waits)
            text = f" It has been waited for on {name_ranks(waits)} since {self.clock(since)}."
        failures: dict[str, list[int]] = {}
        for rank, work in sorted(use.works.items()):
            if work.why is not None:
                failures.setdefault(work.why, []).append(rank)
        for why, ranks in list(failures.items())[:2]:
            text += f" On {name_ranks(ranks)} it failed: {why.rstrip('.')}."
        return text

    def describe(self, use: Use) -> str:
        work = use.first
        if work.kind == "barrier":
            return work.label
        return f"{work.label} ({work.dtype}, shape {work.shape})"

    def ended_by_error(self) -> list[tuple[int, Record]]:
        return [(rank, record) for rank, record in self.records.items() if record.why is not None]

    def count_of_works(self) -> str:
        return f"{max(record.begun for record in self.records.values())} works"

    @staticmethod
    def whose_fault(fewer: Sequence[int], more: Sequence[int]) -> str:
        """Who diverged: the smaller side, or, of equal ones, nobody alone."""
        if len(fewer) < len(more):
            return f"{name_ranks(fewer).capitalize()} diverged first"
        return f"{name_ranks(sorted([*fewer, *more])).capitalize()} parted first"

    @staticmethod
    def clock(seconds: float) -> str:
        """The time of day, here."""
        whole, part = divmod(seconds, 1)
        return f"{time.strftime('%H:%M:%S', time.localtime(whole))}.{int(part * 1000):03}"
