"""Whole jobs in a subprocess, for tests of how they end, what they cost, and what they say.

After every job no process of it may be left.
"""

import os
import re
import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

JOBS = Path(__file__).parent / "jobs"
EVERYTHING = os.environ.get("RINGDL_TEST_ALL") == "1"
TIMEOUT = 60
SOON = 5  # seconds within which a job ends once a rank has failed
MARK = "RINGDL_TEST_JOB"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # jobs would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    errors: str
    at: float  # time.monotonic(), which is the same clock in all processes of a host

    @property
    def text(self) -> str:
        return self.output + self.errors

    def seconds_since(self, event: str) -> float:
        moments = re.findall(rf"{event} at (\S+)", self.output)
        assert moments, self.text
        return self.at - float(moments[-1])


def processes_of(mark: str) -> list[int]:
    """Processes that inherited this mark in their environment, whatever group they are in."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def kill_all(mark: str) -> list[str]:
    """Kill what is left of a job; what that was."""
    left = []
    for process in processes_of(mark):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            left.append(f"{process}: {b' '.join(words).decode()}{_threads_of(process)}")
            os.kill(process, signal.SIGKILL)
        except OSError:
            continue
    return left


def _threads_of(process: int) -> str:
    """What each of its threads is at: its state, where it sleeps, in which call of the kernel."""
    text = ""
    for thread in sorted(Path(f"/proc/{process}/task").glob("*")):
        for file in ("comm", "stat", "wchan", "syscall", "stack"):
            try:
                words = (thread / file).read_text().split()
            except OSError:  # no such thread now, or not for this user
                continue
            if file == "stat":
                state, user, system = words[-50], words[-39], words[-38]
                words = [state, f"{user}+{system} ticks"]
            text += ("\n    " if file == "comm" else ", ") + " ".join(words)
    return text


def pretended_cuda() -> str:
    """The folder of a libcuda.so.1 that pretends to have devices: tests/csrc/cuda."""
    library = next(ROOT.glob("build/*/tests/libcuda.so.1"), None)
    if library is None:
        pytest.skip("the engine's own tests are not built: make test-csrc")
    return str(library.parent)


def run_job(
    command: list[str],
    folder: Path,
    *,
    during: Callable[[subprocess.Popen[bytes], Path], None] | None = None,
    timeout: float = TIMEOUT,
    cwd: Path | None = None,
    **environment: str,
) -> Ended:
    """Run a command in a process group of its own, as a terminal does, until nothing is left."""
    mark = uuid.uuid4().hex
    settings = {
        MARK: mark,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    output, errors = folder / "output", folder / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        job = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            process_group=0,
            env=os.environ | settings | environment,
        )
        try:
            if during is not None:
                during(job, output)
            code = job.wait(timeout)
            ended = time.monotonic()
            while processes_of(mark) and time.monotonic() < ended + 2:
                time.sleep(0.05)
        except subprocess.TimeoutExpired:
            code, ended = None, time.monotonic()
        finally:
            left = kill_all(mark)
            job.wait()
    text = [path.read_text(errors="replace") for path in (output, errors)]
    remains = "\n".join(left)
    why = f"{shlex.join(command)} ran past {timeout} s:\n{''.join(text)}\n{remains}"
    assert code is not None, why
    assert not left, f"left behind: {remains}\n{''.join(text)}"
    return Ended(code, *text, ended)


def call(
    *words: str, timeout: float, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, both outputs in one; it finds ringdl and the tests."""
    return subprocess.run(
        words,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
    )


def run_ranks(
    python: str,
    ranks: int,
    script: str,
    *arguments: str,
    folder: Path,
    during: Callable[[subprocess.Popen[bytes], Path], None] | None = None,
    timeout: float = TIMEOUT,
    **environment: str,
) -> Ended:
    command = [python, "-m", "ringdl", "run", "-n", str(ranks), str(JOBS / script), *arguments]
    return run_job(command, folder, during=during, timeout=timeout, **environment)
