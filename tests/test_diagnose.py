"""What ``python -m ringdl diagnose`` says of jobs, while they hang and after they have died."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running import TIMEOUT, call, run_ranks

WAITING = "ranks 0, 2 began allreduce 'second' (float32, shape (1000,)), which rank 1 did not."

pytestmark = pytest.mark.any_mpi


def diagnose(folder: Path, code: int = 1) -> str:
    done = call(sys.executable, "-m", "ringdl", "diagnose", str(folder), timeout=TIMEOUT)
    assert done.returncode == code, done.stdout
    *_, paragraph = done.stdout.strip().splitlines()
    return paragraph


def run(python: str, how: str, folder: Path, during: object = None, **settings: str) -> str:
    ended = run_ranks(
        python,
        3,
        "diverging.py",
        how,
        str(folder),
        folder=folder,
        during=during,  # type: ignore[arg-type]
        RINGDL_FLIGHT_RECORDER=str(folder / "flights"),
        **settings,
    )
    return ended.text


def waiting(folder: Path, pattern: str) -> str:
    """The diagnosis of a job that runs, once it says this."""
    deadline = time.monotonic() + TIMEOUT / 2  # more than what is late
    text = ""
    while time.monotonic() < deadline:
        if any(folder.glob("flights/*/rank*.flight")):
            done = call(
                *(sys.executable, "-m", "ringdl", "diagnose", str(folder / "flights")),
                timeout=TIMEOUT,
            )
            *_, text = done.stdout.strip().splitlines()
            if re.search(pattern, text):
                return text
        time.sleep(0.1)
    raise AssertionError(f"{pattern} in {text}")


def test_nothing_is_wrong(mpi_python: str, tmp_path: Path) -> None:
    text = run(mpi_python, "well", tmp_path)
    assert text.count("all is well") == 3
    text = diagnose(tmp_path / "flights", 0)
    assert text.startswith("All is well: ranks 0-2 began 120")


def test_ranks_that_disagree(mpi_python: str, tmp_path: Path) -> None:
    run(mpi_python, "shape", tmp_path)
    text = diagnose(tmp_path / "flights")
    assert text.startswith("Rank 1 diverged first: allreduce 'second', begun at ")
    assert "has shape (999,) on rank 1, (1000,) on ranks 0, 2." in text
    assert "it failed: ranks disagree on allreduce 'second'" in text


def test_a_rank_that_raises(mpi_python: str, tmp_path: Path) -> None:
    run(mpi_python, "raises", tmp_path)
    text = diagnose(tmp_path / "flights")
    assert re.search(r"Rank 1 ended by ValueError \(.*diverging\.py, line \d+\): a bad file", text)


def test_a_rank_that_shuts_down(mpi_python: str, tmp_path: Path) -> None:
    run(mpi_python, "ends", tmp_path)
    text = diagnose(tmp_path / "flights")
    assert text.startswith("Rank 1 diverged first: at ")
    assert WAITING in text
    assert "it failed: rank 1 has shut down without submitting allreduce 'second'" in text


def test_a_rank_that_is_killed(mpi_python: str, tmp_path: Path) -> None:
    """Most launchers kill the others at once: their records are whole all the same."""
    run(mpi_python, "killed", tmp_path)
    assert len(list(tmp_path.glob("flights/*/rank*.flight"))) == 3
    text = diagnose(tmp_path / "flights")
    if "it failed" in text:  # they had time to find it
        assert text.startswith("Rank 1 diverged first: at ")
        assert "Rank 1 has ended without shutdown(), as others found: it was killed" in text
        return
    assert "or one of ranks 0-2 was killed. Ranks 0, 2 had begun allreduce 'second'" in text
    assert "and rank 1 had not." in text


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("busy", r"Rank 1 is late: .* began allreduce 'first' last, .*waited for on ranks 0, 2"),
        ("leaves out", r"Rank 1 diverged first: .* began allreduce '(second|third)' instead\."),
        ("stopped", r"Rank 1 was seen last at .* before the others: it was killed or stopped\."),
    ],
)
def test_a_job_that_hangs(mpi_python: str, how: str, expected: str, tmp_path: Path) -> None:
    """Nobody has to end it, or to signal it."""

    def during(job: subprocess.Popen[bytes], output: Path) -> None:
        text = waiting(tmp_path, expected)
        if job.poll() is not None:  # it may be started again
            return
        assert WAITING in text or how == "leaves out"
        (tmp_path / "told").touch()
        for record in tmp_path.glob("flights/*/rank1.flight") if how == "stopped" else ():
            process = int.from_bytes(record.read_bytes()[24:32], sys.byteorder)
            os.kill(process, signal.SIGCONT)

    text = run(mpi_python, how, tmp_path, during)
    assert text.count("all is well") == 3, text


def test_a_folder_where_nobody_can_write(mpi_python: str, tmp_path: Path) -> None:
    (tmp_path / "flights").touch()
    text = run(mpi_python, "well", tmp_path)
    assert text.count("all is well") == 3
    assert text.count("keeps no flight record: ") == 3
