"""A newcomer: what MPI starts in place of a rank that has failed, until it has joined.

It runs what that one has run: the same script, with the same arguments, environment and folder.
`_newcomers` has the other side, `_meeting` what both do. Nothing but the standard library and
mpi4py is loaded before the environment is there: libraries read from it with how many threads they
compute.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from ringdl import _newcomers, _recovery, _startup
from ringdl._errors import Error, UsageError
from ringdl._launch import detect
from ringdl._meeting import ANSWER, END, READY, SCRIPT, Meeting, connect, exchange, meet
from ringdl._newcomers import Replacing
from ringdl._script import OF_ONE_JOB, Script
from ringdl._settings import read_settings

_ENDS_WITH = """
import os, select, signal, sys

def is_alive():
    try:
        with open("/proc/" + sys.argv[1] + "/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        return False

if is_alive():
    os.write(1, b".")
    while is_alive():
        if select.select([0], [], [], 0.005)[0]:
            sys.exit()
os.kill(os.getppid(), signal.SIGKILL)
"""
"""Until its input ends, kills its parent once a process has ended; a byte says that it looks."""

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
    with _ends_with(sys.argv[-1]), late:
        mpi = _mpi.load_mpi(launcher)
        try:
            starter = mpi.Comm.Get_parent()
            _inherited = starter.recv(source=0, tag=SCRIPT)
            link = connect(mpi.COMM_WORLD, starter.Merge(high=True), is_new=True)
            are_there = exchange(link, True)
            if not (exchange(link, are_there) and are_there):
                _leave("another rank has failed meanwhile")
            _meeting = meet(link, is_new=True)
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
def _ends_with(starter: str) -> Iterator[None]:
    """End this process if that one ends meanwhile, at best before MPI_Init connects the two.

    Where MPI_Init begins to, Open MPI waits for ever for who has failed, and its launcher (PRRTE
    3.0, in connect_release) writes past an array, and crashes now and then, with the whole job.
    Another process looks, as the interpreter's lock is held in MPI_Init.

    Args:
        starter: the id of the process that has started this one.
    """
    command = [sys.executable, "-I", "-S", "-c", _ENDS_WITH, starter]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.read(1)
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
    _meeting.say(_meeting.comm.Get_rank(), old, READY)
    while (answer := _meeting.receive(ANSWER)) is None:
        if _meeting.lost() >= set(old):
            _leave("those that it was to join have ended")
        time.sleep(_POLL_SECONDS)
    if answer == END:
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
