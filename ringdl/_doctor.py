"""``python -m ringdl doctor``: what was found here, and what it means for ringdl.

No check loads MPI into this process: a child process asks MPI.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ringdl import _cores, _launch, _mpirun
from ringdl._interpreter import finding_ringdl
from ringdl._version import __version__

if TYPE_CHECKING:
    from ringdl import _tuning

Verdict = Literal["ok", "note", "wrong"]

_TRIAL = """
import json
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
local = world.Split_type(MPI.COMM_TYPE_SHARED).size
if world.rank == 0:
    print("ringdl:", json.dumps([world.size, total, local, MPI.Query_thread()]), flush=True)
"""

_BACKEND_TRIAL = """
import torch.distributed as dist
import ringdl.torch.backend
import torch
dist.init_process_group("ringdl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
"""

_INSTALL_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"

THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        name: what was checked.
        verdict: ``"ok"``, ``"note"`` (works, but should be known), ``"wrong"`` (ringdl cannot be
            used like this).
        text: what was found and what it means.
    """

    name: str
    verdict: Verdict
    text: str


def examine(trial: bool = True) -> list[Check]:
    """Check everything.

    Args:
        trial: whether to start two ranks, to check that they find each other.
    """
    launcher = _launch.detect_store_job(os.environ) or _launch.detect(os.environ)
    cores = _cores.read_cores()
    return [
        check_python(sys.version_info[:3]),
        check_engine(),
        check_launcher(launcher),
        check_cores(cores, is_launched=launcher is not None),
        check_threads(cores, os.environ),
        check_shared_memory(),
        check_settings(os.environ),
        *check_mpi(trial and launcher is None, cores),
        check_tuning(cores, os.environ),
        check_torch(trial and launcher is None),
        check_cuda(),
    ]


def merge(checks_of_ranks: Sequence[Sequence[Check]]) -> list[Check]:
    """The checks of all ranks as one list; those that differ name their ranks.

    Args:
        checks_of_ranks: by rank; a rank may lack some.
    """
    found: dict[str, dict[tuple[Verdict, str], list[int]]] = {}
    for rank, checks in enumerate(checks_of_ranks):
        for check in checks:
            same = found.setdefault(check.name, {})
            same.setdefault((check.verdict, check.text), []).append(rank)
    merged = []
    for name, groups in found.items():
        for (verdict, text), ranks in groups.items():
            whose = "" if len(ranks) == len(checks_of_ranks) else f"{name_ranks(ranks)}: "
            merged.append(Check(name, verdict, whose + text))
    return merged


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, run)) for run in runs)}"


def is_usable(checks: Sequence[Check]) -> bool:
    """Whether nothing is wrong."""
    return all(check.verdict != "wrong" for check in checks)


def report(checks: Sequence[Check]) -> str:
    """One line per check, and one that sums up."""
    width = max(len(check.name) for check in checks)
    lines = [f"{check.verdict:5}  {check.name:{width}}  {check.text}" for check in checks]
    wrong = sum(check.verdict == "wrong" for check in checks)
    end = "ringdl can be used here" if not wrong else f"{wrong} to mend before ringdl can be used"
    return "\n".join([*lines, "", end])


def check_python(version: Sequence[int]) -> Check:
    """Python's version."""
    text = f"{'.'.join(map(str, version))} ({sys.executable}) on {platform.machine()}"
    if tuple(version) < (3, 11):
        return Check("Python", "wrong", f"{text}: ringdl needs 3.11 or newer")
    return Check("Python", "ok", text)


def check_cuda() -> Check:
    """The driver and the devices, and what is done with arrays that lie there."""
    engine = importlib.import_module("ringdl._engine")
    version, why_not = engine.cuda_driver()
    if version == 0:
        return Check("CUDA", "ok", f"{why_not}: arrays in the CPU's memory are reduced")
    devices = [
        f"device {number} is {device.name} ({device.bus}), {device.byte_count >> 20} MiB, compute "
        f"capability {device.capability // 10}.{device.capability % 10}"
        + (f", reaches {device.peers}" if device.peers else "")
        for number, device in enumerate(engine.cuda_devices())
    ]
    kernels = "kernels for them are part of this build"
    if not engine.has_cuda_kernels():
        kernels = "this build has no kernels: NVRTC compiles them, where it is installed"
    ways = "ranks reduce on devices that reach one another, else in the CPU's memory"
    return Check(
        "CUDA",
        "note",
        f"CUDA {version // 1000}.{version % 1000 // 10}; {'; '.join(devices)}; {kernels}; {ways}. "
        "run on one NVIDIA H200: collectives, Buckets, Numba's arrays, ringdl.cupy. never run on a "
        "device: PyTorch's tensors, JAX's arrays, custom_op, gradients copied to and from buckets "
        "by one launch, NCCL, bench, several devices",
    )


def check_engine() -> Check:
    """Whether the compiled engine is there, and which instructions it uses."""
    try:
        engine = importlib.import_module("ringdl._engine")
    except ImportError as error:
        return Check(
            "ringdl", "wrong", f"{__version__} without its engine ({error}): run `pip install .`"
        )
    level = getattr(engine, "simd_level", None)
    name = level() if callable(level) else level
    return Check("ringdl", "ok", f"{__version__}, reductions in {name or 'portable code'}")


def check_launcher(launcher: _launch.Launcher | _launch.StoreJob | None) -> Check:
    """Whether a launcher started this process."""
    if launcher is None:
        return Check(
            "launcher",
            "ok",
            "none: alone, size is 1; `python -m ringdl run -n 2 train.py` starts two, and so does "
            "`torchrun --nproc-per-node 2 train.py`",
        )
    if isinstance(launcher, _launch.StoreJob):
        text = f"{launcher.size} ranks meet by {launcher.name}: through PyTorch's store, over TCP"
        return Check("launcher", "ok", text)
    size = "an unknown number of" if launcher.size is None else launcher.size
    return Check("launcher", "ok", f"{launcher.name} started {size} ranks")


def check_cores(cores: _cores.Cores, is_launched: bool = False) -> Check:
    """How many ranks can run at once; of a rank, what it may use."""
    text = f"{_count(cores.cores, 'core')} ({cores.cpus} of the machine's {cores.online} CPUs)"
    if is_launched:
        return Check("cores", "ok", f"each rank may use {text}")
    if cores.quota is not None and cores.quota < cores.cores:
        return Check(
            "cores",
            "note",
            f"{text}, but the CPU quota is {cores.quota:g}: no more ranks than that",
        )
    return Check("cores", "ok", f"{text}: up to {_count(cores.usable, 'rank')} on this host")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def check_threads(cores: _cores.Cores, environ: Mapping[str, str]) -> Check:
    """Whether OMP_NUM_THREADS suits the cores that this process may use."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if not text.isdecimal():
        return Check("threads", "ok", "OMP_NUM_THREADS is not set; `run` sets it to cores per rank")
    if int(text) > cores.usable:
        return Check(
            "threads",
            "note",
            f"OMP_NUM_THREADS={text}, more than {_count(cores.usable, 'core')}: slow",
        )
    return Check("threads", "ok", f"OMP_NUM_THREADS={text}")


def check_shared_memory(path: str = "/dev/shm") -> Check:
    """Whether ranks can share memory; and the size of /dev/shm, which only MPI libraries use."""
    try:
        engine = importlib.import_module("ringdl._engine").alone()
        own = f"segments of up to {engine.open_window(1)[2] >> 30} GiB"
        engine.close_window()
    except (ImportError, RuntimeError) as error:
        return Check("shared memory", "note", f"none, ranks here exchange messages: {error}")
    try:
        info = os.statvfs(path)
    except OSError:
        return Check("shared memory", "note", f"{own}; there is no {path}: MPI may be slow")
    free_mib = info.f_bavail * info.f_frsize >> 20
    free = f"{free_mib} MiB" if free_mib < 1024 else f"{free_mib >> 10} GiB"
    text = f"{own}; {free} free in {path}"
    if free_mib < 128:
        return Check(
            "shared memory", "note", f"{text}: enough for ringdl, MPI itself may want more"
        )
    return Check("shared memory", "ok", text)


def check_settings(environ: Mapping[str, str]) -> Check:
    """Which settings the environment has, and whether ringdl knows them."""
    from ringdl._errors import UsageError
    from ringdl._settings import RANK_PROCESS, find_unknown, read_settings

    try:
        read_settings(environ)
    except UsageError as error:
        return Check("settings", "wrong", str(error))
    unknown = find_unknown(environ)
    if unknown:
        return Check("settings", "note", "; ".join(unknown))
    made = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith("RINGDL_") and name != RANK_PROCESS
    ]
    return Check("settings", "ok", ", ".join(made) or "none in the environment")


def check_tuning(cores: _cores.Cores, environ: Mapping[str, str]) -> Check:
    """Which tuning allreduces of one rank per core would use, and why."""
    from ringdl import _tuning
    from ringdl._errors import UsageError
    from ringdl._settings import read_settings

    hosts = [0] * max(cores.usable, 2)
    try:
        settings = read_settings(environ)
        vendor = _mpirun.find_library().vendor
    except UsageError:
        return Check("tuning", "note", "not looked at: it depends on the settings")
    except _mpirun.LaunchError:
        return Check("tuning", "ok", "not needed for one rank")
    if not settings.shared_memory:
        hosts = list(range(len(hosts)))
    try:
        tuning = _tuning.find_tuning(settings.tuning, vendor, hosts, host_count=1)
    except UsageError as error:
        return Check("tuning", "wrong", str(error))
    check = describe_tuning(tuning, hosts, settings.algorithm)
    if settings.tuning is None and tuning.source == _tuning.DEFAULTS:
        advice = f"`mpirun -n {len(hosts)} python -m ringdl tune` measures instead"
        check = Check(check.name, check.verdict, f"{check.text}; {advice}")
    return check


def describe_tuning(tuning: _tuning.Tuning, hosts: Sequence[int], algorithm: str | None) -> Check:
    """Which algorithms allreduces of such ranks use.

    Args:
        tuning: the table.
        hosts: the number of each rank's host; without shared memory, as many as ranks.
        algorithm: RINGDL_ALGORITHM.
    """
    from ringdl import _tuning

    text = f"{_tuning.topology(hosts)} ranks: {_tuning.summary(tuning, hosts)}"
    if tuning.nccl_bytes is not None:
        text += f"; on devices of their own NCCL from {tuning.nccl_bytes:,} bytes on"
    if algorithm is not None:
        text = f"RINGDL_ALGORITHM={algorithm} wherever it is possible; else {text}"
    return Check("tuning", "ok", f"{text}; from {tuning.source}, hash {tuning.hash}")


def check_mpi(trial: bool, cores: _cores.Cores) -> list[Check]:
    """The MPI library, its mpirun, and whether two ranks find each other.

    Without MPI, one rank works; that is a note. A library without its mpirun is a note, too: the
    machine's own launcher may do. Two ranks that were started and do not find each other are wrong.
    """
    try:
        library = _mpirun.find_library()
    except _mpirun.LaunchError as error:
        return [Check("MPI", "note", f"only one rank is possible: {error}")]
    known = library.vendor in (_mpirun.OPEN_MPI, _mpirun.MPICH, _mpirun.INTEL_MPI)
    checks = [
        Check(
            "MPI",
            "ok" if known else "note",
            f"{library}, loaded by mpi4py {library.mpi4py}"
            + ("" if known else ": it may work if it has the ABI of Open MPI or MPICH"),
        )
    ]
    try:
        mpirun = _mpirun.find_mpirun(library)
    except _mpirun.LaunchError as error:
        return [*checks, Check("mpirun", "note", str(error))]
    checks.append(Check("mpirun", "ok", f"{mpirun} belongs to it"))
    if trial:
        command = _mpirun.compose(
            library,
            mpirun,
            2,
            [sys.executable, "-c", _TRIAL],
            cores=cores,
            environ=os.environ,
            is_root=os.geteuid() == 0,
        )
        checks.append(_try(command))
    return checks


def _try(command: Sequence[str]) -> Check:
    try:
        child = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check("two ranks", "wrong", "did not find each other within 60 s")
    return judge_trial(child.returncode, child.stdout, child.stderr)


def judge_trial(code: int, out: str, err: str) -> Check:
    """What the output of two ranks that were started as a trial means."""
    answers = [line for line in out.splitlines() if line.startswith("ringdl:")]
    if code != 0 or not answers:
        words = [line for line in (err + out).splitlines() if line.strip(" -")]
        first = words[0].strip() if words else "no output"
        return Check(
            "two ranks",
            "wrong",
            f"do not start (exit code {code}: {first}); on a login node, try it in a job",
        )
    size, total, local, level = json.loads(answers[0].removeprefix("ringdl:"))
    if (size, total) != (2, 3):
        return Check("two ranks", "wrong", f"see a size of {size}: mpirun is of another MPI")
    text = f"started and added up, {local} on this host, threads {THREAD_LEVELS[level]}"
    if level < len(THREAD_LEVELS) - 1:
        return Check("two ranks", "note", f"{text}: no progress in the background between hosts")
    return Check("two ranks", "ok", text)


def check_torch(trial: bool) -> Check:
    """Whether PyTorch is installed, and the backend of torch.distributed works with it.

    The backend is tried in a child process; PyTorch is not imported here.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "PyTorch",
            "note",
            f"not installed, and ringdl.torch needs it: `{_INSTALL_TORCH}` gets its CPU build",
        )
    if not trial:
        return Check("PyTorch", "ok", version)
    try:
        child = subprocess.run(
            [sys.executable, "-c", _BACKEND_TRIAL],
            env=finding_ringdl(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except subprocess.TimeoutExpired:
        why = "did not start within 120 s"
    else:
        if child.returncode == 0:
            return Check("PyTorch", "ok", f'{version}; init_process_group("ringdl") works with it')
        lines = [line for line in child.stderr.splitlines() if line.strip()]
        why = lines[-1].strip() if lines else f"exit code {child.returncode}"
    return Check(
        "PyTorch",
        "note",
        f"{version}; the backend of torch.distributed does not work with it ({why}): install a "
        "version that `pip install 'ringdl[torch]'` admits, or go without the backend",
    )
