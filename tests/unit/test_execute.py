"""How `run` stays the parent of an mpirun that may report success wrongly."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

MPIRUN = """
import os, signal, sys, time
for number in map(int, sys.argv[1].split(",")):
    signal.signal(number, lambda number, frame: (print("got", number, flush=True), EXIT))
print(os.getpid(), flush=True)
time.sleep(60)
sys.exit(int(sys.argv[2]))
"""

EXECUTE = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup makes tests ignore it
from ringdl._execute import execute
from ringdl._mpirun import Library
library = Library(sys.argv[1], sys.argv[2], Path("libmpi.so"), "4.1.2")
sys.exit(execute(library, [sys.executable, *sys.argv[3:]]))
"""


@contextmanager
def executed(
    folder: Path, version: str, at_signal: str, code: int = 0, vendor: str = "MPICH"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has called execute(), and the id of the mpirun's."""
    mpirun = folder / "mpirun.py"
    numbers = ",".join(str(int(n)) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1))
    mpirun.write_text(MPIRUN.replace("EXIT", at_signal))
    arguments = [vendor, version, str(mpirun), numbers, str(code)]
    with subprocess.Popen(
        [sys.executable, "-c", EXECUTE, *arguments], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


LEAVE = "os._exit(int(sys.argv[2]))"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_end_by_a_signal_is_no_success(tmp_path: Path, number: signal.Signals) -> None:
    with executed(tmp_path, "4.0.2", LEAVE) as (process, mpirun):
        assert mpirun != process.pid
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert process.stdout is not None
        assert process.stdout.read() == f"got {int(number)}\n"


def test_a_code_of_mpirun_is_kept(tmp_path: Path) -> None:
    with executed(tmp_path, "4.0.2", LEAVE, code=7) as (process, _):
        process.terminate()
        assert process.wait(20) == 7


def test_a_signal_that_does_not_end_a_job_is_passed_on(tmp_path: Path) -> None:
    with executed(tmp_path, "4.0.2", LEAVE) as (process, _):
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stdout.read() == f"got {int(signal.SIGUSR1)}\n"


def test_a_terminal_interrupts_mpirun_itself(tmp_path: Path) -> None:
    with executed(tmp_path, "4.0.2", LEAVE) as (process, mpirun):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        os.kill(mpirun, signal.SIGINT)  # the second of a terminal's two
        assert process.wait(20) != 0


def test_an_mpirun_that_dies_of_a_signal(tmp_path: Path) -> None:
    with executed(tmp_path, "4.0.2", LEAVE) as (process, mpirun):
        os.kill(mpirun, signal.SIGKILL)
        assert process.wait(20) == 128 + signal.SIGKILL


def test_mpirun_does_not_outlive_its_parent(tmp_path: Path) -> None:
    with executed(tmp_path, "4.0.2", LEAVE) as (process, _):
        process.kill()
        assert process.stdout is not None
        assert process.stdout.read() == f"got {int(signal.SIGTERM)}\n"  # to its end: mpirun's, too


@pytest.mark.parametrize(("vendor", "version"), [("MPICH", "5.0.2"), ("Open MPI", "4.1.4")])
def test_a_reliable_mpirun_takes_the_place_of_its_caller(
    tmp_path: Path, vendor: str, version: str
) -> None:
    with executed(tmp_path, version, LEAVE, vendor=vendor) as (process, mpirun):
        assert mpirun == process.pid


RESTARTED = """
import sys
from pathlib import Path
from ringdl._execute import execute
from ringdl._mpirun import Library
library = Library("Open MPI", "5.0.11", Path("libmpi.so"), "4.1.2")
sys.exit(execute(library, [sys.executable, "-c", *sys.argv[2:]], int(sys.argv[1])))
"""


@pytest.mark.parametrize(("restarts", "code", "runs"), [(0, 7, 1), (1, 7, 2), (3, 0, 3)])
def test_a_job_that_fails_is_started_again(
    tmp_path: Path, restarts: int, code: int, runs: int
) -> None:
    """This one succeeds when it runs for the third time."""
    program = (
        "import sys; file = open(sys.argv[1], 'a+'); file.write('x'); file.seek(0); "
        "sys.exit(0 if file.read() == 'xxx' else 7)"
    )
    count = tmp_path / "runs"
    job = [sys.executable, "-c", RESTARTED, str(restarts), program, str(count)]
    ended = subprocess.run(job, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, len(count.read_text())) == (code, runs), ended.stderr
    assert ended.stderr.count("ended with 7; it is started again") == runs - 1


FAILING = """
import sys
from pathlib import Path
from ringdl._execute import execute
from ringdl._mpirun import Library
library = Library("Open MPI", "5.0.11", Path("libmpi.so"), "4.1.2")
sys.exit(execute(library, [sys.executable, "-c", sys.argv[1]], elastic=True))
"""


def test_a_rank_that_fails_for_all_ends_mpirun() -> None:
    rank = "import time; from ringdl import _report; _report.tell(_report.FAILED); time.sleep(60)"
    job = [sys.executable, "-c", FAILING, rank]
    ended = subprocess.run(job, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 143, ended.stderr
