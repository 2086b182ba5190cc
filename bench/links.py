"""How much of a link an allreduce uses: ringdl, MPI's own, and plain TCP, on simulated hosts.

    python bench/links.py --json bench/results/links.json
    python bench/links.py --hosts 2 --ranks-per-host 2 --mib 16 64 --json bench/results/lanes.json

One rank on each of four hosts with links of 1 Gbit/s, float32, in place; needs what `hosts.py`
needs, and the environments of `make test`. No allreduce of S bytes over H hosts whose links carry B
bytes per second takes less than 2(H-1)/H * S/B; the share is that bound over the time. B is the
rate of the link as set, headers included, so about 0.95 is all that TCP can reach in packets of
1500 bytes; at 1 MiB a little more, as links may be ahead of their rate by 128 kB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import hosts

from ringdl.bench import _machine

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bytes_per_second(rate: str) -> float:
    """What tc's notation means.

    Raises:
        HostsError: it is written in another unit.
    """
    match = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    if match is None:
        raise hosts.HostsError(f"--rate {rate}: write it as in 1gbit or 200mbit")
    return float(match[1]) * UNITS[match[2]] / 8


def summary(seconds: Sequence[float], bound: float) -> dict[str, float]:
    """Median, tenth and ninetieth percentile in milliseconds, and the median's share."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    median = statistics.median(seconds)
    return {
        "median_ms": round(1e3 * median, 3),
        "p10_ms": round(1e3 * deciles[0], 3),
        "p90_ms": round(1e3 * deciles[-1], 3),
        "share": round(bound / median, 3),
        "runs": len(seconds),
    }


def machine() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "cpu": _machine.cpu_model(Path("/proc/cpuinfo").read_text()),
        "cores": os.cpu_count(),
        "kernel": _machine.kernel_version(platform.release()),
        "python": platform.python_version(),
    }


def measure(chosen: argparse.Namespace, mpi: str) -> dict[str, object]:
    """Run the ranks under one MPI."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        sizes = [repr(mib) for mib in chosen.mib]
        program = [str(Path(__file__).with_name("links_ranks.py")), "--mib", *sizes]
        program += ["--seconds", str(chosen.seconds), "--json", str(answer)]
        code = hosts.run([chosen.ranks_per_host] * chosen.hosts, hosts.interpreter(mpi), program)
        if code != 0:
            raise hosts.HostsError(f"the ranks under {mpi} ended with exit code {code}")
        times = json.loads(answer.read_text())
    share = 2 * (chosen.hosts - 1) / chosen.hosts / bytes_per_second(chosen.rate)
    return {
        "mpi": times["mpi"],
        "load_before": round(load, 2),
        "sizes": [
            {"mib": size["mib"], "bound_ms": round(1e3 * bound, 3)}
            | {name: summary(seconds, bound) for name, seconds in size["seconds"].items()}
            for size in times["sizes"]
            for bound in [share * size["mib"] * (1 << 20)]
        ],
    }


def show(result: dict[str, object]) -> None:
    print(f"{result['mpi']} (load before: {result['load_before']})")
    print(
        f"  {'MiB':>8}  {'what':<7}{'median':>10}{'p10':>10}{'p90':>10} ms{'share':>8}"
        f"{'over ringdl':>14}{'runs':>6}"
    )
    for size in result["sizes"]:
        for name, figures in size.items():
            if isinstance(figures, dict):
                values = [figures[key] for key in ("median_ms", "p10_ms", "p90_ms")]
                times = "".join(f"{value:10.2f}" for value in values)
                share, runs = figures["share"], figures["runs"]
                ratio = figures["median_ms"] / size["ringdl"]["median_ms"]
                print(f"  {size['mib']:8.4g}  {name:<7}{times}   {share:8.3f}{ratio:14.2f}{runs:6}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mpi", nargs="+", default=["openmpi", "mpich"], help="as for hosts.py")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mib", type=float, nargs="+", default=[2**-10, 1, 16, 64])
    parser.add_argument("--seconds", type=float, default=30, help="for each size (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    chosen = parser.parse_args(arguments)
    try:
        hosts.check_machine()
        bytes_per_second(chosen.rate)
        hosts.up(chosen.hosts, chosen.rate)
        try:
            results = [measure(chosen, mpi) for mpi in chosen.mpi]
        finally:
            hosts.down()
    except hosts.HostsError as error:
        print(f"links: {error}", file=sys.stderr)
        return 2
    for result in results:
        show(result)
    if chosen.json is not None:
        names = ("hosts", "ranks_per_host", "rate", "mib", "seconds")
        report = {
            "command": shlex.join(["python", "bench/links.py", *arguments]),
            "settings": {name: getattr(chosen, name) for name in names},
            "machine": machine(),
            "results": results,
        }
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
