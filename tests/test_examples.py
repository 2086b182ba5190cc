"""The examples as whole jobs: alone, on several ranks, and resumed on another number of ranks."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import EVERYTHING

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SMALL_GPT = ("--layers=1", "--heads=2", "--width=32", "--context=32", "--batch=10", "--seed=3")
TIMEOUT = 120


def run_example(python: str, ranks: int, script: str, *arguments: str, figures: Path):
    """Run an example on so many ranks (0: without a launcher); its output and its final figures."""
    launcher = ["-m", "ringdl", "run", "-n", str(ranks)] if ranks else []
    command = [python, *launcher, str(EXAMPLES / script), *arguments, f"--json={figures}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, json.loads(figures.read_text())


def run_gpt(python: str, ranks: int, folder: Path, *arguments: str):
    checkpoint = f"--checkpoint={folder / 'gpt.safetensors'}"
    arguments = (*SMALL_GPT, checkpoint, *arguments)
    return run_example(python, ranks, "torch_gpt.py", *arguments, figures=folder / "figures.json")


def assert_same_bits(output: str, ranks: int, digest: str) -> None:
    holders = f"all {ranks} ranks hold" if ranks > 1 else "the only rank holds"
    assert re.search(rf"{holders} the same bits: {digest}\b", output), output


pytestmark = pytest.mark.any_mpi(always=True)


def test_readme_opens_with_first() -> None:
    script = (EXAMPLES / "first.py").read_text()
    assert f"```python\n{script}```" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("ranks", [0, 2])
def test_first(mpi_python: str, ranks: int) -> None:
    launcher = ["-m", "ringdl", "run", "-n", str(ranks)] if ranks else []
    result = subprocess.run(
        [mpi_python, *launcher, str(EXAMPLES / "first.py")],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    # Where Python does not buffer, a line and its end are two writes, and ranks' may come in turns.
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", result.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.05 < losses[0]
    holders = re.findall(r"rank (\d) of (\d) holds ([0-9a-f]{16})", result.stdout)
    assert sorted(holder[:2] for holder in holders) == [
        (str(rank), str(ranks or 1)) for rank in range(ranks or 1)
    ]
    assert len({digest for _, _, digest in holders}) == 1


NEEDS = {
    "numpy_digits": (),
    "own_policy": (),
    "jax_digits": ("optax",),
    "keras_digits": ("keras",),
    "sklearn_digits": (),
    "tensorflow_digits": ("tensorflow",),
    "tinygrad_digits": ("tinygrad",),
}
"""Of an example: the packages beside scikit-learn's."""


@pytest.mark.parametrize("ranks", [0, 1, 2] if EVERYTHING else [0, 2])
@pytest.mark.parametrize("script", NEEDS)
def test_digits(mpi_python: str, script: str, ranks: int, tmp_path: Path) -> None:
    for needed in ("sklearn", *NEEDS[script]):
        pytest.importorskip(needed)
    if script == "tinygrad_digits" and shutil.which("clang") is None:
        pytest.skip("tinygrad compiles with clang, which is not there")
    output, figures = run_example(
        mpi_python, ranks, f"{script}.py", figures=tmp_path / "figures.json"
    )
    assert figures["ranks"] == max(ranks, 1)
    assert figures["accuracy"] >= 0.95
    assert_same_bits(output, max(ranks, 1), figures["digest"])


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("script", ["torch_digits", "torch_accumulation"])
def test_classification(mpi_python: str, script: str, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    _, figures = run_example(mpi_python, ranks, f"{script}.py", figures=tmp_path / "figures.json")
    assert figures["ranks"] == max(ranks, 1)
    assert figures["accuracy"] >= 0.9


def test_a_median_ignores_a_rank(mpi_python: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    figures = tmp_path / "figures.json"
    _, reached = run_example(mpi_python, 3, "own_policy.py", "--spoiled=1", figures=figures)
    assert reached["accuracy"] >= 0.9


def test_gan(mpi_python: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    figures = tmp_path / "figures.json"
    _, reached = run_example(mpi_python, 2, "torch_gan.py", "--epochs=20", figures=figures)
    assert reached["ranks"] == 2
    assert reached["distance"] < reached["of_grey"]


def test_fully_sharded(mpi_python: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    figures = tmp_path / "figures.json"
    _, reached = run_example(mpi_python, 2, "torch_fsdp.py", figures=figures)
    assert reached["ranks"] == 2
    assert reached["accuracy"] >= 0.9
    assert reached["kept"] < 0.6


@pytest.mark.parametrize("ranks", [0, 2])
def test_gpt_learns(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    output, figures = run_gpt(mpi_python, ranks, tmp_path, "--steps=60")
    assert figures["ranks"] == max(ranks, 1)
    assert figures["steps"] == 60
    assert figures["validation_loss"] < 3.6  # ln 128 = 4.85 when nothing is learned
    assert 0 <= figures["waiting_share"] < 1
    assert_same_bits(output, max(ranks, 1), figures["digest"])


@pytest.fixture(scope="module")
def loss_of_one_rank(tmp_path_factory: pytest.TempPathFactory) -> float:
    """After 40 steps, all the way alone."""
    _, figures = run_gpt(sys.executable, 0, tmp_path_factory.mktemp("whole"), "--steps=40")
    return figures["validation_loss"]


def test_gpt_resumes_on_any_number_of_ranks(
    mpi_python: str, loss_of_one_rank: float, tmp_path: Path
) -> None:
    """2 ranks, then 1, then 3 (which do not divide the batch) equal one rank all the way."""
    step = 0
    for ranks, stop_at in ((2, 14), (1, 27), (3, 40)):
        resume = ("--resume",) if step else ()
        output, part = run_gpt(
            mpi_python, ranks, tmp_path, "--steps=40", f"--stop-at={stop_at}", *resume
        )
        assert (part["first_step"], part["steps"], part["ranks"]) == (step, stop_at, ranks)
        assert_same_bits(output, ranks, part["digest"])
        step = stop_at
    assert part["validation_loss"] == pytest.approx(loss_of_one_rank, rel=2e-3)


def test_gpt_stops_after_seconds(mpi_python: str, tmp_path: Path) -> None:
    _, figures = run_gpt(mpi_python, 2, tmp_path, "--steps=1000000", "--seconds=1.5")
    assert 0 < figures["steps"] < 1000000


def test_gpt_takes_no_more_ranks_than_rows(mpi_python: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="too small for 3 ranks"):
        run_gpt(mpi_python, 3, tmp_path, "--batch=2")
