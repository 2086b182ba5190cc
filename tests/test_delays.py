"""Shared memory under random delays: right, and the same bits from run to run.

RINGDL_TEST_ALL=1 makes a million works between two processes.
"""

import re
from pathlib import Path

import pytest

from tests.running import EVERYTHING, run_ranks

pytestmark = pytest.mark.alone

WORKS = 10_000


@pytest.mark.parametrize("ranks", [2, 3] if EVERYTHING else [2])
def test_delays_change_no_bits(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    bits = set()
    for seed in (1, 2):
        bits |= run(mpi_python, ranks, WORKS, seed, tmp_path)
    assert len(bits) == 1, bits


@pytest.mark.any_mpi(always=True)
@pytest.mark.skipif(not EVERYTHING, reason="takes minutes: make test-all")
def test_a_million_works(mpi_python: str, tmp_path: Path) -> None:
    run(mpi_python, 2, 1_000_000, 3, tmp_path)


def run(python: str, ranks: int, works: int, seed: int, folder: Path) -> set[str]:
    """The bits that the ranks of a job say: alike."""
    words = (str(works), str(seed))
    ended = run_ranks(python, ranks, "delays.py", *words, folder=folder, timeout=580)
    assert ended.code == 0, ended.text
    said = re.findall(r"works, bits (\w+)", ended.output)
    assert len(said) == ranks, ended.text
    assert len(set(said)) == 1, ended.text
    return set(said)
