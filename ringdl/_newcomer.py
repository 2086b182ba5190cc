"""A newcomer: what MPI starts in place of a rank that has failed, until it has joined.

It runs what that one has run: the same script, with the same arguments, environment and folder.
`_newcomers` has the other side. Nothing but the standard library and mpi4py is loaded before the
environment is there: libraries read from it with how many threads they compute.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from ringdl import _newcomers, _recovery, _startup
from ringdl._errors import Error, UsageError
from ringdl._launch import detect
from ringdl._newcomers import Meeting, Replacing
from ringdl._script import OF_ONE_JOB, Script
from ringdl._settings import read_settings

_ENDS_WITH = """
import os, select, signal, sys
while not select.select([0], [], [], 0.5)[0]:
    if not any(os.path.exists("/proc/" + each) for each in sys.argv[1:]):
        os.kill(os.getppid(), signal.SIGKILL)
"""
"""Until its input ends, sees to it that its parent does not outlive all of some processes."""

_WHO = "a rank that was started in place of a failed one"
_POLL_SECONDS = 0.01

_meeting: Meeting | None = None
"""With the ranks that it is to join."""
_inherited: tuple[Script, dict[str, str]]
"""What it runs, and with which environment."""
_has_joined = True
_late = ExitStack()
"""Ends it in time, if it never comes to `join`."""


def main() -> None:
    """Run the script, until it ends, or this process does."""
    process = os.getpid()
    try:
        script = _greet()
        sys.argv = [script.name, *script.words]
        if script.is_module:
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script.name, run_name="__main__")
    except BaseException as error:
        if not _has_joined and os.getpid() == process:
            from ringdl import _mpi

            _mpi.end_alone(error)
        raise
    if not _has_joined and os.getpid() == process:
        _leave("the script has ended without ringdl.elastic.run()")


def _greet() -> Script:
    """Meet those that have started it.

    Returns:
        What it has to run.
    """
    global _has_joined, _inherited, _meeting
    from ringdl import _mpi

    _has_joined, _mpi.may_shrink = False, True
    launcher = detect(os.environ)
    late = _mpi.waiting(_WHO, read_settings(os.environ), "it has met the ranks that are left")
    with _ends_with(sys.argv[-1].split(",")), late:
        mpi = _mpi.load_mpi(launcher)
        try:
            starter = mpi.Comm.Get_parent()
            _inherited = starter.recv(source=0, tag=_newcomers.SCRIPT)
            link = _newcomers.connect(mpi.COMM_WORLD, starter.Merge(high=True), is_new=True)
            are_there = _newcomers.exchange(link, True)
            if not (_newcomers.exchange(link, are_there) and are_there):
                _leave("another rank has failed meanwhile")
            _meeting = _newcomers.meet(link, is_new=True)
        except (mpi.Exception, Error, UsageError) as error:
            _leave(str(error))
    script, environment = _inherited
    os.environ.update(environment)
    for name in OF_ONE_JOB:
        os.environ.pop(name, None)
    _late.enter_context(
        _mpi.waiting(
            _WHO,
            read_settings(os.environ),
            "its script calls ringdl.elastic.run()",
            "it computes for as long before, or does not call it",
            "",
        )
    )
    return script


@contextmanager
def _ends_with(starters: Sequence[str]) -> Iterator[None]:
    """End this process if all of those have ended meanwhile: MPI_Init may wait for them for ever.

    Another process does it, as the interpreter's lock is held in MPI_Init.

    Args:
        starters: ids of processes.
    """
    command = [sys.executable, "-I", "-S", "-c", _ENDS_WITH, *starters]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet):
        yield


def has_joined() -> bool:
    """Whether this process is a rank of the job, not a newcomer."""
    return _has_joined


def join() -> None:
    """Become a rank of the job that this newcomer was started by. Collective, with `admit`.

    Ends the process if that has ended.
    """
    global _has_joined, _meeting
    assert _meeting is not None
    _late.close()
    old = range(_meeting.old)
    _meeting.say(_meeting.comm.Get_rank(), old, _newcomers.READY)
    while (answer := _meeting.receive(_newcomers.ANSWER)) is None:
        if _meeting.lost() >= set(old):
            _leave("those that it was to join have ended")
        time.sleep(_POLL_SECONDS)
    if answer == _newcomers.END:
        _leave("training has ended")
    size, left = answer
    _newcomers.replacing = Replacing(size, left, *_inherited)
    _meeting.follow(_startup.get_communicator()._shared)
    _has_joined, _meeting = True, None
    _recovery.go_on()


def _leave(why: str) -> NoReturn:
    """End this newcomer, which nobody needs."""
    print(f"ringdl: {_WHO} ends without having joined: {why}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
