"""What the figures depend on: processor, caches, memory, MPI, versions. Names nobody's machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ringdl import _engine, _mpirun
from ringdl._cores import cgroups, count_physical
from ringdl._version import __version__

if TYPE_CHECKING:
    from ringdl import Communicator

_THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Machine:
    """Where it was measured.

    Attributes:
        ranks: how many.
        hosts: how many they are on.
        cpu: what the processor calls itself.
        simd: the instructions that ringdl reduces with.
        cores_usable: cores that the ranks of rank 0's host may use, together.
        cores_of_rank_0: cores that rank 0 may use; fewer if ranks are bound.
        crowded: whether there are more ranks than cores there.
        load: processes that ran or wanted to on rank 0's host, in the minute before.
        cache_bytes: by name (``"L2"``), of one core; empty if the system does not report them.
        device: rank 0's CUDA device, if arrays lie there, and how many there are; else empty.
        kernel: Linux's version.
        mpi: the library with its version, and the level of threads; None without MPI.
        ringdl: its version.
        numpy: its version.
        python: its version.
    """

    ranks: int
    hosts: int
    cpu: str
    simd: str
    cores_usable: int
    cores_of_rank_0: int
    crowded: bool
    load: float
    cache_bytes: dict[str, int]
    device: str
    kernel: str
    mpi: str | None
    ringdl: str
    numpy: str
    python: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def describe(communicator: Communicator, world: Any, device: int | None = None) -> Machine:
    """Describe rank 0's host. Collective.

    Args:
        communicator: of all ranks.
        world: the mpi4py communicator below it, or None.
        device: the number of this rank's CUDA device, if arrays lie there.
    """
    cpus = communicator.allgather_object((communicator.host_rank, os.sched_getaffinity(0)))
    union = set[int]().union(*(mask for host, mask in cpus if host == 0))
    return Machine(
        ranks=communicator.size,
        hosts=communicator.host_count,
        cpu=cpu_model(Path("/proc/cpuinfo").read_text()),
        simd=_engine.simd_level(),
        cores_usable=count_physical(union),
        cores_of_rank_0=count_physical(cpus[0][1]),
        crowded=sum(host == 0 for host, _ in cpus) > count_physical(union),
        load=round(os.getloadavg()[0], 2),
        cache_bytes=read_caches(),
        device="" if device is None else device_name(_engine.cuda_devices(), device),
        kernel=kernel_version(platform.release()),
        mpi=None if world is None else _name_mpi(),
        ringdl=__version__,
        numpy=np.__version__,
        python=platform.python_version(),
    )


def cpu_model(cpuinfo: str) -> str:
    """The processor's name, from the text of /proc/cpuinfo."""
    match = re.search(r"^model name\s*: (.*)", cpuinfo, re.MULTILINE)
    return " ".join(match[1].split()) if match else platform.machine()


def device_name(devices: Sequence[_engine.CudaDevice], number: int) -> str:
    """A device's name, and whether there are others."""
    name = devices[number].name
    return name if len(devices) == 1 else f"{name}, one of {len(devices)}"


def kernel_version(release: str) -> str:
    """The numbers of a kernel's release, without what a builder has added."""
    match = re.match(r"\d+(\.\d+)*", release)
    return match[0] if match else release


def read_caches(root: Path = Path("/")) -> dict[str, int]:
    """Bytes of the data caches of the first core, by name, the largest last.

    Args:
        root: where ``sys/`` lies; tests give another.
    """
    found: dict[str, int] = {}
    for index in sorted(root.glob("sys/devices/system/cpu/cpu0/cache/index*")):
        try:
            kind, level, size = (
                (index / name).read_text().strip() for name in ("type", "level", "size")
            )
        except OSError:
            continue
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind != "Instruction" and match:
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[match[2]]
            found[f"L{level}"] = int(match[1]) * unit
    return dict(sorted(found.items()))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that processes of this host may still take: the kernel's estimate, and the cgroups'.

    Args:
        root: where ``proc/`` and ``sys/`` lie; tests give another.
    """
    text = (root / "proc/meminfo").read_text()
    match = re.search(r"MemAvailable:\s*(\d+) kB", text)
    estimate = int(match[1]) << 10 if match else 1 << 30
    names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    mount = root / "sys/fs/cgroup"
    folders = [*cgroups("memory", root), mount, mount / "memory"]
    for folder, (limit, used) in product(folders, names):
        try:
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        estimate = min(estimate, max(0, left))
    return estimate


def _name_mpi() -> str:
    from mpi4py import MPI

    vendor, version = _mpirun.identify_library(MPI.Get_library_version())
    levels = (
        MPI.THREAD_SINGLE,
        MPI.THREAD_FUNNELED,
        MPI.THREAD_SERIALIZED,
        MPI.THREAD_MULTIPLE,
    )
    level = _THREAD_LEVELS[levels.index(MPI.Query_thread())]
    return f"{vendor} {version} (MPI_THREAD_{level})".replace("  ", " ")
