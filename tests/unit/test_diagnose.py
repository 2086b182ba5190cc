"""Which rank diverged first, by records of jobs that went wrong in every way."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

from ringdl import _diagnose, _engine, _flight_records, _flights, _mpirun
from ringdl._communicator import communicator_over
from ringdl._diagnose import diagnose
from ringdl._flight_records import Record, Work
from ringdl._settings import Settings

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
        compression="float32",
        memory="the CPU's",
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
        has_thread=True,
        state="running",
        why=None,
        begun=len(works),
        overwritten=0,
        works=[dataclasses.replace(one, number=i + 1) for i, one in enumerate(works)],
    )
    return dataclasses.replace(made, **others)  # type: ignore[arg-type]


def told(*records: Record, is_running: bool = False) -> str:
    finding = diagnose(records, is_running)
    assert not finding.is_wrong, finding.text
    return finding.text


def found(*records: Record) -> str:
    finding = diagnose(records)
    assert finding.is_wrong, finding.text
    assert "\n" not in finding.text
    return finding.text


def test_nothing_is_wrong() -> None:
    records = [record(rank, work("a", 1), work("b", 2), state="shut down") for rank in range(4)]
    assert told(*records) == "All is well: ranks 0-3 began 2 works and shut down."


def test_one_rank_leaves_a_call_out() -> None:
    late = [work("a", 1), work("b", 2, ends=False, waited_since=MORNING + 2.1)]
    text = found(*(record(rank, *late) for rank in (0, 1, 3)), record(2, work("a", 1)))
    assert text.startswith("Rank 2 is late: at ")
    assert "ranks 0-1, 3 began allreduce 'b' (float32, shape (3)), which rank 2 did not" in text
    assert "Rank 2 began allreduce 'a' last, and called nothing for 59.0 s since." in text
    assert "It has been waited for on ranks 0-1, 3 since" in text


def test_a_rank_that_is_late_is_not_called_wrong_soon() -> None:
    """It may come; nor is it wrong of one that is ahead to be so."""
    ahead = [work(f"{i}", 1 + i, ends=False) for i in range(4)]
    behind = [work("0", 1.4, ends=False), work("1", 1.9, ends=False)]
    records = [record(0, *ahead, size=3), *(record(rank, *behind, size=3) for rank in (1, 2))]
    records = [dataclasses.replace(each, seen=MORNING + 5) for each in records]
    assert told(*records, is_running=True).startswith("All is well so far: ranks 0-2 began 4")
    records = [dataclasses.replace(each, seen=MORNING + 9) for each in records]
    text = found(*records)
    assert text.startswith("Ranks 1-2 are late: at ")
    assert "rank 0 began allreduce '2'" in text
    assert "Ranks 1-2 began allreduce '1' last" in text


@pytest.mark.parametrize("ahead", [-0.5, 0.5])
def test_clocks_may_differ(ahead: float) -> None:
    late = [work("a", 1), work("b", 2, ends=False)]
    text = found(
        *(record(rank, *late) for rank in (0, 1, 3)),
        record(2, work("a", 1 + ahead), work("c", 2 + ahead, ends=False), seen=60 + ahead),
    )
    assert text.startswith("Rank 2 diverged first: at ")


def test_files_of_other_hosts_are_read_late(tmp_path: Path) -> None:
    """Where hosts share a file system: what is older there says nothing of its rank."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"/dev/sda1 / ext4 rw 0 0\nserver:/home {tmp_path} nfs4 rw 0 0\n"
        f"tmpfs {tmp_path}/a\\040b tmpfs rw 0 0\n"
    )
    assert _diagnose._lag(tmp_path / "flights", mounts) > 30
    assert _diagnose._lag(tmp_path / "a b/flights", mounts) == 0
    assert _diagnose._lag(tmp_path.parent, mounts) == 0
    records = [record(r, work("a", 1), seen=60 if r < 2 else 40) for r in range(4)]
    records[0] = record(0, work("a", 1), work("b", 50, ends=False))
    assert diagnose(records, is_running=True).is_wrong
    finding = diagnose(records, is_running=True, lag=35.0)
    assert not finding.is_wrong, finding.text


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


def test_those_that_have_called_neither_are_late() -> None:
    text = found(
        record(0, work("x", 1, ends=False)),
        record(1, work("y", 2, ends=False)),
        *(record(rank) for rank in (2, 3)),
    )
    assert not text.startswith("Rank 0 diverged")
    assert "Rank 1 began allreduce 'y' instead. Ranks 2-3 had begun nothing." in text


def test_one_rank_means_something_else() -> None:
    why = "ranks disagree on allreduce 'b': shape (4) on rank 1 and (3) on rank 0"
    others = [record(rank, work("b", 2, why=why)) for rank in (0, 2, 3)]
    text = found(*others, record(1, work("b", 2, why=why, shape="(4)")))
    assert text.startswith("Rank 1 diverged first: allreduce 'b', begun at ")
    assert "has shape (4) on rank 1, (3) on ranks 0, 2-3" in text
    assert text.count(why) == 1
    text = found(*others, record(1, work("b", 2, why=why, compression="float16")))
    assert "has compression float16 on rank 1, float32 on ranks 0, 2-3" in text


def test_what_was_caught_does_not_hide_what_hangs() -> None:
    bad = [work("bad", 1, why="ranks disagree", shape=f"({rank})") for rank in range(3)]
    waiting = work("later", 9, ends=False, waited_since=MORNING + 9.1)
    text = found(
        *(record(rank, bad[rank], waiting, size=3) for rank in (0, 1)), record(2, bad[2], size=3)
    )
    assert text.startswith("Rank 2 is late: at ")
    assert text.endswith("Before that, allreduce 'bad' failed: ranks disagree.")


def test_roots_are_compared_but_for_digests() -> None:
    records = [record(rank, work("b", 2, ends=False, root=rank), seen=3) for rank in range(4)]
    assert told(*records, is_running=True).startswith("All is well so far"), "of an allreduce"
    wrong = [work("b", 2, root=rank, kind="broadcast", ends=False) for rank in range(4)]
    text = found(*(record(rank, wrong[rank]) for rank in range(4)))
    assert "has root 0 on rank 0, 1 on rank 1" in text


def test_two_ranks_part() -> None:
    text = found(
        record(0, work("a", 1, ends=False), size=2), record(1, work("b", 2, ends=False), size=2)
    )
    assert text.startswith("Ranks 0-1 parted: at ")
    assert "Rank 1 began allreduce 'b' instead" in text


def test_two_names_in_opposite_order() -> None:
    order = [work("a", 1, ends=False), work("b", 1, ends=False)]
    text = found(record(0, order[0], size=2), record(1, order[1], size=2))
    assert text.startswith("Ranks 0-1 parted: ")


def test_a_rank_ends_by_an_error() -> None:
    others = [record(rank, work("b", 2, ends=False), seen=3) for rank in (0, 2, 3)]
    text = found(record(1, why="ValueError (train.py, line 7): no\nway.", seen=3), *others)
    assert text.startswith("Rank 1 diverged first")
    assert "Rank 1 ended by ValueError (train.py, line 7): no way." in text
    idle = [record(rank, work("a", 1)) for rank in (0, 2, 3)]
    text = found(record(1, work("a", 1), why="ValueError: no"), *idle)
    assert text.endswith("Rank 1 ended by ValueError: no.")
    many = [record(rank, why="no", size=64, seen=rank) for rank in range(64)]
    assert found(*many).endswith("Rank 2 ended by no. 61 more ended by an error.")


def test_a_rank_is_killed() -> None:
    why = "rank 3 has ended"
    others = [record(rank, work("b", 2, why=why)) for rank in range(3)]
    text = found(*others, record(3, work("a", 1), seen=1.5))
    assert "Rank 3 was seen last at " in text
    assert "58.5 s before the others: it was killed or stopped" in text
    assert f"On ranks 0-2 it failed: {why}." in text
    text = found(*(record(rank) for rank in range(3)), record(3, seen=20))
    assert "Rank 3 was seen last at " in text, "nothing is in flight"
    text = found(*others, record(3, work("a", 1), seen=1.5, has_thread=False))
    assert "killed or stopped" not in text, "nobody polls it while it computes"


def test_all_are_killed_at_once() -> None:
    waiting = [record(rank, work("b", 59.9, ends=False)) for rank in range(3)]
    text = found(*waiting, record(3, work("a", 1)))
    assert "it was ended from outside, or one of ranks 0-3 was killed. Ranks 0-2 had begun" in text
    assert "allreduce 'b' (float32, shape (3)) then, and rank 3 had not." in text
    running = [dataclasses.replace(each, seen=MORNING + 61) for each in waiting]
    assert told(*running, record(3, seen=61), is_running=True).startswith("All is well so far")


def test_a_record_is_missing() -> None:
    text = found(*(record(rank, work("b", 2, ends=False)) for rank in range(3)))
    assert text.startswith("Ranks 0-2 began allreduce 'b'")
    assert "Whether rank 3 did is not known: there is no record." in text
    soon = [record(rank, work("b", 2, ends=False), seen=3) for rank in range(3)]
    assert "All is well" in told(*soon, is_running=True)
    idle = [record(rank, state="shut down") for rank in range(3)]
    assert told(*idle).endswith("There is no record of rank 3.")


def test_more_are_in_flight_than_are_kept() -> None:
    others = [record(rank, work("b", 2, ends=False), size=3) for rank in (0, 2)]
    text = found(*others, record(1, overwritten=1, size=3))
    assert text.startswith("Ranks 0, 2 began allreduce 'b'")
    assert "What rank 1 did then is not recorded any more." in text


def test_a_rank_has_shut_down() -> None:
    others = [record(rank, work("b", 2, ends=False)) for rank in range(3)]
    assert "Rank 3 had shut down." in found(*others, record(3, state="shut down"))
    text = found(*others, record(3, state="shutting down"))
    assert "Rank 3 had called shutdown(), or reached the script's end." in text


def test_whoever_has_joined_is_not_to_blame() -> None:
    join = work("ringdl.join", 1, ends=False)
    text = found(
        record(0, join, size=3), record(1, size=3), record(2, work("g", 2, ends=False), size=3)
    )
    assert "rank 2 began allreduce 'g'" in text
    assert "Ranks 0-1 had begun nothing" not in text
    assert "ringdl.join" not in text.partition(" began ")[0]


def test_nothing_arrives() -> None:
    text = found(*(record(rank, work("b", rank, ends=rank == 0)) for rank in range(4)))
    assert text.startswith("Ranks 0-3 began allreduce 'b'")
    assert "the last (rank 3) 3.0 s after it" in text
    assert "It has not ended on ranks 1-3" in text


def test_groups_concern_their_ranks_alone() -> None:
    shut = {"state": "shut down"}
    pair = [record(rank, work("b", 2, ranks=[0, 2]), **shut) for rank in (0, 2)]
    others = [record(rank, work("c", 2, ranks=[1, 3]), **shut) for rank in (1, 3)]
    told(*pair, *others)
    text = found(record(0, work("b", 2, ranks=[0, 2], ends=False)), record(2), *others)
    assert text.startswith("Rank 2 is late: ")
    served = record(0, work("any", 2, ranks=[0], ends=False), seen=3)
    told(served, *(record(rank, seen=3) for rank in (1, 2, 3)), is_running=True)
    unknown = record(0, work("large", 2, ranks=[], ends=False), size=2000)
    assert "ranks 1-1999" not in found(unknown, record(1, size=2000)).partition("no record")[0]


def test_names_that_are_used_again_are_counted() -> None:
    late = [work("g", i, instance=i, ends=i < 9) for i in range(10)]
    text = found(record(0, *late, size=2), record(1, *late[:9], size=2))
    assert "rank 0 began allreduce 'g' (use 10) (float32, shape (3)), which rank 1 did not" in text
    assert "Rank 1 began allreduce 'g' (use 9) last" in text


def test_records_that_do_not_reach_back() -> None:
    old = work("old", 2, ends=False, kind="broadcast")
    recent = [dataclasses.replace(work(f"{i}", 50 + i, ends=False), number=i) for i in range(5)]
    short = dataclasses.replace(record(1, size=3), begun=5000)
    works = [dataclasses.replace(each, number=4996 + i) for i, each in enumerate(recent)]
    short = dataclasses.replace(short, works=works)
    text = found(record(0, old, *recent, size=3), short, record(2, *recent, size=3))
    assert "which rank 2 did not." in text
    assert "What rank 1 did then is not recorded any more." in text


def test_many_ranks_take_no_time() -> None:
    names = [work(f"{i}", i / 100, ends=i < 990) for i in range(1000)]
    records = [record(rank, *names[rank:], size=128) for rank in range(128)]
    begin = time.monotonic()
    diagnose(records)
    assert time.monotonic() - begin < 5


def test_the_newest_job_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(_mpirun.LaunchError, match="there is no flight record in "):
        _diagnose.main([str(tmp_path)])
    engines = _engine.loopback(2)
    for name in ("2026-01-02T00-00-00.1-aa", "2026-01-01T00-00-00.2-bb", "2026-03-01-empty"):
        (tmp_path / name).mkdir()
        if "empty" not in name:
            for rank, engine in enumerate(engines):
                engine.start_flight_recorder(str(tmp_path / name / f"rank{rank}.flight"), "h", "1")
    newest = tmp_path / "2026-01-02T00-00-00.1-aa"
    assert _flight_records.find_jobs(tmp_path)[0] == newest
    assert _flight_records.find_jobs(newest) == [newest]
    (newest / "rank1.flight").write_bytes(b"something else")
    (newest / "rank2.flight").mkdir()
    assert _diagnose.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "the job, or the part of an elastic job, before it: " in said
    assert "rank1.flight cannot be read: it is no flight record" in said
    assert "rank2.flight cannot be read: " in said
    assert said.endswith("There is no record of rank 1.\n")
    (newest / "rank0.flight").write_bytes(b"")
    with pytest.raises(_mpirun.LaunchError, match=r"rank0\.flight cannot be read"):
        _diagnose.main([str(tmp_path)])


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def test_errors_of_any_text_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (communicator,) = map(communicator_over, _engine.loopback(1), [Settings()])
    _flights.start(communicator, str(tmp_path))
    for error in (ValueError(os.fsdecode(b"\xff")), UnspeakableError(), SystemExit(3)):
        _flights.note_end(error)
    (record,), _ = _flight_records.read(_flight_records.find_jobs(tmp_path)[0])
    assert record.why == "SystemExit: 3"
    communicator.shutdown()
