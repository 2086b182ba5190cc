"""``mpirun -n N python -m ringdl tune``: measure a few allreduces and keep what they cost.

A few seconds. Each possible algorithm is timed at a few sizes, and a straight line is fitted to its
times; where messages go around rings, segments are tried, too. With ``--device cuda`` NCCL is
compared with ringdl's own way, instead, and the table says from which size on it is faster.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ringdl import _engine, _startup, _tuning
from ringdl._engine import Algorithm, Reduction
from ringdl._errors import UsageError
from ringdl._files import write_text
from ringdl._tuning import Tuning, cache_path, topology

if TYPE_CHECKING:
    from ringdl._communicator import Communicator

SIZES = (256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
SEGMENTS = (16 << 10, 32 << 10, 48 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20)
SEGMENT_ARRAY = 8 << 20
"""Large enough to be cut into several segments per rank."""
SIZES_ON_DEVICES = tuple(64 << 10 << shift for shift in range(0, 11, 2))
SECONDS_EACH = 0.15
Sample = tuple[int, float]
"""Bytes of an array, and the seconds that it took."""


def main(arguments: Sequence[str]) -> int:
    """Run the command on every rank; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="mpirun -n N python -m ringdl tune",
        description="Measure what allreduces cost here, and choose by it from now on.",
        epilog="Jobs with as many ranks per host on such a machine take the table at init(); "
        "RINGDL_TUNING=default leaves it out, RINGDL_TUNING=FILE takes another.",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: arrays on devices; keeps what the table says of others",
    )
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file instead")
    chosen = parser.parse_args(arguments)
    communicator = _startup.init()
    if communicator.size == 1:
        print("ringdl: tune needs several ranks: mpirun -n N python -m ringdl tune")
        return 2
    hosts = communicator.memory_hosts()
    vendor = communicator._shared.vendor
    path = chosen.output or cache_path(vendor, hosts, communicator.host_count)
    lack = communicator.broadcast_object(_lack(path) if communicator.rank == 0 else "")
    if lack:
        if communicator.rank == 0:
            print(f"ringdl: {lack}", file=sys.stderr)
        return 2
    if chosen.device == "cuda":
        try:
            tuning, on_devices = measure_on_devices(communicator)
        except UsageError as error:  # on all ranks
            if communicator.rank == 0:
                print(f"ringdl: there is nothing to choose: {error}")
            return 2
        text = describe_devices(tuning, on_devices, hosts)
    else:
        tuning, samples = measure(communicator)
        text = describe(tuning, samples, hosts)
    if communicator.rank == 0:
        print(text)
        write_text(path, tuning.to_json() + "\n")
        print(f"written to {path} (hash {tuning.hash})")
    return 0


def _lack(path: Path) -> str:
    """Why the table could not be written there; empty if it can be."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.resolve().with_name(f".{path.name}.{os.getpid()}")
        beside.touch()
        beside.unlink()
        return ""
    except OSError as error:
        reason = error.strerror
    return (
        f"the table cannot be written to {path}: {reason}; name another file by -o, and to jobs by "
        "RINGDL_TUNING"
    )


def measure(
    communicator: Communicator,
) -> tuple[Tuning, dict[str, dict[str, list[Sample]]]]:
    """Fit a table to the ranks of a communicator. Collective.

    Returns:
        The table, the same on all ranks, and what was measured, by level and algorithm.
    """
    hosts = communicator.memory_hosts()
    before = communicator.tuning
    samples: dict[str, dict[str, list[Sample]]] = {level: {} for level in _tuning.LEVELS}
    segment_bytes = before.segment_bytes
    if len(set(hosts)) > 1:
        segment_bytes = _best_segment(communicator, hosts)
        samples["between"] = _times(communicator, hosts, segment_bytes)
    local = communicator.split(hosts[communicator.rank])
    assert local is not None
    if local.size > 1:
        samples["inside"] = _times(local, [0] * local.size, segment_bytes)
    costs = {level: dict(before.costs[level]) for level in _tuning.LEVELS}
    layouts = {"inside": [0] * local.size, "between": hosts}
    for level, times in samples.items():
        for name, measured in times.items():
            costs[level][name] = fit(Algorithm[name], measured, layouts[level])
    tuning = Tuning(costs, segment_bytes, "just measured", before.nccl_bytes)
    agreed: Tuning = communicator.broadcast_object(tuning)  # rank 0's clock
    communicator.use_tuning(agreed)
    return agreed, samples


def measure_on_devices(
    communicator: Communicator,
) -> tuple[Tuning, list[tuple[int, float, float]]]:
    """Find from which size on NCCL is faster, for arrays on the ranks' devices. Collective.

    Returns:
        The table, the same on all ranks, and by size the seconds of ringdl's own way and of NCCL.

    Raises:
        UsageError: on all ranks, if they cannot use NCCL together; or a rank has no device.
    """
    devices = communicator.allgather_object(communicator.local_device)
    if None in devices:
        raise UsageError(f"rank {devices.index(None)} has no CUDA device")
    before = communicator.tuning
    communicator.use_tuning(before.with_nccl(None))
    samples = []
    for size in SIZES_ON_DEVICES:
        array = communicator.empty(size // 4, device="cuda")
        own, nccl = (_time(communicator, array, algorithm) for algorithm in (None, "nccl"))
        samples.append((size, own, nccl))
    tuning = before.with_nccl(nccl_bytes(samples))
    communicator.use_tuning(tuning)
    return tuning, samples


def nccl_bytes(samples: Sequence[tuple[int, float, float]]) -> int | None:
    """The smallest size from which on NCCL is always faster; None: not even at the largest.

    Args:
        samples: by size, in ascending order, the seconds of ringdl's own way and of NCCL.
    """
    least = None
    for size, own, nccl in reversed(samples):
        if nccl >= own:
            break
        least = size
    return least


def fit(
    algorithm: Algorithm, samples: Sequence[Sample], hosts: Sequence[int]
) -> tuple[float, float]:
    """The cost of a step and of a byte that explain an algorithm's times best.

    Least squares of relative errors, as sizes differ by orders of magnitude; neither is negative.

    Args:
        algorithm: what was timed.
        samples: bytes and seconds.
        hosts: the number of each rank's host.
    """
    import numpy as np

    rows = [
        [effort / seconds for effort in _engine.effort_of_allreduce(algorithm, size, list(hosts))]
        for size, seconds in samples
    ]
    matrix = np.array(rows)
    ones = np.ones(len(rows))
    costs = np.linalg.lstsq(matrix, ones, rcond=None)[0]
    for i in (0, 1):
        if costs[i] < 0:
            other = matrix[:, 1 - i]
            costs[1 - i] = other.sum() / (other @ other)
            costs[i] = 0.0
    return float(costs[0]), float(costs[1])


def describe(
    tuning: Tuning, samples: dict[str, dict[str, list[Sample]]], hosts: Sequence[int]
) -> str:
    """What was measured, what the table says of it, and what it chooses."""
    lines = [f"allreduce on {topology(hosts)} ranks, us: measured (by the table)"]
    for level, times in samples.items():
        if not times:
            continue
        ranks = [0] * max(hosts.count(0), 1) if level == "inside" else hosts
        names = list(times)
        head = "inside a host" if level == "inside" else "between hosts"
        lines.append(f"{head:>14}" + "".join(f"{name:>22}" for name in names) + "   chosen")
        for size in sorted({size for measured in times.values() for size, _ in measured}):
            row = f"{size:>14,}"
            for name in names:
                seconds = dict(times[name]).get(size)
                step, byte = tuning.costs[level][name]
                efforts = _engine.effort_of_allreduce(Algorithm[name], size, list(ranks))
                told = efforts[0] * step + efforts[1] * byte
                text = f"{seconds * 1e6:,.0f} ({told * 1e6:,.0f})" if seconds else "-"
                row += f"{text:>22}"
            lines.append(f"{row}   {tuning.choose(size, ranks)}")
    lines.append(f"segments of {tuning.segment_bytes >> 10} KiB")
    return "\n".join(lines)


def describe_devices(
    tuning: Tuning, samples: Sequence[tuple[int, float, float]], hosts: Sequence[int]
) -> str:
    """What was measured on devices, and what is chosen by it."""
    lines = [
        f"allreduce of arrays on devices of {topology(hosts)} ranks, us",
        f"{'bytes':>14}{'ringdl':>22}{'nccl':>22}   chosen",
    ]
    for size, own, nccl in samples:
        is_nccl = tuning.nccl_bytes is not None and size >= tuning.nccl_bytes
        name = "nccl" if is_nccl else "ringdl"
        lines.append(f"{size:>14,}{own * 1e6:>22,.0f}{nccl * 1e6:>22,.0f}   {name}")
    return "\n".join(lines)


def _candidates(hosts: Sequence[int], byte_count: int, segment_bytes: int) -> list[Algorithm]:
    return [
        algorithm
        for algorithm in Algorithm
        if _engine.is_possible_allreduce(algorithm, byte_count, list(hosts), segment_bytes)
    ]


def _times(
    communicator: Communicator, hosts: Sequence[int], segment_bytes: int
) -> dict[str, list[Sample]]:
    """Seconds of each possible algorithm at each size, in turns."""
    times: dict[str, list[Sample]] = {}
    for size in SIZES:
        for algorithm in _candidates(hosts, size, segment_bytes):
            seconds = _time(communicator, _array(communicator, size), algorithm.name)
            times.setdefault(algorithm.name, []).append((size, seconds))
    return times


def _best_segment(communicator: Communicator, hosts: Sequence[int]) -> int:
    way = Algorithm.ring if len(set(hosts)) == len(hosts) else Algorithm.hierarchical
    seconds: dict[int, float] = {}
    for segment_bytes in SEGMENTS:
        communicator.use_tuning(communicator.tuning.with_segments(segment_bytes))
        array = _array(communicator, SEGMENT_ARRAY)
        seconds[segment_bytes] = _time(communicator, array, way.name)
    # The smallest that is about as good: small arrays are cut into segments, too.
    least = min(seconds.values())
    best = next(size for size, time in seconds.items() if time <= 1.03 * least)
    communicator.use_tuning(communicator.tuning.with_segments(best))
    return best


def _array(communicator: Communicator, byte_count: int) -> Any:
    array = communicator.empty(byte_count // 4)
    array[...] = 0
    return array


def _time(communicator: Communicator, array: Any, algorithm: str | None) -> float:
    """The median seconds of an allreduce, of the slowest rank; the same on all ranks."""
    import numpy as np

    def once() -> float:
        begin = time.perf_counter()
        communicator.allreduce_(array, Reduction.Sum, algorithm=algorithm)  # type: ignore[arg-type]
        return time.perf_counter() - begin

    first = [once() for _ in range(3)]
    slowest = np.array([min(first)])
    communicator.allreduce_(slowest, Reduction.Max, "ringdl.tune")
    count = int(min(max(SECONDS_EACH / max(slowest[0], 1e-6), 3), 200))
    result = np.array([median(once() for _ in range(count))])
    communicator.allreduce_(result, Reduction.Max, "ringdl.tune")
    return float(result[0])
