"""Scripts written for one machine train the same model on any number of ranks."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in (ROOT / "tests/scripts").glob("[!_]*.py"))
RANKS = (1, 2, 3)
TIMEOUT = 300

pytestmark = pytest.mark.any_mpi(first=True)  # each MPI would train all of them


@pytest.fixture(scope="module")
def learnt(mpi_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each script has learnt on each number of ranks, a file per rank."""
    folder = tmp_path_factory.mktemp("learnt")
    for ranks in RANKS:
        launcher = ["-m", "ringdl", "run", "-n", str(ranks)]
        command = [mpi_python, *launcher, "-m", "tests.scripts", str(folder)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model(learnt: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    alone = torch.load(learnt / f"{name}.1.0")
    assert alone
    for ranks in RANKS[1:]:
        each = [torch.load(learnt / f"{name}.{ranks}.{rank}") for rank in range(ranks)]
        for key, expected in alone.items():
            for values in each:
                assert torch.equal(values[key], each[0][key]), f"{key}: ranks hold other bits"
            # Sums of 16-bit floats are rounded otherwise; all else is float64.
            tolerance = 1e-2 if name == "mixed_precision" else 1e-9
            if name == "mixed_precision" and key.startswith("model"):
                continue
            torch.testing.assert_close(each[0][key], expected, rtol=tolerance, atol=tolerance)
