"""What algorithms are chosen by: a cost per algorithm, and how much travels at once.

The costs are straight lines (Hockney 1994): a time for a step, in which a rank waits for another,
and a time for a byte that passes. `python -m ringdl tune` fits them to what it measures.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringdl import _engine
from ringdl._engine import Algorithm
from ringdl._errors import UsageError
from ringdl._settings import default_segment_bytes

if TYPE_CHECKING:
    from pathlib import Path

VERSION = 1
DEFAULTS = "the built-in costs"
SMALLEST_BUCKET = 256 << 10
LARGEST_BUCKET = 25 << 20
LEVELS = ("inside", "between")

_NEVER = (1e6, 1e6)
"""The cost of an algorithm that a table leaves out."""

CostLines = list[list[tuple[float, float]]]
"""By level and `Algorithm`: the seconds of a step and of a byte."""


class Tuning:
    """A table that all ranks share: `init` broadcasts rank 0's.

    The order of a sum depends on the algorithm. So the same bits from run to run need the same
    table: keep `to_json` beside a checkpoint, and give it to ``init(tuning=...)``.

    Attributes:
        costs: by level ("inside" a host, "between" hosts) and algorithm, the seconds of a step and
            of a byte.
        segment_bytes: what travels and is reduced at once between hosts.
        nccl_bytes: from how many bytes on NCCL reduces arrays on devices; None: never.
        source: where it comes from, for people.
    """

    def __init__(
        self,
        costs: Mapping[str, Mapping[str, tuple[float, float]]],
        segment_bytes: int,
        source: str = "",
        nccl_bytes: int | None = None,
    ) -> None:  # no dataclass: making one takes longer than all else here
        self.costs = costs
        self.segment_bytes = segment_bytes
        self.nccl_bytes = nccl_bytes
        self.source = source

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tuning) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def with_segments(self, segment_bytes: int) -> Tuning:
        """The same costs with other segments."""
        return Tuning(self.costs, segment_bytes, self.source, self.nccl_bytes)

    def with_nccl(self, nccl_bytes: int | None) -> Tuning:
        """The same costs with another size from which on NCCL is taken."""
        return Tuning(self.costs, self.segment_bytes, self.source, nccl_bytes)

    @property
    def hash(self) -> str:
        """Identifies the table: eight hexadecimal digits, of all but its source."""
        import hashlib

        return hashlib.blake2b(self.to_json().encode(), digest_size=4).hexdigest()

    def to_json(self) -> str:
        """For a file, a checkpoint, or RINGDL_TUNING."""
        import json

        table = {"version": VERSION, "segment_bytes": self.segment_bytes, "costs": self.costs}
        if self.nccl_bytes is not None:
            table["nccl_bytes"] = self.nccl_bytes
        return json.dumps(table, sort_keys=True)

    def choose(self, byte_count: int, hosts: Sequence[int]) -> str:
        """The algorithm of an allreduce.

        Args:
            byte_count: of the array.
            hosts: the number of each rank's host; without shared memory, as many as ranks.
        """
        return _engine.choose_allreduce(
            self.lines(), byte_count, list(hosts), self.segment_bytes
        ).name

    def bucket_bytes(self, hosts: Sequence[int]) -> int:
        """How large gradient buckets should be: a power of two, or 25 MiB.

        Between hosts a bucket travels while the next one is filled, so small ones are hidden
        better; but steps, in which a link may be idle, should be at most 2% of its time. Inside a
        host the ranks move the bytes themselves, and nothing is hidden.

        Args:
            hosts: the number of each rank's host; without shared memory, as many as ranks.
        """
        if len(set(hosts)) == 1:
            return LARGEST_BUCKET
        name = self.choose(LARGEST_BUCKET, hosts)
        step, byte = self.costs["between"][name]
        steps, moved = _engine.effort_of_allreduce(Algorithm[name], LARGEST_BUCKET, list(hosts))
        seconds_per_byte = byte * moved / LARGEST_BUCKET
        size = SMALLEST_BUCKET
        while size < LARGEST_BUCKET and steps * step > size * seconds_per_byte / 50:
            size *= 2
        return min(size, LARGEST_BUCKET)

    def lines(self) -> CostLines:
        """The costs as the engine takes them."""
        return [
            [self.costs[level].get(algorithm.name, _NEVER) for algorithm in Algorithm]
            for level in LEVELS
        ]


def default_tuning(host_count: int) -> Tuning:
    """The table that is used where nothing was measured."""
    costs = costs_of(_engine.default_costs())
    return Tuning(costs, default_segment_bytes(host_count), DEFAULTS)


def costs_of(levels: CostLines) -> dict[str, dict[str, tuple[float, float]]]:
    """The inverse of `Tuning.lines`, without algorithms that cost nothing: they do not run."""
    return {
        level: {
            algorithm.name: (seconds[0], seconds[1])
            for algorithm, seconds in zip(Algorithm, lines, strict=True)
            if any(seconds)
        }
        for level, lines in zip(LEVELS, levels, strict=True)
    }


def parse_tuning(text: str, source: str) -> Tuning:
    """Read what `Tuning.to_json` wrote.

    Raises:
        UsageError: it is not that.
    """
    import json

    try:
        table = json.loads(text)
        if table["version"] != VERSION:
            raise ValueError(f"version {table['version']}, not {VERSION}")
        costs = {
            level: {
                Algorithm[name].name: (_cost(step), _cost(byte))
                for name, (step, byte) in table["costs"][level].items()
            }
            for level in LEVELS
        }
        segment_bytes = table["segment_bytes"]
        if not isinstance(segment_bytes, int) or not 0 < segment_bytes <= 1 << 30:
            raise ValueError(f"segment_bytes {segment_bytes}")
        nccl_bytes = table.get("nccl_bytes")
        if nccl_bytes is not None and (not isinstance(nccl_bytes, int) or nccl_bytes < 0):
            raise ValueError(f"nccl_bytes {nccl_bytes}")
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"{source} is no tuning table ({error}); make one with `mpirun -n N python -m ringdl "
            "tune`"
        ) from None
    return Tuning(costs, segment_bytes, source, nccl_bytes)


def _cost(seconds: Any) -> float:
    value = float(seconds)
    if not 0 <= value < 1e6:
        raise ValueError(f"a cost of {value} seconds")
    return value


def find_tuning(
    wanted: str | None, vendor: str, hosts: Sequence[int], host_count: int | None = None
) -> Tuning:
    """The table that `init` takes if its caller gives none.

    Args:
        wanted: RINGDL_TUNING: a file, a table as JSON, or "default"; None: what was measured for
            such ranks on such a machine, if anything was.
        vendor: of the MPI library.
        hosts: the number of each rank's host; without shared memory, as many as ranks.
        host_count: how many there really are.

    Raises:
        UsageError: it is missing, or not a table.
    """
    import warnings
    from pathlib import Path

    host_count = host_count or len(set(hosts))
    default = default_tuning(host_count)
    if wanted == "default":
        return default
    if wanted is not None and wanted.lstrip().startswith("{"):
        return parse_tuning(wanted, "RINGDL_TUNING")
    path = cache_path(vendor, hosts, host_count) if wanted is None else Path(wanted)
    try:
        return parse_tuning(path.read_bytes().decode(errors="replace"), str(path))
    except UsageError as error:
        if wanted is not None:
            raise
        warnings.warn(f"{error}; the built-in costs are taken", RuntimeWarning, stacklevel=2)
        return default
    except OSError as error:
        if wanted is None:
            return default
        raise UsageError(
            f"RINGDL_TUNING={wanted!r} cannot be read ({error.strerror}); name a file that "
            "`python -m ringdl tune` has written, or unset it"
        ) from None


def cache_path(vendor: str, hosts: Sequence[int], host_count: int) -> Path:
    """Where the table for such ranks on such a machine is kept. Arguments as of `find_tuning`."""
    import hashlib
    from pathlib import Path

    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    machine = hashlib.blake2b(_processor().encode(), digest_size=4).hexdigest()
    where = topology(hosts)
    if host_count < len(set(hosts)):  # ranks of a host exchange messages
        where += f"-on-{host_count}"
    name = f"{vendor.lower().replace(' ', '-')}-{where}-{machine}.json"
    return Path(root, "ringdl", name)


def topology(hosts: Sequence[int]) -> str:
    """How many ranks are on each host, for people and for files: ``2+2``; many alike: ``64x8``."""
    counts = list(Counter(hosts).values())
    if len(counts) > 4 and len(set(counts)) == 1:
        return f"{len(counts)}x{counts[0]}"
    return "+".join(map(str, counts))


def summary(tuning: Tuning, hosts: Sequence[int]) -> str:
    """What is chosen, by size: ``doubling up to 16 KiB, direct above``."""
    parts: list[str] = []
    before, size = "", 0
    for size in (1 << bits for bits in range(8, 31)):
        chosen = tuning.choose(size, hosts)
        if before not in ("", chosen):
            parts.append(f"{before} up to {_size(size >> 1)}")
        before = chosen
    return ", ".join([*parts, f"{before} above" if parts else before])


def _size(byte_count: int) -> str:
    """Of a power of two: ``256 B``, ``4 KiB``, ``1 MiB``."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if byte_count >= unit:
            return f"{byte_count // unit} {name}"
    return f"{byte_count} B"


def _processor() -> str:
    """The processor's name and how many CPUs are online."""
    from pathlib import Path

    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = text.partition("model name")[2].partition("\n")[0].lstrip("\t :")
    return f"{model} {os.cpu_count()}"
