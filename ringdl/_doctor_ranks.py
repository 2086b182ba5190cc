"""The doctor under a launcher: what all ranks found, reported by rank 0.

The doctor's own process never loads MPI, which may be broken. So each rank's process starts a child
that takes its place among the ranks, gathers the findings there, and prints them together on rank
0.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple

from ringdl import _cuda_mpi, _doctor, _grid, _mpi, _nccl, _tuning
from ringdl._doctor import Check
from ringdl._errors import UsageError
from ringdl._interpreter import finding_ringdl
from ringdl._launch import Launcher, StoreJob

_SECONDS = 60
_ANSWER = "ringdl: "


def examine(launcher: Launcher | StoreJob, grid: Sequence[int] | None = None) -> list[Check] | None:
    """Check everything on all ranks.

    Args:
        launcher: of several ranks.
        grid: the axes of one that ranks are to be placed in.

    Returns:
        What was found; None on all ranks but the first, which reports.
    """
    own = [check for check in _doctor.examine() if check.name != "tuning"]
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, *map(str, grid or [])],
            env=finding_ringdl(os.environ),
            input=json.dumps([astuple(check) for check in own]),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
            close_fds=False,  # Hydra's ranks talk to it by a file descriptor
        )
        answers = [x for x in child.stdout.splitlines() if x.startswith(_ANSWER)]
        wrong = "" if child.returncode == 0 else _sentence(child)
    except subprocess.TimeoutExpired:
        answers, wrong = [], f"did not find each other within {_SECONDS} s"
    if launcher.rank != 0:
        if wrong:
            print(f"ringdl: rank {launcher.rank}: {wrong}", file=sys.stderr)
        return None
    if wrong or not answers:
        return [*own, Check("ranks", "wrong", wrong or "no rank has told what was found")]
    return [Check(*words) for words in json.loads(answers[-1].removeprefix(_ANSWER))]


def _sentence(child: subprocess.CompletedProcess[str]) -> str:
    """The error that a child ended by."""
    lines = [line for line in child.stderr.splitlines() if line.strip(" -")]
    errors = [line.partition(": ")[2] for line in lines if line.startswith("ringdl._errors.")]
    return [f"exit code {child.returncode}", *lines[-1:], *errors][-1]


def gather(own: Sequence[Check], grid: Sequence[int]) -> list[Check]:
    """The findings of all ranks. Collective."""
    import ringdl

    communicator = ringdl.init()
    found: list[Sequence[Check]] = communicator.allgather_object(own)
    hosts = communicator.memory_hosts()
    algorithm = communicator._shared.algorithm
    checks = [
        *_doctor.merge(found),
        check_ranks(
            communicator._hosts(),
            hosts,
            has_threads=communicator._shared.mpi is None or _mpi.has_thread_multiple(),
        ),
        _doctor.describe_tuning(communicator.tuning, hosts, algorithm and algorithm.name),
    ]
    devices = communicator.allgather_object(communicator.local_device)
    if any(device is not None for device in devices):
        version, why_not = _nccl.version()
        nccl = f"NCCL {version} can reduce there" if version else f"no NCCL: {why_not}"
        ways = f"{_cuda_mpi.tried(communicator)}; {nccl}"
        checks.append(check_devices(devices, communicator._hosts(), ways))
    if grid:
        checks.append(check_grid(hosts, *grid))
    return checks


def check_grid(hosts: Sequence[int], data: int, pipeline: int, model: int) -> Check:
    """Which ranks are where in a grid.

    Args:
        hosts: the number of each rank's host.
        data: the grid's axes; so are the others.
        pipeline: see `ringdl.Grid`.
        model: see `ringdl.Grid`.
    """
    try:
        shape = _grid.shape_for(len(hosts), data, pipeline, model)
    except UsageError as error:
        return Check("grid", "wrong", str(error))
    first, *stages = _grid.describe(hosts, shape).splitlines()
    return Check("grid", "ok", "; ".join([first, *stages]))


def check_devices(devices: Sequence[int | None], hosts: Sequence[int], ways: str) -> Check:
    """Which rank is to use which device.

    Args:
        devices: each rank's, by its number there; None if it has none.
        hosts: the number of each rank's host.
        ways: whether MPI and NCCL take arrays on devices.
    """
    places: dict[tuple[int, int | None], list[int]] = {}
    for rank, place in enumerate(zip(hosts, devices, strict=True)):
        places.setdefault(place, []).append(rank)
    words = []
    for (_, device), ranks in places.items():
        have = "has" if len(ranks) == 1 else "share"
        what = "no device" if device is None else f"device {device}"
        words.append(f"{_doctor.name_ranks(ranks)} {have} {what}")
    is_shared = any(len(ranks) > 1 for ranks in places.values())
    return Check("devices", "note" if is_shared else "ok", f"{', '.join(words)}; {ways}")


def check_ranks(hosts: Sequence[int], memory_hosts: Sequence[int], *, has_threads: bool) -> Check:
    """What ranks that have found each other can do.

    Args:
        hosts: the number of each rank's host.
        memory_hosts: the same, where ranks that share no memory are on hosts of their own.
        has_threads: whether MPI gives THREAD_MULTIPLE.
    """
    count = len(set(hosts))
    where = "one host" if count == 1 else f"{count} hosts ({_tuning.topology(hosts)})"
    text = f"{len(hosts)} on {where} have found each other"
    if count < len(hosts):
        sharing = {count: "share memory", len(hosts): "exchange messages"}
        how = sharing.get(
            len(set(memory_hosts)), "share memory, but on some hosts exchange messages"
        )
        text += f"; those of a host {how}"
    if not has_threads:
        text += "; without THREAD_MULTIPLE, so no progress in the background"
    return Check("ranks", "ok" if has_threads else "note", text)


if __name__ == "__main__":
    grid = [int(axis) for axis in sys.argv[1:]]
    checks = gather([Check(*words) for words in json.load(sys.stdin)], grid)
    import ringdl

    if ringdl.rank() == 0:
        print(_ANSWER + json.dumps([astuple(check) for check in checks]), flush=True)
