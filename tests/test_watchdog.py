"""What a job says of itself while it waits: the watchdog, RINGDL_DEBUG, and SIGUSR1."""

import re
import subprocess
import time
from pathlib import Path

from tests.running import JOBS, TIMEOUT, run_job

LATE = (
    r"ringdl: allreduce 'late' has been in flight for \d+ s: rank 1 has not arrived "
    r"\(allreduce on one host: 2 of 3 ranks have announced .* on rank 0\)"
)
EARLIER = r"ringdl: allreduce 'earlier' has been in flight for \d+ s: rank 1 has not arrived"
ENDING = r"ringdl: shutdown\(\) has waited \d+ s for rank 1, which did not call it yet"
HOLDS = (
    r"ringdl: rank {}: 2 works in flight",
    r"ringdl: rank {}: allreduce 'late', \d+ ms: allreduce on one host",
)


STARTS = r"ringdl: .*rank 0 of 3.* has waited 1 s until MPI has connected the ranks: some rank"


def errors_of(
    python: str,
    folder: Path,
    *expected: str,
    how: str = "",
    script: str = "watched.py",
    **settings: str,
) -> str:
    """Run a job whose rank 1 comes when all of this has been said; all that was."""

    def wait(job: subprocess.Popen[bytes], output: Path) -> None:
        errors = output.with_name("errors")
        deadline = time.monotonic() + TIMEOUT / 2
        while time.monotonic() < deadline and job.poll() is None:
            text = errors.read_text(errors="replace")
            if all(re.search(pattern, text) for pattern in expected):
                break
            time.sleep(0.05)
        if job.poll() is None:  # else it may be started again, and is to wait again
            (folder / "told").touch()

    command = [python, "-m", "ringdl", "run", "-n", "3", str(JOBS / script), str(folder), how]
    ended = run_job(command, folder, during=wait, **settings)
    assert ended.code == 0, ended.text
    assert ended.output.count("all is well") == 3, ended.text
    for pattern in expected:
        assert re.search(pattern, ended.errors), f"{pattern} in {ended.text}"
    return ended.errors


def test_the_watchdog_names_who_has_not_come(mpi_python: str, tmp_path: Path) -> None:
    errors = errors_of(mpi_python, tmp_path, LATE, EARLIER, RINGDL_WATCHDOG="1")
    assert "works in flight" not in errors
    assert not re.search(r"is in flight .* on rank [12]\)", errors), "one rank tells, the lowest"


def test_the_watchdog_names_who_has_not_ended(mpi_python: str, tmp_path: Path) -> None:
    errors = errors_of(mpi_python, tmp_path, ENDING, how="end", RINGDL_WATCHDOG="1")
    assert errors.count("shutdown() has waited 1 s") == 1, "one rank tells, the lowest"


def test_a_rank_that_does_not_start_is_told_of(mpi_python: str, tmp_path: Path) -> None:
    errors_of(mpi_python, tmp_path, STARTS, script="starts_late.py", RINGDL_WATCHDOG="1")


def test_ranks_end_if_one_does_not_start(mpi_python: str, tmp_path: Path) -> None:
    command = [mpi_python, "-m", "ringdl", "run", "-n", "3", str(JOBS / "starts_late.py")]
    ended = run_job([*command, str(tmp_path)], tmp_path, RINGDL_TIMEOUT="2")
    assert ended.code not in (0, None), ended.text
    assert re.search(
        r"ends, as it has waited 2 s .* until MPI has connected the ranks", ended.errors
    ), ended.text


def test_ranks_that_wait_dump_their_works(mpi_python: str, tmp_path: Path) -> None:
    expected = [pattern.format(rank) for pattern in HOLDS for rank in (0, 2)]
    errors = errors_of(mpi_python, tmp_path, LATE, *expected, RINGDL_WATCHDOG="1", RINGDL_DEBUG="1")
    assert "ringdl: rank 1:" not in errors


def test_a_signal_dumps_one_rank(mpi_python: str, tmp_path: Path) -> None:
    expected = [pattern.format(0) for pattern in HOLDS]
    errors = errors_of(mpi_python, tmp_path, *expected, how="signal", RINGDL_WATCHDOG="0")
    assert "ringdl: rank 2:" not in errors
    assert "is in flight" not in errors
