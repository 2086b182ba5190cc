"""What `bench/allreduce.py` makes of the times of all jobs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import allreduce

TIMES = {
    ("ringdl slow multiple", 1024): [1.0, 4.0, 1.0],  # the second job met a slow machine
    ("mpi slow multiple", 1024): [3.0, 12.0, 3.3],
    ("ringdl fast single", 1024): [1.0, 1.0, 2.0],
    ("mpi fast single", 1024): [1.5, 1.2, 2.8],
}


def test_ratios_are_of_one_job_and_against_the_best() -> None:
    (row,) = allreduce.compare(TIMES)
    assert row["best_mpi"] == "fast single"
    assert row["ratio"] == pytest.approx(1.4)
    assert row["lower_quartile"] == pytest.approx(1.2)
    assert row["of_memcpy"] == pytest.approx(1.0)
    assert row["across_jobs"] == pytest.approx(1.45)


def test_one_round_is_its_own_quartile() -> None:
    (row,) = allreduce.compare({what: times[:1] for what, times in TIMES.items()})
    assert row["ratio"] == row["lower_quartile"] == pytest.approx(1.5)
