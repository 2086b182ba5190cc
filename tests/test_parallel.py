"""Networks that are cut over ranks: what does not fit into one, and how well a pipeline is used."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.running import run_job, run_ranks

ROOT = Path(__file__).parents[1]
FEW = ("--layers", "2", "--steps", "5")


@pytest.mark.any_mpi
@pytest.mark.parametrize(
    ("ranks", "axes"), [(4, ("2", "1", "2")), (2, ("1", "2", "1"))], ids=["2x2", "pipeline"]
)
def test_what_exceeds_the_memory_of_a_rank(
    mpi_python: str, ranks: int, axes: tuple[str, ...], tmp_path: Path
) -> None:
    ended = run_ranks(
        mpi_python,
        ranks,
        "cut_network.py",
        *axes,
        folder=tmp_path,
        timeout=200,
        MALLOC_MMAP_THRESHOLD_="1000000",  # what is freed leaves no holes in the heap
    )
    assert ended.code == 0, ended.text
    assert ended.output.count("a part of what does not fit") == ranks, ended.text


@pytest.mark.any_mpi
@pytest.mark.alone
@pytest.mark.parametrize("chunks", ["1", "2"])
def test_pipeline_is_used_as_its_schedule_allows(
    mpi_python: str, chunks: str, tmp_path: Path
) -> None:
    """By layers that take time and no core, as ranks may share one here."""
    file = tmp_path / "found.json"
    command = [mpi_python, "-m", "ringdl", "run", "-n", "2", str(ROOT / "bench/pipeline.py")]
    ended = run_job(
        [*command, "--sleep", "0.02", "--chunks", chunks, *FEW, f"--json={file}"], tmp_path
    )
    assert ended.code == 0, ended.text
    found = json.loads(file.read_text())
    assert max(found["shares"]) <= found["bound"] * 1.01
    assert sorted(found["shares"])[len(found["shares"]) // 2] >= 0.95 * found["bound"], found


def test_doctor_prints_the_grid(mpi_python: str) -> None:
    doctor = ["-n", "4", "-m", "ringdl", "doctor", "--quick", "--grid"]
    for axes, text in (
        (
            "2x1x2",
            "data 2 ( | ), pipeline 1 (lines), model 2; between hosts: nothing; stage 0: 0 1 |",
        ),
        ("3x1x2", "a grid of data x pipeline x model = 3 x 1 x 2 is not one of 4 ranks"),
    ):
        ended = subprocess.run(
            [mpi_python, "-m", "ringdl", "run", *doctor, axes],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        assert text in " ".join(ended.stdout.split()), ended.stdout
