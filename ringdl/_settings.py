"""Every environment variable that ringdl reads, in one place.

What all ranks must agree on is read on rank 0 and broadcast by ``init()``: launchers do not forward
the environment everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringdl._errors import UsageError

ALGORITHMS = ("ring", "doubling", "direct", "hierarchical")
"""What RINGDL_ALGORITHM may say. MPI's own allreduce is not for all calls: it must be alone."""


@dataclass(frozen=True)
class Settings:
    """What can be set from outside.

    Attributes:
        timeout: seconds after which a wait without a timeout of its own raises StallError
            (RINGDL_TIMEOUT). Ten minutes outlast a slow checkpoint, not a lunch.
        segment_bytes: what travels and is reduced at once (RINGDL_SEGMENT_BYTES); None: what the
            tuning table says.
        watchdog: seconds after which a work in flight, or shutdown(), is told of on stderr, with
            the ranks that it waits for (RINGDL_WATCHDOG; 0: never).
        algorithm: what allreduces whose caller names none go by, wherever it is possible
            (RINGDL_ALGORITHM); None: the fastest by the tuning table.
        tuning: that table, as a file or as JSON, or "default" (RINGDL_TUNING); None: what
            `python -m ringdl tune` measured for such ranks here, if it did.
        shared_memory: whether ranks of one host use one another's memory (RINGDL_SHARED_MEMORY=0:
            no).
        debug: whether all ranks that have such a work then print all of theirs (RINGDL_DEBUG=1).
        timeline: a file for what happens from `init` to `shutdown` (RINGDL_TIMELINE); None: none.
    """

    timeout: float = 600.0
    segment_bytes: int | None = None
    watchdog: float = 60.0
    algorithm: str | None = None
    tuning: str | None = None
    shared_memory: bool = True
    debug: bool = False
    timeline: str | None = None


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
        UsageError: a variable holds no positive number, or no algorithm.
    """
    timeout = _positive(environ, "RINGDL_TIMEOUT", float)
    segment_bytes = _positive(environ, "RINGDL_SEGMENT_BYTES", int)
    watchdog = _positive(environ, "RINGDL_WATCHDOG", float, or_zero=True)
    algorithm = environ.get("RINGDL_ALGORITHM") or None
    if algorithm not in (None, *ALGORITHMS):
        raise UsageError(
            f"RINGDL_ALGORITHM={algorithm!r} is not one of {', '.join(ALGORITHMS)}; correct or "
            "unset it"
        )
    return Settings(
        timeout=Settings.timeout if timeout is None else float(timeout),
        segment_bytes=None if segment_bytes is None else int(segment_bytes),
        watchdog=Settings.watchdog if watchdog is None else float(watchdog),
        algorithm=algorithm,
        tuning=environ.get("RINGDL_TUNING") or None,
        shared_memory=environ.get("RINGDL_SHARED_MEMORY", "1") != "0",
        debug=environ.get("RINGDL_DEBUG", "0") not in ("", "0"),
        timeline=environ.get("RINGDL_TIMELINE") or None,
    )


def _positive(
    environ: Mapping[str, str],
    name: str,
    kind: type[int] | type[float],
    *,
    or_zero: bool = False,
) -> float | None:
    text = environ.get(name)
    if text is None:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = -1
    if not (value > 0 or (or_zero and value == 0)):
        raise UsageError(
            f"{name}={text!r} is not a positive number{' or 0' if or_zero else ''}; correct or "
            "unset it"
        )
    return value
