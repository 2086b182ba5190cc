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


@pytest.mark.alone
@pytest.mark.parametrize("ranks", SIZES)
def test_messages_grow_with_the_logarithm_of_the_ranks(
    mpi_python: str, ranks: int, tmp_path: Path
) -> None:
    """From init() to shutdown(), with twenty calls and a StallError in between.

    A rank that gets no core for 40 ms is silent for those that look for the late one, which then
    ask more ranks, until it has arrived. And one that is blocked for a second after others have
    left asks these. So one run of three counts as a whole, rank by rank. In each, no rank sends
    more than that until the late one is looked for, nor do all together, apart from looking for it.
    """
    limit = PER_ROUND * math.log2(ranks)
    found = []
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        ended = run_ranks(mpi_python, ranks, "many.py", str(folder), folder=folder, timeout=200)
        assert ended.code == 0, ended.text
        sent = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        stages = list(zip(*sent, strict=True))
        found.append([(max(stage), sum(stage) / ranks) for stage in stages])
        assert max(stages[1]) <= limit, found
        _, after_calls, after_late, at_end = map(sum, stages)
        assert at_end - (after_late - after_calls) <= ranks * limit, found
        if max(stages[-1]) <= limit:
            return
    pytest.fail(f"messages after each stage (most, mean), of each run: {found}")
