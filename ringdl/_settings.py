"""ringdl's environment variables, all in one place; docs/settings.md is generated from it.

What all ranks must agree on is read on rank 0 and broadcast by ``init()``: launchers do not forward
the environment everywhere. A new setting is a new field of `Settings`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ringdl._engine import Algorithm
from ringdl._errors import UsageError
from ringdl._report import RUN_REPORT

ALGORITHMS = tuple(each.name for each in Algorithm if each != Algorithm.mpi)
"""Values of RINGDL_ALGORITHM: not MPI's own, which must be alone."""

RANK_PROCESS = "RINGDL_RANK_PROCESS"
"""Marks a rank for its children (`ringdl._children`)."""

_PREFIX = "RINGDL_"
"""What all settings begin with."""

_TESTS = "RINGDL_TEST_"
"""What variables of the tests begin with."""

_SWITCH = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


@dataclass(frozen=True)
class Values:
    """The values that a variable may have.

    Attributes:
        expected: these, as errors and the documentation describe them.
        parse: makes a value of the text; raises KeyError or ValueError if it means none.
    """

    expected: str
    parse: Callable[[str], Any]


def _within(
    kind: Callable[[str], float], is_right: Callable[[float], bool]
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = kind(text)
        if not is_right(value):
            raise ValueError(text)
        return value

    return parse


_ANY = Values("", str)


def _seconds(text: str) -> float:
    """At most three years: clocks and sockets take no more."""
    return min(1e8, _within(float, lambda value: value > 0)(text))


_SECONDS = Values("a positive number", _seconds)
_SECONDS_OR_0 = Values("a positive number or 0", _within(float, lambda value: value >= 0))
_SEGMENT = Values(
    "a whole number from 1 to 2^30", _within(int, lambda value: 1 <= value <= 1 << 30)
)
_COUNT = Values("a whole number, 0 or more", _within(int, lambda value: value >= 0))
_BOOLEAN = Values("0 or 1", lambda text: _SWITCH[text.lower()])
_ALGORITHM = Values(
    f"one of {', '.join(ALGORITHMS)}", {name: name for name in ALGORITHMS}.__getitem__
)

_JOIN = Values("one of all, allreduce", {name: name for name in ("all", "allreduce")}.__getitem__)


def _setting(variable: str, values: Values, default: Any, unset: str, meaning: str) -> Any:
    """A field of `Settings`.

    Args:
        variable: the environment variable.
        values: what it may be; all but empty, which counts as unset.
        default: the value if it is unset.
        unset: what that means, for the documentation.
        meaning: what the setting does, for the documentation.
    """
    about = {"variable": variable, "values": values, "unset": unset, "meaning": meaning}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Settings:
    """What can be set from outside. Each field says what it means."""

    timeout: float = _setting(
        "RINGDL_TIMEOUT",
        _SECONDS,
        600.0,
        "600: outlasts a slow checkpoint",
        "Seconds after which a wait without a timeout of its own raises `StallError`, and after "
        "which a process that MPI has not connected to the other ranks ends.",
    )
    watchdog: float = _setting(
        "RINGDL_WATCHDOG",
        _SECONDS_OR_0,
        60.0,
        "60",
        "Seconds after which a collective, `shutdown()` or MPI's start that has not ended is "
        "reported on stderr, with the ranks that it waits for; 0: never.",
    )
    debug: bool = _setting(
        "RINGDL_DEBUG",
        _BOOLEAN,
        False,
        "0",
        "1: when the watchdog reports a collective, all ranks that have called it print all of "
        "theirs that are in flight.",
    )
    timeline: str | None = _setting(
        "RINGDL_TIMELINE",
        _ANY,
        None,
        "none",
        "A file, on rank 0's host, for what happens from `init()` to `shutdown()`, as of "
        "`start_timeline`.",
    )
    flight_recorder: str | None = _setting(
        "RINGDL_FLIGHT_RECORDER",
        _ANY,
        None,
        "none",
        "A directory, the same on all hosts, where each rank keeps its last 1,000 works from "
        "`init()` on, for `python -m ringdl diagnose`.",
    )
    algorithm: str | None = _setting(
        "RINGDL_ALGORITHM",
        _ALGORITHM,
        None,
        "the fastest by the tuning table",
        "What allreduces whose caller names no algorithm go by, wherever it is possible; `nccl` is "
        "for arrays on devices alone.",
    )
    tuning: str | None = _setting(
        "RINGDL_TUNING",
        _ANY,
        None,
        "what `python -m ringdl tune` measured for such ranks here, else built-in costs",
        "The tuning table: a file, JSON, or `default` for the built-in costs.",
    )
    segment_bytes: int | None = _setting(
        "RINGDL_SEGMENT_BYTES",
        _SEGMENT,
        None,
        "what the tuning table says",
        "How many bytes travel and are reduced at once.",
    )
    shared_memory: bool = _setting(
        "RINGDL_SHARED_MEMORY",
        _BOOLEAN,
        True,
        "1",
        "0: ranks of one host exchange messages instead of using one another's memory.",
    )
    jax_memory: bool = _setting(
        "RINGDL_JAX_MEMORY",
        _BOOLEAN,
        True,
        "1",
        "0: large arrays of JAX on the CPU lie where the C library puts them, and are copied.",
    )
    cuda_peers: bool = _setting(
        "RINGDL_CUDA_PEERS",
        _BOOLEAN,
        True,
        "1",
        "0: ranks of one host do not use the memory of one another's CUDA devices: arrays go by "
        "way of the CPU's memory.",
    )
    check_replicas: bool = _setting(
        "RINGDL_CHECK_REPLICAS",
        _BOOLEAN,
        True,
        "1",
        "0: the first `step()` of a wrapped optimizer does not compare the ranks' parameters.",
    )
    replacements: int = _setting(
        "RINGDL_REPLACEMENTS",
        _COUNT,
        0,
        "0",
        "In an elastic job on one host: how many ranks may be started in place of those that "
        "fail, as of `ringdl run --elastic --replacements N`.",
    )
    join: str = _setting(
        "RINGDL_JOIN",
        _JOIN,
        "all",
        "all",
        "What a rank in `join()` answers: all calls of the others, or each `allreduce` alone, so "
        "that what would lack its rows fails, as with Horovod.",
    )


OTHERS = {
    "OMP_NUM_THREADS": "`init()` warns where a host's ranks have more threads than cores. `run` "
    "sets it to the cores per rank, `bench` to 1, unless it is set.",
    "XDG_CACHE_HOME": "`tune` writes to the folder `ringdl` in it, and `init()` reads there; "
    "kernels that were compiled for a CUDA device lie there, too; default `~/.cache`.",
    "CUDA_HOME, CUDA_PATH": "Where else than in wheels and `/usr/local/cuda` NVRTC and nvJitLink "
    "are looked for, which compile kernels that the build lacks, and NCCL.",
    "SLURM_NTASKS": "How many ranks `run` starts without `-n`.",
    "SLURM_JOB_NUM_NODES, PBS_NODEFILE, LSB_DJOB_HOSTFILE": "Tell `run` that the job may have "
    "several hosts: it then leaves placement and threads to mpirun.",
    "OMPI_MCA_btl, I_MPI_THREAD_YIELD": "How ranks of one host send messages, and what they do "
    "while they wait; `run` sets them for Open MPI 5, and for Intel MPI where ranks outnumber "
    "cores, unless they are set.",
    "OMPI_MCA_mpi_ft_enable, OMPI_MCA_btl_tcp_if_include": "Set by `mpirun --with-ft ulfm`, with "
    "which ranks go on when one fails, and by you: by which network they connect then.",
    "PATH": "Where `run` looks for an mpirun, after the MPI library's own folder.",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, "
    "OMPI_COMM_WORLD_LOCAL_SIZE, OMPI_MCA_ess, OMPI_MCA_ess_base_jobid": "Open MPI's launcher.",
    "PMI_RANK, PMI_SIZE, PMI_LOCAL_RANK, PMI_LOCAL_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS, PMI_FD, "
    "PMI_PORT, PMI_ID, PMI_JOBID, I_MPI_*": "Hydra (MPICH, Intel MPI) and others that speak PMI.",
    "I_MPI_HYDRA_UUID, I_MPI_NODEMAP_ALGORITHM": "The first is set by Intel MPI's mpirun. Where "
    "MPICH's has started Intel MPI, `init()` sets the second to `pmi_alltoall`, unless it is set: "
    "which ranks share a host is found out by asking all.",
    "PRTE_MCA_prte_local_tmpdir_base": "Where the mpirun of Open MPI 5 has its files; `run` sets "
    "it, unless it is set, where one that was killed left a folder in its way.",
    "UCX_TLS": "Tells whether the ranks of one host use a network: there MPICH 4.0 over UCX ends "
    "without `MPI_Finalize`, which may not return.",
    "UCX_RCACHE_MAX_UNRELEASED": "Under MPICH over UCX 1.17 or newer, `init()` sets it to 256M, "
    "unless it is set: UCX then forgets memory that was unmapped. See [sharp bits](sharp-bits.md).",
    "PALS_APID, PALS_RANKID, PALS_LOCAL_RANKID, PALS_LOCAL_SIZE": "Cray PALS.",
    "PMIX_RANK, PMIX_NAMESPACE": "Any launcher that speaks PMIx.",
    "PMIX_HOSTNAME": "Open MPI's launcher: where a rank is started in place of another.",
    "SLURM_JOB_ID, SLURM_STEP_ID, SLURM_STEPID, SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NUM_TASKS, "
    "SLURM_STEP_NUM_NODES": "srun.",
    "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT": "Set by torchrun and `accelerate launch`, or by "
    "a script: `init()` finds the other ranks by them, unless mpirun, or srun with PMI or PMIx, "
    "has started the process. `ringdl.torch.backend` sets them where they are not set.",
    "LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK": "Set by `ringdl.torch.backend` where they are not "
    "set.",
    "TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT": "Name torchrun's run, and tell its "
    "processes from others.",
    "CUDA_VISIBLE_DEVICES": "The driver's: which devices a rank sees. Where that is one, no "
    "warning says that the ranks of the host share it, as each may have its own.",
    "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME": "Set to `lo` by `bench --peers gloo` and `nccl` on "
    "one host, unless it is set.",
    "PWD": "The folder in which ranks begin that are started in place of others.",
    RANK_PROCESS: "Set by `init()`, for children of a rank to know that they are none.",
    RUN_REPORT: "Set by `ringdl run --elastic`: where ranks tell it that they have ended well.",
}
"""Variables that are not settings of ringdl's, and what ringdl reads or sets them for."""


def default_segment_bytes(host_count: int) -> int:
    """What travels and is reduced at once if nothing else is set.

    On one host a message costs about 5 us beyond its bytes, and 256 KiB still fit a core's
    second-level cache twice: with 32 KiB, 16 MiB take twice as long. Between hosts, Open MPI sends
    64 KiB and more over TCP only after a handshake, which left a link of 1 Gbit/s idle for a
    quarter of the time, and 1 MiB on 4 hosts is cut into segments at all only below 256 KiB. 16 to
    60 KiB are as good; a network of 100 Gbit/s may want more.

    Args:
        host_count: hosts that the ranks are on.
    """
    return 256 << 10 if host_count == 1 else 32 << 10


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings of one process.

    Raises:
        UsageError: a variable has an invalid value.
    """
    found = {}
    for known in fields(Settings):
        variable, values = known.metadata["variable"], known.metadata["values"]
        text = environ.get(variable, "")
        if not text:
            continue
        try:
            found[known.name] = values.parse(text)
        except (KeyError, ValueError):
            raise UsageError(
                f"{variable}={text!r} is not {values.expected}; correct or unset it"
            ) from None
    return Settings(**found)


def find_unknown(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like a setting and is none."""
    known = [setting.metadata["variable"] for setting in fields(Settings)]
    endings = [name.removeprefix(_PREFIX) for name in known]
    sentences = []
    for name in sorted(environ):
        if name in (*known, RANK_PROCESS, RUN_REPORT) or not name.startswith(_PREFIX):
            continue
        if name.startswith(_TESTS):
            continue
        import difflib

        near = difflib.get_close_matches(name.removeprefix(_PREFIX), endings, 1)
        meant = f" (do you mean {_PREFIX}{near[0]}?)" if near else ""
        sentences.append(
            f"{name} is no setting of ringdl and changes nothing{meant}; docs/settings.md has all"
        )
    return sentences


def warn_of_unknown(environ: Mapping[str, str]) -> None:
    """Warn the caller's caller of variables that look like settings and are none."""
    for sentence in find_unknown(environ):
        import warnings

        warnings.warn(sentence, RuntimeWarning, stacklevel=3)


def reference() -> str:
    """The tables of docs/settings.md."""
    lines = ["| variable | what it says | without it |", "|---|---|---|"]
    for setting in fields(Settings):
        about = setting.metadata
        expected = about["values"].expected
        says = f"{about['meaning']} {expected.capitalize()}." if expected else about["meaning"]
        lines.append(f"| `{about['variable']}` | {says} | {about['unset']} |")
    lines += ["", "| variable | what ringdl has to do with it |", "|---|---|"]
    for names, meaning in OTHERS.items():
        lines.append(f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {meaning} |")
    return "\n".join(lines)
