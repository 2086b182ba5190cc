"""How many cores this process may use: affinity, hardware threads, and the cgroup's CPU quota."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cores:
    """What the operating system grants this process.

    Attributes:
        cpus: logical CPUs in its affinity mask.
        cores: physical cores among them; hardware threads of one core count once.
        online: logical CPUs of the machine.
        quota: CPUs' worth of time its cgroup grants, for example 1.5; None if not limited.
    """

    cpus: int
    cores: int
    online: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """How many ranks can run at the same time, one per core; at least 1."""
        limit = self.cores if self.quota is None else min(self.cores, math.floor(self.quota))
        return max(1, limit)

    @property
    def whole_machine(self) -> bool:
        """Whether neither the affinity mask nor the quota takes anything away."""
        return self.cpus >= self.online and (self.quota is None or self.quota >= self.cores)


def read_cores() -> Cores:
    """Ask the operating system about this process."""
    cpus = os.sched_getaffinity(0)
    return Cores(
        cpus=len(cpus),
        cores=count_physical(cpus),
        online=os.cpu_count() or len(cpus),
        quota=read_quota(),
    )


def count_physical(cpus: set[int], root: Path = Path("/")) -> int:
    """Count the physical cores that the logical ``cpus`` belong to.

    Where the machine does not report which hardware threads are siblings, each CPU counts.

    Args:
        cpus: numbers of logical CPUs.
        root: where ``sys/`` lies; tests give another.
    """
    found = set()
    for cpu in cpus:
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            found.add(siblings.read_text().strip())
        except OSError:
            found.add(f"cpu{cpu}")
    return len(found)


def read_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this process's cgroup and its parents, in CPUs; None if unlimited.

    Reads cgroup v2 (``cpu.max``) and v1 (``cpu.cfs_quota_us``).

    Args:
        root: where ``proc/`` and ``sys/`` lie; tests give another.
    """
    quotas = [quota for group in cgroups("cpu", root) if (quota := _quota_of(group)) is not None]
    return min(quotas, default=None)


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The directories of this process's cgroup, from its own up to the mount.

    Inside a container the path in /proc may be the host's: what does not exist is to be skipped.

    Args:
        controller: of cgroup v1: "cpu" or "memory".
        root: where ``proc/`` and ``sys/`` lie; tests give another.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth])


def _quota_of(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max", or no such file
