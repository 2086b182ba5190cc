"""``python -m ringdl compare``: every policy learns, and reports what it has cost."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest

from ringdl.compare._policies import CHOICES
from ringdl.compare._run import Run
from tests.running import EVERYTHING, run_ranks

pytest.importorskip("sklearn")

RANKS = (2, 4) if EVERYTHING else (2,)
POLICIES = [*CHOICES] if EVERYTHING else ["AllReduce", "AsyncGossip", "ParameterServer"]


def compare(python: str, *words: str, folder: Path) -> tuple[str, list[dict]]:
    file = folder / "found.json"
    ended = subprocess.run(
        [python, "-m", "ringdl", "compare", *words, f"--json={file}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads(file.read_text())


@pytest.mark.any_mpi(always=True)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_policy_learns_what_the_default_does(
    mpi_python: str, ranks: int, tmp_path: Path
) -> None:
    """To its accuracy, but for 0.01, with at most twice its examples."""
    words = ("--tasks", "digits", "--ranks", str(ranks), "--seeds", "1", "--octaves", "1")
    output, (found,) = compare(mpi_python, *words, "--policies", *POLICIES, folder=tmp_path)
    rows = {row["policy"]: row for row in found["rows"]}
    assert rows.keys() == {name for name in CHOICES if any(each in name for each in POLICIES)}
    assert rows["AllReduce"]["accuracy"][0] >= 0.94
    late = {policy: row["examples"] for policy, row in rows.items() if not row["examples"] <= 2}
    assert not late, output
    for policy, row in rows.items():
        assert row["bytes"] > 0, policy
        assert row["distance"] > 0 or policy == "AllReduce", policy


@pytest.mark.any_mpi(always=True)
@pytest.mark.alone
@pytest.mark.parametrize("ranks", RANKS)
def test_the_slow_rank_is_as_slow_as_asked(mpi_python: str, ranks: int, tmp_path: Path) -> None:
    """Of three seeds' times the median: the machine may have become slower between the two."""
    words = ("--tasks", "digits", "--ranks", str(ranks), "--seeds", "3", "--octaves", "1")
    _, (found,) = compare(mpi_python, *words, "--policies", "AllReduce", folder=tmp_path)
    seconds = {
        slow: median(
            curve["seconds"][-1]
            for curve in found["curves"]
            if curve["run"]["steps"] > 64 and curve["run"]["slow"] == slow
        )
        for slow in (1, 4)
    }
    assert 3 < seconds[4] / seconds[1] < 5


@pytest.mark.any_mpi
def test_other_hosts_do_not_see_what_is_asked(mpi_python: str, tmp_path: Path) -> None:
    """Rank 0 alone has the file of runs, and writes that of results."""
    (tmp_path / "start.py").write_text(
        """
import runpy
import sys

import ringdl

if ringdl.init().rank > 0:
    sys.argv[1:] = ["/nowhere/runs", "/nowhere/results"]
runpy.run_module("ringdl.compare._worker", run_name="__main__")
"""
    )
    run = Run("digits", "AllReduce", 0.1, 0, 32, 32)
    (tmp_path / "runs").write_text(json.dumps(asdict(run)) + "\n")
    files = [str(tmp_path / name) for name in ("runs", "results")]
    ended = run_ranks(mpi_python, 2, str(tmp_path / "start.py"), *files, folder=tmp_path)
    assert ended.code == 0, ended.text
    assert json.loads(Path(files[1]).read_text())["ranks"] == 2
