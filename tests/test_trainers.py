"""The scripts of docs/trainers.md as whole jobs, where the trainers are installed.

RINGDL_TEST_ALL=1 installs them, so that there they must be.
"""

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.environments import PYTHONS

PAGE = (Path(__file__).parents[1] / "docs/trainers.md").read_text()
SCRIPTS = dict(re.findall(r"```python\n# train_(\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
TIMEOUT = 150
NAMED = {
    "accelerate": 'torch.distributed.init_process_group("ringdl")',
    "transformers": 'torch.distributed.init_process_group("ringdl")',
    "lightning": 'process_group_backend="ringdl"',
}
"""How each script names ringdl."""


def run_script(python: str, trainer: str, script: str, folder: Path) -> str:
    """Run it on two ranks; what it says, and its timeline in the folder."""
    if os.environ.get("RINGDL_TEST_ALL") != "1" and not importlib.util.find_spec(trainer):
        pytest.skip(f"{trainer} is not installed (make test-all does)")
    path = folder / f"train_{trainer}.py"
    path.write_text(script)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RINGDL_TIMELINE": str(folder / "timeline.json"),
    }
    result = subprocess.run(
        [python, "-m", "ringdl", "run", "-n", "2", str(path)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env=environment,
        cwd=folder,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def allreduces_of(folder: Path) -> list[int]:
    """How many allreduces of more than a number each of the two ranks has made."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    ranks = [
        event["pid"]
        for event in events
        if event["ph"] == "b"
        and "allreduce" in event["name"]
        and event["args"].get("bytes", 0) > 100
    ]
    return [ranks.count(0), ranks.count(1)]


def test_each_trainer_has_a_script() -> None:
    assert SCRIPTS.keys() == NAMED.keys()
    assert all(NAMED[trainer] in script for trainer, script in SCRIPTS.items())


@pytest.mark.parametrize("trainer", SCRIPTS)
def test_trainer(mpi_python: str, trainer: str, tmp_path: Path) -> None:
    text = run_script(mpi_python, trainer, SCRIPTS[trainer], tmp_path)
    losses = dict(re.findall(r"rank ([01]) of 2: loss ([\d.]+)", text))
    assert losses.keys() == {"0", "1"}, text
    assert losses["0"] == losses["1"]
    assert float(losses["0"]) < (4 if trainer == "transformers" else 1), text
    assert "Gloo" not in text
    first, second = allreduces_of(tmp_path)
    assert first == second >= 60  # a bucket per step


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_trainer_that_is_not_told(trainer: str, tmp_path: Path) -> None:
    """It goes by Gloo, and says so once."""
    script = SCRIPTS[trainer].replace(NAMED[trainer], "")
    text = run_script(next(iter(PYTHONS.values())), trainer, script, tmp_path)
    assert text.count("torch.distributed goes by Gloo here, although") == 1, text
    assert allreduces_of(tmp_path) == [0, 0]
