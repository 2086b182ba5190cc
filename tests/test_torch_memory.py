"""What the averaging of gradients costs in memory, over the same training without it.

Gradients that autograd has just computed are mapped here, so that freeing them gives them back. In
glibc's heap they leave holes, with or without ringdl: as much as three gradients, more in one run
and less in the next.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUCKET_BYTES = 25 << 20
MARGIN_BYTES = 8 << 20

pytestmark = pytest.mark.any_mpi


def peaks(python: str, *arguments: str) -> tuple[int, int]:
    """The largest gradient, and the largest peak of two ranks, in bytes."""
    command = [python, "-m", "ringdl", "run", "-n", "2", str(ROOT / "tests/jobs/torch_memory.py")]
    job = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    figures = re.findall(r"largest (\d+) before \d+ peak (\d+)", job.stdout)
    assert len(figures) == 2, job.stdout
    return int(figures[0][0]), max(int(peak) for _, peak in figures)


def test_gradients_are_held_once(mpi_python: str) -> None:
    pytest.importorskip("torch")
    largest, plain = peaks(mpi_python, "plain", "keep")
    for zeroing in ("keep", "drop"):
        _, wrapped = peaks(mpi_python, "wrapped", zeroing)
        print(
            f"{zeroing}: {wrapped / 2**20:.1f} MiB wrapped, {plain / 2**20:.1f} MiB plain, "
            f"{(wrapped - plain) / 2**20:+.1f} MiB"
        )
        assert wrapped - plain <= max(BUCKET_BYTES, largest) + MARGIN_BYTES
