"""Which rank diverged first, by records of jobs that went wrong in every way."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ringdl import _diagnose, _mpirun
from ringdl._diagnose import Record, Work, diagnose

MORNING = 1_800_000_000.0
ENDED = 0.01
"""Seconds that a work of these takes."""


def work(
    name: str, at: float, *, ends: bool = True, why: str | None = None, **others: object
) -> Work:
    begin = MORNING + at
    made = Work(
        number=0,
        key=f"0.{name}",
        instance=0,
        label=f"allreduce '{name}'",
        kind="allreduce",
        dtype="float32",
        reduction="average",
        memory="the CPU's",
        algorithm="ring",
        shape="(3)",
        root=-1,
        ranks=None,
        begin=begin,
        end=begin + ENDED if ends or why else None,
        waited_since=None,
        why=why,
    )
    return dataclasses.replace(made, **others)  # type: ignore[arg-type]


def record(rank: int, *works: Work, size: int = 4, seen: float = 60, **others: object) -> Record:
    made = Record(
        rank=rank,
        size=size,
        process=100 + rank,
        host="north",
        version="1",
        begin=MORNING,
        seen=MORNING + seen,
        has_shut_down=False,
        why=None,
        begun=len(works),
        works=[dataclasses.replace(one, number=i + 1) for i, one in enumerate(works)],
    )
    return dataclasses.replace(made, **others)  # type: ignore[arg-type]


def found(*records: Record) -> str:
    finding = diagnose(records)
    assert finding.is_wrong
    assert "\n" not in finding.text
    return finding.text


def test_nothing_is_wrong() -> None:
    finding = diagnose([record(rank, work("a", 1), work("b", 2)) for rank in range(4)])
    assert not finding.is_wrong
    assert finding.text == (
        "No rank diverged: what any of ranks 0-3 has begun, 2 works, all of its ranks have, and it "
        "has ended well."
    )


def test_one_rank_leaves_a_call_out() -> None:
    late = [work("a", 1), work("b", 2, ends=False, waited_since=MORNING + 2.1)]
    text = found(*(record(rank, *late) for rank in (0, 1, 3)), record(2, work("a", 1)))
    assert text.startswith("Rank 2 diverged first: at ")
    assert "ranks 0-1, 3 began allreduce 'b' (float32, shape (3)), which rank 2 did not" in text
    assert "Rank 2 began allreduce 'a' last, which ended, and has called nothing for 59.0 s" in text
    assert "It has been waited for on ranks 0-1, 3 since" in text


def test_one_rank_takes_another_way() -> None:
    others = [record(rank, work("a", 1), work("b", 2, ends=False)) for rank in (0, 1, 3)]
    text = found(*others, record(2, work("a", 1), work("c", 1.5, ends=False)))
    assert text.startswith("Rank 2 diverged first: at ")
    assert "rank 2 began allreduce 'c' (float32, shape (3)), which ranks 0-1, 3 did not" in text
    assert "Ranks 0-1, 3 began allreduce 'b' instead" in text
    text = found(*others, record(2, work("a", 1), work("c", 2.5, ends=False)))
    assert text.startswith("Rank 2 diverged first: at ")
    assert "ranks 0-1, 3 began allreduce 'b' (float32, shape (3)), which rank 2 did not" in text
    assert "Rank 2 began allreduce 'c' instead" in text


def test_one_rank_means_something_else() -> None:
    why = "ranks disagree on allreduce 'b': shape (4) on rank 1 and (3) on rank 0"
    others = [record(rank, work("b", 2, why=why)) for rank in (0, 2, 3)]
    text = found(*others, record(1, work("b", 2, why=why, shape="(4)")))
    assert text.startswith("Rank 1 diverged first: allreduce 'b', begun at ")
    assert "has shape (4) on rank 1, (3) on ranks 0, 2-3" in text
    assert f"On ranks 0-3 it failed: {why}" in text


def test_algorithms_are_no_difference() -> None:
    records = [record(rank, work("b", 2, algorithm=f"{rank}")) for rank in range(4)]
    assert not diagnose(records).is_wrong
    records = [record(rank, work("b", 2, root=rank)) for rank in range(4)]
    assert not diagnose(records).is_wrong, "of an allreduce it is a digest"
    records = [record(rank, work("b", 2, root=rank, kind="broadcast")) for rank in range(4)]
    assert "has root 0 on rank 0, 1 on rank 1" in found(*records)


def test_two_ranks_part() -> None:
    text = found(
        record(0, work("a", 1, ends=False), size=2), record(1, work("b", 2, ends=False), size=2)
    )
    assert text.startswith("Ranks 0-1 parted first: at ")
    assert "Rank 1 began allreduce 'b' instead" in text


def test_a_rank_ends_by_an_error() -> None:
    others = [record(rank, work("b", 2, ends=False)) for rank in (0, 2, 3)]
    text = found(record(1, why="ValueError (train.py, line 7): no"), *others)
    assert text.startswith("Rank 1 diverged first")
    assert "Rank 1 ended by ValueError (train.py, line 7): no." in text
    idle = [record(rank, work("a", 1)) for rank in (0, 2, 3)]
    text = found(record(1, work("a", 1), why="ValueError: no"), *idle)
    assert text.startswith("No rank diverged")
    assert text.endswith("Rank 1 ended by ValueError: no.")


def test_a_rank_is_killed() -> None:
    why = "rank 3 has ended"
    others = [record(rank, work("b", 2, why=why)) for rank in range(3)]
    text = found(*others, record(3, work("a", 1), seen=1.5))
    assert "Rank 3 was seen last at " in text
    assert "58.5 s before the others: it was killed or stopped" in text
    assert f"On ranks 0-2 it failed: {why}." in text


def test_a_record_is_missing() -> None:
    text = found(*(record(rank, work("b", 2, ends=False)) for rank in range(3)))
    assert text.startswith("Rank 3 diverged first")
    assert "Rank 3 left no record." in text
    finding = diagnose([record(rank) for rank in range(3)])
    assert finding.is_wrong
    assert "There is no record of rank 3." in finding.text


def test_a_rank_has_shut_down() -> None:
    others = [record(rank, work("b", 2, ends=False)) for rank in range(3)]
    assert "Rank 3 has shut down." in found(*others, record(3, has_shut_down=True))


def test_nothing_arrives() -> None:
    works = [record(rank, work("b", rank, ends=rank == 0)) for rank in range(4)]
    text = found(*works)
    assert text.startswith("No rank diverged: all its ranks began allreduce 'b'")
    assert "the last (rank 3) 3.0 s after it" in text
    assert "It has not ended on ranks 1-3" in text


def test_groups_concern_their_ranks_alone() -> None:
    pair = [record(rank, work("b", 2, ranks=[0, 2])) for rank in (0, 2)]
    idle = [record(rank, work("c", 2, ranks=[1, 3])) for rank in (1, 3)]
    assert not diagnose([*pair, *idle]).is_wrong
    pair[1] = record(2)
    pair[0] = record(0, work("b", 2, ranks=[0, 2], ends=False))
    text = found(*pair, *idle)
    assert text.startswith("Ranks 0, 2 parted first")


def test_a_sender_need_not_wait() -> None:
    """Its message has left; the receiver has not come to it."""
    sent = work("b", 2, kind="message", ranks=[0, 1])
    finding = diagnose([record(0, sent, size=2), record(1, size=2)])
    assert not finding.is_wrong


def test_what_records_have_dropped_is_no_finding() -> None:
    full = [work(f"{i}", i, ends=i < 9) for i in range(10)]
    whole, cut = record(0, *full[:9], size=2), record(1, *full[5:9], size=2, begun=9)
    assert not diagnose([whole, cut]).is_wrong
    late = found(whole, record(1, *full[5:], size=2, begun=10))
    assert "rank 1 began allreduce '9' (float32, shape (3)), which rank 0 did not" in late
    again = [work("same", i, instance=i, ends=i < 9) for i in range(10)]
    late = found(record(0, *again[4:9], size=2, begun=9), record(1, *again[5:], size=2, begun=10))
    assert "Rank 0 began allreduce 'same' last, which ended" in late


def test_the_newest_job_is_read(tmp_path: Path) -> None:
    with pytest.raises(_mpirun.LaunchError, match="there is no flight record in "):
        _diagnose.find_job(tmp_path)
    for name in ("2026-01-02T00-00-00-aa", "2026-01-01T00-00-00-bb", "2026-03-01T00-00-00-empty"):
        (tmp_path / name).mkdir()
        if "empty" not in name:
            (tmp_path / name / "rank0.flight").write_bytes(b"something else")
    newest = tmp_path / "2026-01-02T00-00-00-aa"
    assert _diagnose.find_job(tmp_path) == newest
    assert _diagnose.find_job(newest) == newest
    with pytest.raises(_mpirun.LaunchError, match="cannot be read: it is no flight record"):
        _diagnose.read(newest)
