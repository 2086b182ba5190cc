"""What ringdl promises, row by row: asked, measured, and the command that measures it again.

    python bench/rows.py                 a short version, a few minutes: make bench
    python bench/rows.py --full          every row, an hour and a half: make bench-full
    python bench/rows.py --only links    one measurement
    python bench/rows.py --show          what bench/results/ holds, without measuring

Needs the environments of `make test`; simulated hosts need root and iproute2, three rows need
mpi4jax, which is built by hand, and the machine's own Open MPI is included if it is there: what is
missing is printed as not run. The results lie in bench/results/, or, of a short version, in
build/bench/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hosts

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
Results = dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """A command that leaves a file.

    Attributes:
        name: of the file, without its suffix.
        words: the command after the interpreter; ``--json FILE`` is added.
        short: what is added for the short version.
        needs_root: whether it makes simulated hosts.
    """

    name: str
    words: tuple[str, ...]
    short: tuple[str, ...] = ()
    needs_root: bool = False


@dataclass(frozen=True)
class Row:
    """A promise.

    Attributes:
        case: what is measured, against what.
        source: the measurement that it is taken from.
        asked: at least.
        value: what was measured, from the measurement's file; the worst, if there are several.
    """

    case: str
    source: str
    asked: float
    value: Callable[[Results], float]


CROWDED = (  # more ranks than cores
    *("bench/allreduce.py", "--sizes", "1K", "64M", "--factor", "65536"),
    *("--iterations", "6", "--warmups", "2"),
)
MEASUREMENTS = (
    Measurement(
        "allreduce-2",
        (
            *("bench/allreduce.py", "--ranks", "2"),
            *("--sizes", "1K", "256M", "--iterations", "12", "--rounds", "5"),
        ),
        ("--rounds", "2", "--sizes", "1K", "64M"),
    ),
    Measurement(
        "ordinary-2",
        (
            *("bench/allreduce.py", "--ranks", "2", "--memory", "ordinary"),
            *("--sizes", "1K", "256M", "--iterations", "8", "--rounds", "4"),
        ),
        ("--rounds", "2", "--sizes", "1K", "64M"),
    ),
    Measurement("allreduce-4", (*CROWDED, "--ranks", "4"), ("--rounds", "2")),
    Measurement("allreduce-8", (*CROWDED, "--ranks", "8"), ("--rounds", "2")),
    Measurement(  # at 64 MiB, 30 seconds would be five runs
        "links",
        ("bench/links.py", "--seconds", "120"),
        ("--seconds", "5"),
        needs_root=True,
    ),
    Measurement(
        "lanes",
        ("bench/links.py", "--hosts", "2", "--ranks-per-host", "2", "--mib", "16", "64"),
        ("--seconds", "5"),
        needs_root=True,
    ),
    Measurement("step", ("bench/train_step.py",), ("--rounds", "2")),
    Measurement(
        "step-hosts",
        (
            *("bench/train_step.py", "--hosts", "4", "--rate", "200mbit", "--batch", "1792"),
            *("--balance", "1.15", "--inputs", "384", "--width", "384", "--layers", "16"),
            *("--rounds", "8"),
        ),
        ("--rounds", "2"),
        needs_root=True,
    ),
    Measurement("jax-step", ("bench/jax_step.py",), ("--rounds", "2")),
)


def ratio(least: int, most: int, key: str = "ratio") -> Any:
    """The worst ratio over the sizes from `least` to `most` bytes."""

    def value(results: Results) -> float:
        return min(row[key] for row in results["results"] if least <= row["size"] <= most)

    return value


def mean(least: int, most: int) -> Any:
    """The geometric mean of the ratios over the sizes from `least` to `most` bytes."""

    def value(results: Results) -> float:
        rows = results["results"]
        return statistics.geometric_mean(
            row["ratio"] for row in rows if least <= row["size"] <= most
        )

    return value


def share(mib: float, mpi: str) -> Any:
    """The share of the bound that ringdl reaches."""
    return lambda results: _size(results, mib, mpi)["ringdl"]["share"]


def over(mib: float, mpi: str, what: str, than: str) -> Any:
    """The median of `what` over that of `than`."""

    def value(results: Results) -> float:
        size = _size(results, mib, mpi)
        return size[what]["median_ms"] / size[than]["median_ms"]

    return value


def _size(results: Results, mib: float, mpi: str) -> Any:
    (run,) = [run for run in results["results"] if run["mpi"].startswith(mpi)]
    (size,) = [size for size in run["sizes"] if size["mib"] == mib]
    return size


def _share_of_averaging(results: Results) -> float:
    """How long an allreduce of as many bytes takes, over how long averaging takes in a step."""
    return 1 / float(results["cost / allreduce"])


OPEN_MPI, MPICH = "Open MPI", "MPICH"

ROWS = (
    Row("2 ranks, ringdl.empty, 1 to 64 KiB / best MPI", "allreduce-2", 1.0, ratio(1024, 65536)),
    Row("  lower quartile", "allreduce-2", 0.95, ratio(1024, 65536, key="lower_quartile")),
    Row("  across jobs, by memcpy", "allreduce-2", 1.0, ratio(1024, 65536, key="across_jobs")),
    Row(
        "  lower quartile",
        "allreduce-2",
        0.95,
        ratio(1024, 65536, key="across_jobs_lower_quartile"),
    ),
    Row("  geometric mean, 1 to 256 KiB", "allreduce-2", 1.1, mean(1024, MIB // 4)),
    Row("  256 KiB", "allreduce-2", 1.0, ratio(MIB // 4, MIB // 4)),
    Row("  1 MiB", "allreduce-2", 1.1, ratio(MIB, MIB)),
    Row("  4 MiB", "allreduce-2", 1.0, ratio(4 * MIB, 4 * MIB)),
    Row("  16 MiB", "allreduce-2", 1.25, ratio(16 * MIB, 16 * MIB)),
    Row("  64 and 256 MiB", "allreduce-2", 3.0, ratio(64 * MIB, 256 * MIB)),
    Row(
        "  16 to 256 MiB / both ranks' memcpy",
        "allreduce-2",
        0.95,
        ratio(16 * MIB, 256 * MIB, key="of_memcpy"),
    ),
    Row("2 ranks, NumPy's arrays / best MPI", "ordinary-2", 0.9, ratio(1024, 256 * MIB)),
    Row("  geometric mean", "ordinary-2", 1.0, mean(1024, 256 * MIB)),
    Row("  64 and 256 MiB", "ordinary-2", 1.5, ratio(64 * MIB, 256 * MIB)),
    *(
        Row(f"{ranks} ranks, {text} / best MPI", f"allreduce-{ranks}", asked, ratio(size, size))
        for ranks in (4, 8)
        for text, size, asked in (("64 MiB", 64 * MIB, 2.5), ("1 KiB", 1024, 0.95))
    ),
    *(
        Row(f"4 hosts, 1 Gbit/s, {mib} MiB, {mpi} / bound", "links", asked, share(mib, mpi))
        for mpi, figures in ((OPEN_MPI, (0.85, 0.85, 0.88)), (MPICH, (0.90, 0.90, 0.93)))
        for mib, asked in zip((1, 16, 64), figures, strict=True)
    ),
    *(
        Row(f"4 hosts, 1 KiB / {mpi}'s own", "links", 0.95, over(2**-10, mpi, "mpi", "ringdl"))
        for mpi in (OPEN_MPI, MPICH)
    ),
    *(
        Row(f"2 hosts x 2 ranks, {mib} MiB, {mpi} / bound", "lanes", asked, share(mib, mpi))
        for mpi, asked in ((OPEN_MPI, 0.83), (MPICH, 0.88))
        for mib in (16, 64)
    ),
    *(
        Row(f"  bfloat16 / fp32, {mib} MiB, {mpi}", "lanes", 1.85, over(mib, mpi, "ringdl", "bf16"))
        for mpi in (OPEN_MPI, MPICH)
        for mib in (16, 64)
    ),
    Row("torch step, 27 M parameters / DDP on Gloo", "step", 1.35, lambda r: r["ratios"]["gloo"]),
    Row("  / computing alone", "step", 0.80, lambda r: r["ratios"]["alone"]),
    Row("  DDP over ringdl / DDP on Gloo", "step", 1.25, lambda r: r["ratios"]["ddp"]),
    Row("torch step, 4 hosts / DDP on Gloo", "step-hosts", 1.1, lambda r: r["ratios"]["gloo"]),
    Row("  share of communication hidden", "step-hosts", 0.60, lambda r: r["hidden"]),
    Row(
        "optax step, 27 M parameters / mpi4jax",
        "jax-step",
        1.5,
        lambda r: min(r["step ratios"].values()),
    ),
    Row("  averaging there / mpi4jax", "jax-step", 1.5, lambda r: min(r["cost ratios"].values())),
    Row("  allreduce_ in ringdl.empty / averaging there", "jax-step", 0.77, _share_of_averaging),
)


def measure(measurement: Measurement, folder: Path, *, full: bool) -> None:
    """Run one.

    Raises:
        HostsError: this machine cannot, or the command failed.
    """
    if measurement.needs_root:
        hosts.check_machine()
    added = () if full else measurement.short
    words = [*measurement.words, *added, "--json", str(folder / f"{measurement.name}.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    python = hosts.interpreter("openmpi")
    code = subprocess.run([python, *words], env=environment, check=False).returncode
    if code != 0:
        raise hosts.HostsError(f"{' '.join(words)} ended with exit code {code}")


def table(folder: Path) -> list[str]:
    """A line per row: asked, measured, and whether that is enough."""
    lines = [f"{'':<56}{'asked':>7}{'measured':>10}"]
    for row in ROWS:
        try:
            value = row.value(json.loads((folder / f"{row.source}.json").read_text()))
        except (OSError, LookupError, TypeError, ValueError):  # none, of fewer sizes, or older
            lines.append(f"{row.case:<56}{row.asked:7.2f}{'not run':>10}")
            continue
        verdict = "" if value >= row.asked else f"   {value / row.asked:.0%} of what is asked"
        lines.append(f"{row.case:<56}{row.asked:7.2f}{value:10.2f}{verdict}")
    return lines


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [measurement.name for measurement in MEASUREMENTS]
    parser.add_argument("--full", action="store_true", help="every row, in bench/results")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--show", action="store_true", help="only the table of bench/results")
    chosen = parser.parse_args(arguments)
    is_full = chosen.full or chosen.show
    os.chdir(ROOT)  # so that committed results name no place of this machine
    folder = Path("bench/results" if is_full else "build/bench")
    folder.mkdir(parents=True, exist_ok=True)
    failures = 0
    for measurement in MEASUREMENTS:
        if chosen.show or measurement.name not in chosen.only:
            continue
        print(f"== {measurement.name}", flush=True)
        try:
            measure(measurement, folder, full=chosen.full)
        except hosts.HostsError as error:
            print(f"not run: {error}", file=sys.stderr)
            failures += not (measurement.needs_root or measurement.name == "jax-step")
    print("\n".join(table(folder)))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
