"""A newcomer: what MPI starts in place of a rank that has failed, until it has joined.

It runs what that one has run: the same script, with the same arguments, environment and folder.
`_newcomers` has the other side. Nothing but the standard library and mpi4py is loaded before the
environment is there: libraries read from it with how many threads they compute.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from contextlib import ExitStack
from typing import NoReturn

from ringdl import _newcomers, _recovery, _startup
from ringdl._errors import Error, UsageError
from ringdl._launch import detect
from ringdl._newcomers import Meeting, Replacing
from ringdl._script import OF_ONE_JOB, Script
from ringdl._settings import read_settings

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
    with _mpi.waiting(_WHO, read_settings(os.environ), "it has met the ranks that are left"):
        mpi = _mpi.load_mpi(launcher)
        link = mpi.Comm.Get_parent()
        try:
            _inherited = link.recv(source=0, tag=_newcomers.SCRIPT)
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
