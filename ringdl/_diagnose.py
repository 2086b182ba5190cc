"""``python -m ringdl diagnose DIR``: which rank diverged first, by the flight records of all.

All members of a use begin it, sooner or later, and mean the same by it. Ranks have *parted* if they
mean something else, if one that has not begun it has gone another way, has ended, or comes too
late. What others have begun meanwhile tells which of these it is; when, does not, as some ranks are
ahead.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringdl._doctor import name_ranks
from ringdl._flight_records import Record, Use, Work, find_jobs, read

_JOIN = "'ringdl.join'"
"""In the label of what a rank waits for that has joined: any rank may be late for it."""

_KILLED = re.compile(r"\brank (\d+) has ended without shutdown\(\)")
"""What the others' errors say of it."""

_LATE_SECONDS = 5.0
"""A rank that others have waited for so long is worth a word, whatever it does."""

_SEEN_SECONDS = 2.0
"""A rank that was alive for so much less long than another has ended, or was stopped, before it:
where a thread polls the engine, it does so ten times a second."""

_RUNNING_SECONDS = 60.0
"""A job of which no rank was seen for so long has ended."""

_LOOK_SECONDS = 0.5
"""Between two looks at one that may be running."""

_SHARED_SECONDS = 35.0
"""So much older may be what is read of other hosts' files where a file system of hosts has them:
the kernel writes mapped pages there every half minute."""

_SHARED_TYPES = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "fuse",
    "9p",
    "afs",
    "pan",
)
"""How the types of such file systems begin."""

_MOST_TOLD = 3
"""Errors and failures that are told one by one."""


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
    """The command; returns its exit code: 1 if something is wrong, 2 if there is no record."""
    parser = argparse.ArgumentParser(
        prog="python -m ringdl diagnose",
        description="Say which rank diverged first, by what RINGDL_FLIGHT_RECORDER has recorded, "
        "also while the job runs or hangs. The exit code is 1 if something is wrong.",
    )
    parser.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="that directory, for the newest job in it, or one job's folder in it",
    )
    found = find_jobs(parser.parse_args(arguments).directory)
    print(f"ringdl: {found[0]}")
    if len(found) > 1:
        print(f"ringdl: the job, or the part of an elastic job, before it: {found[1]}")
    records, problems = read(found[0])
    lag = _lag(found[0])
    is_running = any(
        record.state == "running" and time.time() - record.seen < lag for record in records
    )
    if not is_running and any(time.time() - record.seen < _RUNNING_SECONDS for record in records):
        seen = max(record.seen for record in records)
        time.sleep(_LOOK_SECONDS)
        records, problems = read(found[0])
        is_running = any(
            record.state == "running" and (record.seen > seen or not record.has_thread)
            for record in records
        )
    for problem in problems:
        print(f"ringdl: {problem}")
    finding = diagnose(records, is_running, lag)
    print(finding.text)
    return 1 if finding.is_wrong else 0


def _lag(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> float:
    """By how many seconds what is read there may be older than what was written."""
    whole, types = str(folder.resolve()), {"/": ""}
    for line in mounts.read_text().splitlines():
        _, point, kind, *_ = line.split()
        types[point.replace("\\040", " ")] = kind
    holding = [p for p in types if whole == p or whole.startswith(p.rstrip("/") + "/")]
    return _SHARED_SECONDS if types[max(holding, key=len)].startswith(_SHARED_TYPES) else 0.0


def diagnose(records: Sequence[Record], is_running: bool = False, lag: float = 0.0) -> Finding:
    """Find where ranks have parted first.

    Args:
        records: of the same job, at least one.
        is_running: whether some rank is alive, so that it may be merely late.
        lag: by how many seconds some records may be older than others.
    """
    finding = _Diagnosis(records, is_running, lag).find()
    return Finding(" ".join(finding.text.split()), finding.is_wrong)


class _Diagnosis:
    def __init__(self, records: Sequence[Record], is_running: bool, lag: float) -> None:
        self.records = {record.rank: record for record in records}
        self.size = records[0].size
        self.last_seen = max(record.seen for record in records)
        self.is_running = is_running
        self.late_seconds, self.seen_seconds = _LATE_SECONDS + lag, _SEEN_SECONDS + lag
        self.lost = [rank for rank in range(self.size) if rank not in self.records]
        self.killed = self.find_killed()
        uses: dict[tuple[str, int], dict[int, Work]] = {}
        for record in records:
            for work in record.works:
                uses.setdefault(work.use, {})[record.rank] = work
        open_uses = [Use(*key, works) for key, works in uses.items()]
        open_uses = [use for use in open_uses if use.is_in_flight or use.has_failed]
        self.uses = sorted(open_uses, key=lambda use: (_JOIN in use.first.label, use.begin))
        """Those that have not ended well; whoever has joined is heard last."""

    def find_killed(self) -> set[int]:
        """Those that others have found to be dead, and that tell no error of their own."""
        whys = [
            why
            for each in self.records.values()
            for why in (each.why, *(work.why for work in each.works))
            if why is not None
        ]
        found = {int(rank) for why in whys for rank in _KILLED.findall(why)}
        its = {rank: self.records[rank] for rank in found if rank in self.records}
        return {
            rank
            for rank, record in its.items()
            if record.why is None and record.state == "running" and record.seen < self.last_seen
        }

    def find(self) -> Finding:
        in_flight = [use for use in self.uses if use.is_in_flight]
        ended = [use for use in self.uses if not use.is_in_flight]
        checks: list[Callable[[Use], str | None]] = [self.disagreement, self.parting]
        for uses in (in_flight, ended):
            for use in uses:
                for check in checks:
                    text = check(use)
                    if text is not None:
                        return Finding(self.add(text, use), True)
        for use in [*in_flight, *ended]:
            text = self.standstill(use)
            if text is not None:
                return Finding(self.add(text, use), True)
        return self.end()

    def add(self, text: str, use: Use) -> str:
        """And what followed from it, or came before."""
        earlier = [each for each in self.uses if each.has_failed and each.begin < use.begin]
        text += self.consequence(use)
        if earlier:
            text += f" Before that, {earlier[0].name} failed: {_why(earlier[0])}."
        return text

    def state_of_absent(self, use: Use) -> tuple[list[int], list[int]]:
        """Members that have not begun it, and those of which nothing is known."""
        absent, unknown = [], []
        for rank in use.members(self.size):
            if rank in use.works:
                continue
            begun = self.records[rank].has_begun(use) if rank in self.records else None
            if begun is None:
                unknown.append(rank)
            elif not begun:
                absent.append(rank)
        return absent, unknown

    def disagreement(self, use: Use) -> str | None:
        term = use.difference()
        if term is None:
            return None
        groups: dict[object, list[int]] = {}
        for rank, work in sorted(use.works.items()):
            groups.setdefault(getattr(work, term), []).append(rank)
        sides = sorted(groups.items(), key=lambda side: len(side[1]))
        means = ", ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in sides)
        who = _who(sides[0][1], sides[-1][1])
        return f"{who}: {use.name}, begun at {_clock(use.begin)}, has {term} {means}."

    def parting(self, use: Use) -> str | None:
        """Some members have begun it, and others have not, and not only as they are late."""
        absent, unknown = self.state_of_absent(use)
        if not absent:
            return None
        present = sorted(use.works)
        elsewhere = {rank: other for rank in absent if (other := self.instead(rank, use))}
        gone = [rank for rank in absent if self.is_gone(rank)]
        age = self.last_seen - use.begin
        if not elsewhere and not gone and not use.has_failed and age < self.late_seconds:
            return None
        others = {work.use for work in elsewhere.values()}
        if len(elsewhere) == len(absent) > len(present) and len(others) == 1:
            who = f"{_who(present, absent)}:"
        elif elsewhere or gone:
            who = f"{_who(absent, present)}:"
        else:
            who = f"{_ranks(absent)} {_is(absent)} late:"
        text = f"{who} at {_clock(use.begin)} {name_ranks(present)} began {_describe(use)}, which "
        text += f"{name_ranks(absent)} did not."
        groups: dict[str, list[int]] = {}
        for rank in absent:
            groups.setdefault(self.state(rank, elsewhere.get(rank)), []).append(rank)
        for state, ranks in groups.items():
            text += f" {_ranks(ranks)} {state}."
        return text + self.unrecorded(unknown)

    def unrecorded(self, unknown: Sequence[int]) -> str:
        """What is to be said of those of which nothing is known."""
        text = ""
        if lost := [rank for rank in unknown if rank in self.lost]:
            text += f" Whether {name_ranks(lost)} did is not known: there is no record."
        if others := [rank for rank in unknown if rank not in self.lost]:
            text += f" What {name_ranks(others)} did then is not recorded any more."
        return text

    def instead(self, rank: int, use: Use) -> Work | None:
        """What it has begun that none of those have which have begun the use, and needs one."""
        for work in self.records[rank].works:
            own = Use(*work.use, {rank: work})
            is_apart = not any(work.use in self.records[each].uses for each in use.works)
            is_open = work.end is None or work.why is not None
            if is_apart and is_open and _JOIN not in work.label:
                needed = [each for each in own.members(self.size) if each in use.works]
                if any(self.records[each].has_begun(own) is False for each in needed):
                    return work
        return None

    def is_gone(self, rank: int) -> bool:
        """Whether it cannot come any more, as far as is known."""
        record = self.records[rank]
        if record.why is not None or record.state != "running" or rank in self.killed:
            return True
        return record.has_thread and self.last_seen - record.seen > self.seen_seconds

    def state(self, rank: int, instead: Work | None) -> str:
        """What one that has not begun a use does."""
        record = self.records[rank]
        if record.why is not None:
            return f"ended by {_cut(record.why)}"
        if record.state == "shut down":
            return "had shut down"
        if record.state == "shutting down":
            return "had called shutdown(), or reached the script's end"
        if rank in self.killed:
            return "has ended without shutdown(), as others found: it was killed, or crashed"
        unseen = self.last_seen - record.seen
        if unseen > self.seen_seconds and record.has_thread:
            return (
                f"was seen last at {_clock(record.seen)}, {unseen:.1f} s before the others: it was "
                "killed or stopped"
            )
        if instead is not None:
            return f"began {instead.name} instead"
        waits = [work for work in record.works if work.waited_since is not None]
        if waits:
            return f"waited for {waits[0].name}"
        last = max(record.works, key=lambda work: work.number, default=None)
        if last is None:
            return "had begun nothing"
        since = self.last_seen - (last.end or last.begin)
        return f"began {last.name} last, and called nothing for {since:.1f} s since"

    def standstill(self, use: Use) -> str | None:
        """All its members have begun it; it has failed, or does not end."""
        is_late = self.last_seen - use.begin >= self.late_seconds
        absent, unknown = self.state_of_absent(use)
        if absent or _JOIN in use.first.label or not (use.has_failed or is_late):
            return None
        rank, last = max(use.works.items(), key=lambda item: item[1].begin)
        members = [each for each in use.members(self.size) if each not in unknown]
        text = f"{_ranks(members)} began {_describe(use)}, the first at {_clock(use.begin)}, the "
        text += f"last (rank {rank}) {last.begin - use.begin:.1f} s after it."
        for each in members:
            if self.records[each].state == "running" and self.is_gone(each):
                text += f" Rank {each} {self.state(each, None)}."
        ranks = sorted(rank for rank, work in use.works.items() if work.end is None)
        if ranks:
            text += f" It has not ended on {name_ranks(ranks)}."
        return text + self.unrecorded(unknown)

    def consequence(self, use: Use) -> str:
        """What followed, for those that have begun it."""
        waits = sorted(rank for rank, work in use.works.items() if work.waited_since is not None)
        text = ""
        if waits:
            since = min(use.works[rank].waited_since or 0.0 for rank in waits)
            text = f" It has been waited for on {name_ranks(waits)} since {_clock(since)}."
        failed = sorted(rank for rank, work in use.works.items() if work.why is not None)
        if failed:
            text += f" On {name_ranks(failed)} it failed: {_why(use)}."
        return text

    def end(self) -> Finding:
        """No work tells that something is wrong: what do the ranks?"""
        records = sorted(self.records.values(), key=lambda record: record.seen)
        errors = [record for record in records if record.why is not None]
        told = [f"Rank {each.rank} ended by {_cut(each.why or '')}." for each in errors]
        if len(told) > _MOST_TOLD:
            told[_MOST_TOLD:] = [f"{len(told) - _MOST_TOLD} more ended by an error."]
        gone = [each.rank for each in records if each.why is None and self.is_gone(each.rank)]
        unseen = [rank for rank in gone if self.records[rank].state == "running"]
        told += [f"Rank {rank} {self.state(rank, None)}." for rank in sorted(unseen)[:_MOST_TOLD]]
        unread = f" There is no record of {name_ranks(self.lost)}." if self.lost else ""
        have_ended = all(record.state == "shut down" for record in records)
        works = max(record.begun for record in records)
        counted = f"{works} work{'s' if works != 1 else ''}"
        if have_ended and not told:
            return Finding(
                f"All is well: {name_ranks(list(self.records))} began {counted} and shut down."
                + unread,
                False,
            )
        if self.is_running and not told:
            return Finding(
                f"All is well so far: {name_ranks(list(self.records))} began {counted}, and wait "
                f"for none for long.{unread}",
                False,
            )
        if not told:
            ranks = [each.rank for each in records if each.state == "running"]
            told = [
                f"The job ended at {_clock(self.last_seen)} without shutdown(), and no rank tells "
                f"an error: it was ended from outside, or one of {name_ranks(sorted(ranks))} was "
                "killed."
            ]
            told += self.last_words()
        return Finding("No rank diverged in what it called. " + " ".join(told) + unread, True)

    def last_words(self) -> list[str]:
        """What was under way at the end, if some had not begun it."""
        for use in self.uses:
            absent, _ = self.state_of_absent(use)
            if absent and _JOIN not in use.first.label:
                return [
                    f"{_ranks(sorted(use.works))} had begun {_describe(use)} then, and "
                    f"{name_ranks(absent)} had not."
                ]
        return []


def _why(use: Use) -> str:
    """Of its failures, the first."""
    failed = [work for work in use.works.values() if work.why is not None]
    return _cut(min(failed, key=lambda work: work.end or work.begin).why or "")


def _cut(text: str) -> str:
    return text.strip().rstrip(".")


def _describe(use: Use) -> str:
    work = use.first
    return use.name if work.kind == "barrier" else f"{use.name} ({work.dtype}, shape {work.shape})"


def _ranks(ranks: Sequence[int]) -> str:
    return name_ranks(ranks).capitalize()


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _who(fewer: Sequence[int], more: Sequence[int]) -> str:
    """Who diverged: the smaller side, or, of equal ones, nobody alone."""
    if len(fewer) < len(more):
        return f"{_ranks(fewer)} diverged first"
    return f"{_ranks(sorted([*fewer, *more]))} parted"


def _clock(seconds: float) -> str:
    """The time of day, here."""
    whole, part = divmod(seconds, 1)
    return f"{time.strftime('%H:%M:%S', time.localtime(whole))}.{int(part * 1000):03}"
