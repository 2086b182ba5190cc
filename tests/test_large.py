"""Arrays of more than 2^31 elements: tests/jobs/large.py, with RINGDL_TEST_ALL=1 only."""

from pathlib import Path

import pytest

from tests.running import EVERYTHING, run_ranks


@pytest.mark.skipif(not EVERYTHING, reason="takes a minute and 9 GiB; RINGDL_TEST_ALL=1 runs it")
def test_every_collective_above_two_billion_elements(mpi_python: str, tmp_path: Path) -> None:
    ended = run_ranks(mpi_python, 2, "large.py", folder=tmp_path, timeout=400)
    assert ended.code == 0, ended.text
    assert ended.output.count("all right") == 2, ended.text
