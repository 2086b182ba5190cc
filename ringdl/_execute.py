"""How `run` becomes mpirun, or the parent of one that may report success wrongly."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType

from ringdl import _report
from ringdl._mpirun import MPICH, Library
from ringdl._report import RUN_REPORT

# A terminal sends the first two to mpirun, too, which would take a second one for a request to end
# at once.
_ENDING = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1

_SESSION_DIRECTORIES = "PRTE_MCA_prte_local_tmpdir_base"
"""Where Open MPI 5 makes one for mpirun itself, not for what that starts on other hosts."""

_LOOK_SECONDS = 0.2
_TERM_SECONDS = 10.0


def execute(library: Library, command: list[str], restarts: int = 0, elastic: bool = False) -> int:
    """Run mpirun. Returns only if this process stays.

    It stays to start a job again that has failed, as often as it may: one that was told to end is
    not started again.

    Before version 5, MPICH's may end with 0 when a signal ends it: it counts ranks that it has
    killed as successful (https://github.com/pmodels/mpich/pull/5930 mends that).

    Args:
        library: what the ranks load.
        command: mpirun and its arguments.
        restarts: how often it may be started again.
        elastic: whether ranks go on when one fails: then mpirun may report success wrongly, too
            (`ringdl._report`).

    Returns:
        mpirun's exit code; if that is 0, though this process was told to end, 128 and the number of
        the signal, as a shell's.
    """
    if sys.stdout is not None:  # else it was closed
        sys.stdout.flush()
    is_truthful = library.vendor != MPICH or int(library.version.partition(".")[0]) >= 5
    if is_truthful and restarts == 0 and not elastic:
        _avoid_stale_session_directory()
        os.execv(command[0], command)
    listener = _report.Listener() if elastic else None
    received: list[int] = []
    code = _run_below(command, listener, received)
    for restart in range(1, restarts + 1):
        if code == 0 or received:
            break
        print(
            f"ringdl: the job has ended with {code}; it is started again ({restart} of {restarts})",
            file=sys.stderr,
            flush=True,
        )
        code = _run_below(command, listener, received)
    return code


def _run_below(command: list[str], listener: _report.Listener | None, received: list[int]) -> int:
    """The exit code of mpirun; what this process was told to end by is added to `received`."""
    if listener is not None:
        listener.expect()
        os.environ[RUN_REPORT] = str(listener)
    child: subprocess.Popen[bytes] | None = None

    def receive(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if number in _PASSED_ON and child is not None:
            child.send_signal(number)

    for each in {*_ENDING, *_PASSED_ON}:
        if signal.getsignal(each) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(each, receive)
    set_option = ctypes.CDLL(None).prctl

    def prepare() -> None:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)
        _avoid_stale_session_directory()

    child = subprocess.Popen(command, preexec_fn=prepare)
    for number in set(received):  # perhaps before there was a child
        child.send_signal(number)
    code = child.wait() if listener is None else _wait(child, listener)
    received[:] = [number for number in received if number in _ENDING]
    if code == 0 and listener is not None and listener.misses_an_end():
        print("ringdl: mpirun reports success, but no rank has ended well", file=sys.stderr)
        code = 1
    if code == 0 and received:
        code = 128 + received[0]
    return code if code >= 0 else 128 - code


def _avoid_stale_session_directory() -> None:
    """Give Open MPI's mpirun, which this process becomes, another directory if its own is there.

    Its name has the process's id. An mpirun that was killed leaves it, and a later one with the
    same id ends: "The PMIx server's listener thread failed to start". It may also be that of a
    process in another container, so it is not removed.
    """
    with contextlib.suppress(OSError):  # no folder for temporary files: mpirun says so if it minds
        if (Path(tempfile.gettempdir()) / f"ompi.{os.getpid()}").exists():
            os.environ.setdefault(_SESSION_DIRECTORIES, tempfile.mkdtemp(prefix="ringdl."))


def _wait(child: subprocess.Popen[bytes], listener: _report.Listener) -> int:
    """The exit code of mpirun, which is told to end once a rank has failed for all."""
    while not listener.has_failed():
        try:
            return child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    child.terminate()
    try:
        return child.wait(_TERM_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()
