"""How messages grow with the ranks: RINGDL_TEST_ALL=1 counts them on 64, too."""

import json
import math
import os
from pathlib import Path

import pytest

from tests.running import run_ranks

SIZES = (16, 32, 64) if os.environ.get("RINGDL_TEST_ALL") == "1" else (16,)
PER_ROUND = 40
"""So many messages at most per rank and doubling of the ranks."""


@pytest.mark.parametrize("ranks", SIZES)
def test_messages_grow_with_the_logarithm_of_the_ranks(
    mpi_python: str, ranks: int, tmp_path: Path
) -> None:
    """From init() to shutdown(), with twenty calls and a StallError in between.

    If a rank gets no core for 40 ms, all others are asked before the StallError: one run of three
    counts there.
    """
    limit = PER_ROUND * math.log2(ranks)
    found = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        ended = run_ranks(mpi_python, ranks, "many.py", str(folder), folder=folder, timeout=200)
        assert ended.code == 0, ended.text
        sent = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        found.append([max(stage) for stage in zip(*sent, strict=True)])
        _, after_calls, after_error, at_end = found[-1]
        assert at_end - (after_error - after_calls) <= limit, found
        if at_end <= limit:
            return
    pytest.fail(f"messages after each stage, of each run: {found}")
