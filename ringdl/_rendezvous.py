"""How ranks that no MPI has started find each other: through the store of PyTorch's launchers.

torchrun and ``accelerate launch`` host a TCPStore at MASTER_ADDR and MASTER_PORT; where these were
set by hand, rank 0 hosts it. Each rank writes there where it listens and which host it is on; then
all connect, and the store is not used any more. A later ``torch.distributed.init_process_group``
finds it unchanged.

PyTorch is imported here, and only in such a job.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from ringdl import _engine, _sockets
from ringdl._cores import read_cores
from ringdl._errors import StallError, UsageError
from ringdl._launch import StoreJob
from ringdl._mpi import Hosts, check_versions, count_cores
from ringdl._sockets import Endpoint
from ringdl._version import __version__

_store: Any = None
"""Kept for good: where rank 0 hosts it, others may use it later."""

_meetings = 0
"""How often this process has met others: each time under other keys."""


@dataclass(frozen=True)
class Member:
    """What a rank announces to the others.

    Attributes:
        endpoint: where it listens.
        machine: the same for ranks that can map each other's memory, as far as is known.
        cpus: logical CPUs it may run on.
        quota: CPUs' worth of time that its cgroup grants; None if not limited.
        version: of ringdl.
    """

    endpoint: Endpoint
    machine: tuple[str, ...]
    cpus: tuple[int, ...]
    quota: float | None
    version: str = __version__

    def to_json(self) -> str:
        """As text, for `from_json`."""
        end = self.endpoint
        return json.dumps(
            [
                [end.address, end.port, end.secret.hex()],
                [self.machine, self.cpus, self.quota, self.version],
            ]
        )

    @staticmethod
    def from_json(text: str | bytes) -> Member:
        """The inverse of `to_json`."""
        (address, port, secret), (machine, cpus, quota, version) = json.loads(text)
        endpoint = Endpoint(address, port, bytes.fromhex(secret))
        return Member(endpoint, tuple(machine), tuple(cpus), quota, version)


def open_engine(
    job: StoreJob, environ: Mapping[str, str], timeout: float
) -> tuple[_engine.Communicator, Hosts]:
    """Find the other ranks and connect with them. Collective.

    Args:
        job: of `ringdl._launch.detect_store_job`.
        environ: ``os.environ`` or a copy of one.
        timeout: seconds for each of finding and connecting.

    Raises:
        UsageError: no PyTorch, no MASTER_ADDR and MASTER_PORT, a rank that is there twice, or ranks
            with other versions of ringdl.
        StallError: not all ranks have arrived in time.
        Error: a rank cannot be reached.
    """
    global _meetings
    address, port = _master(job, environ)
    store = _open_store(job, timeout)
    _meetings += 1
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    listener, endpoint = _sockets.listen(_sockets.own_address(address, port))
    with listener:
        cpus = tuple(sorted(os.sched_getaffinity(0)))
        own = Member(endpoint, own_machine(), cpus, read_cores().quota)
        texts = meet(store, f"ringdl/{run}/{_meetings}", job, own.to_json(), timeout)
        members = [Member.from_json(text) for text in texts]
        check_versions([member.version for member in members])
        endpoints = [member.endpoint for member in members]
        sockets = _sockets.connect(job.rank, endpoints, listener, timeout)
    return _engine.over_sockets(job.rank, sockets), find_hosts(job.rank, members)


def _master(job: StoreJob, environ: Mapping[str, str]) -> tuple[str, int]:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdigit():
        raise UsageError(
            f"{job} says that there are {job.size} ranks, but not where: set MASTER_ADDR and "
            "MASTER_PORT to a port of rank 0's host, or start with torchrun, "
            f"`mpirun -n {job.size}` or `python -m ringdl run -n {job.size}`; if this process is "
            "to be alone, unset WORLD_SIZE"
        )
    return address, int(port)


def _open_store(job: StoreJob, timeout: float) -> Any:
    global _store
    if _store is not None:
        return _store
    try:
        from torch.distributed import rendezvous  # type: ignore[attr-defined]
    except ImportError as error:
        raise UsageError(
            f"{job} says that there are {job.size} ranks, which find each other through PyTorch's "
            f"store, and PyTorch cannot be used ({error}): install it, or start with "
            f"`mpirun -n {job.size}` or `python -m ringdl run -n {job.size}`, which need none"
        ) from error
    try:
        meeting = rendezvous("env://", job.rank, job.size, timeout=timedelta(seconds=timeout))
        _store = next(iter(meeting))[0]
    except (RuntimeError, ValueError) as error:
        raise StallError(
            f"rank {job.rank} has not found the store of the job at MASTER_ADDR="
            f"{os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}: {error}"
        ) from error
    return _store


def meet(store: Any, prefix: str, job: StoreJob, own: str, timeout: float) -> list[str]:
    """Send all ranks this one's text, and receive theirs. Collective.

    torchrun keeps its store when it starts ranks anew, with the texts of those before. So each rank
    marks its own; rank 0 collects, and tells all of them with their marks, again if some rank does
    not find its own there. Once all have, they have met. All together ask the store some seven
    times per rank.

    Args:
        store: of PyTorch, shared by the ranks.
        prefix: of keys that this process has not used before.
        job: this rank's.
        own: its text.
        timeout: in seconds.

    Returns:
        The texts of all ranks, by rank.

    Raises:
        UsageError: another process has arrived as this rank.
        StallError: not all have arrived in time.
    """
    meeting = _Meeting(store, prefix, job, own)
    step = meeting.collect if job.rank == 0 else meeting.hear
    pause, deadline = 0.001, time.monotonic() + timeout
    while not step():
        if time.monotonic() > deadline:
            raise StallError(
                f"rank {job.rank} of {job.size} has not met all others in ringdl.init() within "
                f"{timeout:g} s: the ranks {meeting.missing() or 'that collect'} have not arrived; "
                "look what they do, or whether WORLD_SIZE is right"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return meeting.texts


class _Meeting:
    """This rank's part of `meet`.

    The keys in the store:

        RANK            a rank's mark, process and text
        all, head       those of all ranks and, written after them, which version that is
        VERSION/RANK    the rank has found its mark there
        VERSION/done    all have
        again/MARK      how often some rank has not, in what the rank 0 of this mark told
    """

    def __init__(self, store: Any, prefix: str, job: StoreJob, own: str) -> None:
        self._store, self._prefix, self._rank, self._job = store, prefix, job.rank, job
        self._mark = secrets.token_hex(8)
        self._places = [f"{prefix}/{rank}" for rank in range(job.size)]
        self._head: Any = None
        self._version = ""
        self._again = -1
        self.texts: list[str] = []
        place = self._places[job.rank]
        if store.check([place]) and _is_alive(json.loads(store.get(place))[1]):
            self._refuse_second()
        store.set(place, json.dumps([self._mark, _own_process(), own]))

    def collect(self) -> bool:
        """Of rank 0; whether all have met."""
        others = range(1, self._job.size)
        found = [f"{self._prefix}/{self._version}/{rank}" for rank in others]
        if self._version and (not found or self._store.check(found)):
            self._store.set(f"{self._prefix}/{self._version}/done", "")
            return True
        again = self._store.add(f"{self._prefix}/again/{self._mark}", 0)
        if again != self._again and self._store.check(self._places):
            self._again = again
            rows = [json.loads(self._store.get(place)) for place in self._places]
            self._take(rows)
            self._store.set(f"{self._prefix}/all", json.dumps(rows))
            self._store.set(f"{self._prefix}/head", self._version)
        return False

    def hear(self) -> bool:
        """Of the others; whether all have met."""
        if self._version and self._store.check([f"{self._prefix}/{self._version}/done"]):
            return True
        if not self._store.check([f"{self._prefix}/head"]):
            return False
        head = self._store.get(f"{self._prefix}/head")
        if head == self._head:
            return False
        self._head = head
        rows = json.loads(self._store.get(f"{self._prefix}/all"))
        # Whoever came last meets: rank 0 may have read the place before.
        if json.loads(self._store.get(self._places[self._rank]))[0] != self._mark:
            self._refuse_second()
        if len(rows) == self._job.size and rows[self._rank][0] == self._mark:
            self._take(rows)
            self._store.set(f"{self._prefix}/{self._version}/{self._rank}", "")
            return False
        self._store.add(f"{self._prefix}/again/{rows[0][0]}", 1)
        return False

    def missing(self) -> list[int]:
        """The ranks that have not come, as far as this one knows."""
        keys = [*enumerate(self._places)]
        if self._rank == 0 and self._version:
            keys = [(r, f"{self._prefix}/{self._version}/{r}") for r in range(1, self._job.size)]
        return [rank for rank, key in keys if not self._store.check([key])]

    def _take(self, rows: list[Any]) -> None:
        marks = ",".join(mark for mark, _, _ in rows)
        self._version = hashlib.sha256(marks.encode()).hexdigest()[:16]
        self.texts = [str(text) for _, _, text in rows]

    def _refuse_second(self) -> None:
        raise UsageError(
            f"another process is rank {self._rank} of {self._job.size} already: if this one was "
            "started by it, as a DataLoader's workers are, it must not call ringdl.init(); else "
            "give each process a RANK of its own"
        )


def _own_process() -> list[Any]:
    return [*own_machine(), os.getpid(), _started(os.getpid())]


def _is_alive(process: list[Any]) -> bool:
    """Whether a process of `_own_process` runs, as far as can be seen from here."""
    *machine, number, started = process
    return machine == [*own_machine()] and started == _started(number)


def _started(process: int) -> str | None:
    """When it was started, in ticks since the machine was; None if it does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def own_machine() -> tuple[str, ...]:
    """What ranks that can map each other's memory have in common.

    They see the same processes and files of the same running kernel; a host name of its own makes
    a host.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "mnt")]
    return (socket.gethostname(), boot, *spaces)


def find_hosts(rank: int, members: list[Member]) -> Hosts:
    """Group the ranks by machine; hosts are ordered by their lowest rank."""
    machines = list(dict.fromkeys(member.machine for member in members))
    numbers = [machines.index(member.machine) for member in members]
    local = [member for member in members if member.machine == members[rank].machine]
    return Hosts(
        numbers=numbers,
        local_rank=numbers[:rank].count(numbers[rank]),
        local_size=len(local),
        cores=count_cores([(member.cpus, member.quota) for member in local]),
    )
