"""Which launcher started this process, found from its environment alone.

MPI must not be asked: initializing it aborts on many login nodes. So ``init()`` calls `detect`
first, and loads MPI only if a launcher is there. Nothing here imports anything but the standard
library.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

_FIRST_RESERVED_STEP = 0xFFFFFFF0
"""Slurm's own steps (batch script, interactive shell, extern) have ids from here on."""


@dataclass(frozen=True)
class Launcher:
    """What a launcher says about the process it started.

    Attributes:
        name: the launcher, for people: ``"Open MPI"``, ``"Hydra"``, ``"Intel MPI"``, ``"PMIx"``,
            ``"Slurm"``, ...
        rank: this process's rank.
        size: how many ranks were started; None where the launcher does not say.
        local_rank: the rank among those on this host; None if unknown.
        local_size: how many ranks are on this host; None if unknown.
    """

    name: str
    rank: int
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    def __str__(self) -> str:
        """For messages: ``Open MPI (rank 1 of 4)``."""
        size = "an unknown number" if self.size is None else str(self.size)
        return f"{self.name} (rank {self.rank} of {size})"


@dataclass(frozen=True)
class StoreJob:
    """What the environment says to processes that meet through PyTorch's store.

    torchrun and ``accelerate launch`` start such processes, and so do scripts that set the same
    variables by hand.

    Attributes:
        rank: RANK, this process's rank.
        size: WORLD_SIZE, at least 2.
        by_torchrun: whether torchrun's agent started the process.
    """

    rank: int
    size: int
    by_torchrun: bool

    @property
    def name(self) -> str:
        """What describes the job, for people."""
        return "torchrun" if self.by_torchrun else "the environment's RANK and WORLD_SIZE"

    def __str__(self) -> str:
        """For messages: ``torchrun (rank 1 of 4)``."""
        return f"{self.name} (rank {self.rank} of {self.size})"


def detect_store_job(environ: Mapping[str, str]) -> StoreJob | None:
    """Find the job that RANK and WORLD_SIZE describe.

    Scripts set these, and shells keep them, under another launcher, so any launcher that `detect`
    finds wins over them, but in two cases. torchrun's agent marks only its own workers: srun or
    mpirun may have started it, once per host. And where MPI cannot connect the launcher's ranks, as
    srun has offered them nothing to do so (``srun --mpi=none``) or as mpi4py is not installed, and
    the variables say what the launcher says, they are what the script means.

    Args:
        environ: ``os.environ`` or a copy of one.

    Returns:
        The job; None if there is none, or it has one rank.
    """
    rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if rank is None or size is None or not rank < size or size == 1:
        return None
    by_torchrun = "TORCHELASTIC_RUN_ID" in environ
    launcher = detect(environ)
    if launcher is not None and not by_torchrun:
        is_srun_alone = launcher.name == "Slurm" and not any(
            name.startswith(("PMI_", "PMI2_", "PMIX_", "PALS_")) for name in environ
        )
        needs_store = is_srun_alone or importlib.util.find_spec("mpi4py") is None
        has_place = bool(environ.get("MASTER_ADDR")) and bool(environ.get("MASTER_PORT"))
        if not needs_store or not has_place or (rank, size) != (launcher.rank, launcher.size):
            return None
    return StoreJob(rank, size, by_torchrun)


def detect(environ: Mapping[str, str]) -> Launcher | None:
    """Find the launcher that started the process with this environment.

    Launchers nest: inside a Slurm job, mpirun starts its daemons as a Slurm step, so the ranks see
    Slurm's variables of the daemon and, nearer, those of mpirun. The nearest wins: Open MPI, then
    process managers that speak PMI (Hydra, Intel MPI, Cray PALS), then PMIx, then Slurm. A variable
    that is no number counts as absent.

    These are not launched: a batch script, a shell from ``salloc`` (Slurm sets SLURM_PROCID=0 in
    both, but no step of the user's), the only task of a step (``srun --pty bash``), and a child of
    an Open MPI process that was itself started alone.

    Args:
        environ: ``os.environ`` or a copy of one.

    Returns:
        The launcher, or None if the process was started without one.
    """
    if environ.get("OMPI_MCA_ess") == "singleton":
        return None
    for find in (_open_mpi, _pmi, _pmix, _slurm):
        launcher = find(environ)
        if launcher is not None:
            is_only_task = launcher.name == "Slurm" and launcher.size == 1
            return None if is_only_task else launcher
    return None


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit():
            return int(text)
    return None


def _open_mpi(environ: Mapping[str, str]) -> Launcher | None:
    rank = _number(environ, "OMPI_COMM_WORLD_RANK")
    size = _number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    return Launcher(
        "Open MPI",
        rank,
        size,
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _pmi(environ: Mapping[str, str]) -> Launcher | None:
    rank = _number(environ, "PMI_RANK")
    size = _number(environ, "PMI_SIZE")
    if rank is None:
        return None
    slurm = _slurm(environ)
    if slurm is not None and slurm.rank == rank and size in (None, slurm.size):
        return slurm
    if "PALS_RANKID" in environ or "PALS_APID" in environ:
        name = "Cray PALS"
    elif any(key.startswith("I_MPI_") for key in environ):
        name = "Intel MPI"
    else:
        name = "Hydra"
    return Launcher(
        name,
        rank,
        size,
        _number(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        _number(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    )


def _pmix(environ: Mapping[str, str]) -> Launcher | None:
    rank = _number(environ, "PMIX_RANK")
    if rank is None or "PMIX_NAMESPACE" not in environ:
        return None
    if environ["PMIX_NAMESPACE"].startswith("slurm.pmix."):
        slurm = _slurm(environ)
        if slurm is not None:
            return slurm
    return Launcher("PMIx", rank)


def _slurm(environ: Mapping[str, str]) -> Launcher | None:
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    rank = _number(environ, "SLURM_PROCID")
    size = _number(environ, "SLURM_STEP_NUM_TASKS")
    if step is None or step >= _FIRST_RESERVED_STEP or rank is None or size is None:
        return None
    hosts = _number(environ, "SLURM_STEP_NUM_NODES")
    return Launcher(
        "Slurm", rank, size, _number(environ, "SLURM_LOCALID"), size if hosts == 1 else None
    )
