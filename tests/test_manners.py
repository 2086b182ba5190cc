"""Good manners of whole jobs: nothing grows, and whatever is dropped or forked harms nobody.

RINGDL_TEST_ALL=1 runs the long forms.
"""

import json
from pathlib import Path

import pytest

from tests.running import EVERYTHING, Ended, run_ranks

TIMEOUT = 300  # seconds; a loaded machine takes ten times as long as an idle one

KIB_PER_ROUND = 1.0
"""MPICH and mpi4py keep about 0.3 KiB of each communicator that is made and freed."""

WARM_UP = 100
"""Rounds before. Intel MPI fills pools of its own meanwhile, also without ringdl: some 1.4 MiB."""


def held_by(ended: Ended, ranks: int) -> list[tuple[dict[str, int], dict[str, int]]]:
    """What each rank held before and after, as tests/jobs/measure.py says it."""
    assert ended.code == 0, ended.text
    pairs = [json.loads(line) for line in ended.output.splitlines() if line.startswith("[")]
    assert len(pairs) == ranks, ended.text
    return pairs


@pytest.mark.any_mpi
@pytest.mark.alone
@pytest.mark.parametrize(("rounds", "ranks"), [(100, 3), (2200, 2)])
def test_init_and_shutdown_again_and_again(
    mpi_python: str, rounds: int, ranks: int, tmp_path: Path
) -> None:
    """2,200 rounds: MPICH has 2,048 contexts for communicators."""
    arguments = (str(rounds + WARM_UP), str(WARM_UP))
    ended = run_ranks(mpi_python, ranks, "rounds.py", *arguments, folder=tmp_path, timeout=TIMEOUT)
    for before, after in held_by(ended, ranks):
        assert after["threads"] == before["threads"]
        assert after["files"] == before["files"]
        for kind in ("rss", "private"):
            assert after[kind] - before[kind] < 512 + KIB_PER_ROUND * rounds, ended.output


@pytest.mark.any_mpi
@pytest.mark.alone
def test_small_works_leave_nothing(mpi_python: str, tmp_path: Path) -> None:
    works = 1_050_000 if EVERYTHING else 250_000
    ended = run_ranks(mpi_python, 2, "small_works.py", str(works), folder=tmp_path, timeout=TIMEOUT)
    for before, after in held_by(ended, 2):
        assert after["threads"] == before["threads"]
        assert after["files"] == before["files"]
        for kind in ("rss", "private"):
            assert after[kind] - before[kind] <= 1024, ended.output


def test_unmapped_memory_leaves_nothing(mpi_python: str, tmp_path: Path) -> None:
    """UCX, which MPICH is over, notes each range for its cache of registrations."""
    ended = run_ranks(mpi_python, 1, "unmapped.py", folder=tmp_path, timeout=TIMEOUT)
    ((before, after),) = held_by(ended, 1)
    for kind in ("rss", "private"):
        assert after[kind] - before[kind] <= 1024, ended.output


@pytest.mark.any_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_dropped_in_flight_stays_valid(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, ranks, "dropped.py", folder=tmp_path, timeout=TIMEOUT)
    assert ended.code == 0, ended.text
    assert ended.output.count("memory stayed valid") == ranks, ended.text


@pytest.mark.any_mpi
def test_data_loaders_fork_during_training(mpi_python: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ended = run_ranks(mpi_python, 2, "data_loader.py", folder=tmp_path, timeout=TIMEOUT)
    assert ended.code == 0, ended.text
    assert ended.output.splitlines() == ["6 workers forked anew, 2 kept"] * 2, ended.text
    assert "Traceback" not in ended.errors, ended.errors


@pytest.mark.any_mpi
def test_soak(mpi_python: str, tmp_path: Path) -> None:
    """A short one: it runs, checks its results, and says what it measured."""
    soak = ("../soak.py", "--minutes", "0.1")
    ended = run_ranks(mpi_python, 2, *soak, folder=tmp_path, timeout=TIMEOUT)
    assert ended.code == 0, ended.text
    assert "nothing has grown" in ended.output, ended.text
    assert "works/s" in ended.output, ended.text
