"""Every environment variable that ringdl reads, in one place.

What all ranks must agree on is read on rank 0 and broadcast by ``init()``: launchers do not forward
the environment everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringdl._errors import UsageError


@dataclass(frozen=True)
class Settings:
    """What can be set from outside.

    Attributes:
        timeout: seconds after which a wait without a timeout of its own raises StallError
            (RINGDL_TIMEOUT). Ten minutes outlast a slow checkpoint, not a lunch.
        segment_bytes: what travels and is reduced at once (RINGDL_SEGMENT_BYTES). 256 KiB fits a
            core's second-level cache twice, and its transfer at 10 Gbit/s outlasts the latency.
        watchdog: seconds after which a work in flight is told of on stderr, with the ranks that it
            waits for (RINGDL_WATCHDOG; 0: never).
        debug: whether all ranks that have such a work then print all of theirs (RINGDL_DEBUG=1).
    """

    timeout: float = 600.0
    segment_bytes: int = 256 << 10
    watchdog: float = 60.0
    debug: bool = False


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read the settings of one process.

    Raises:
        UsageError: a variable does not hold a positive number.
    """
    return Settings(
        timeout=float(_positive(environ, "RINGDL_TIMEOUT", float, Settings.timeout)),
        segment_bytes=int(_positive(environ, "RINGDL_SEGMENT_BYTES", int, Settings.segment_bytes)),
        watchdog=float(
            _positive(environ, "RINGDL_WATCHDOG", float, Settings.watchdog, or_zero=True)
        ),
        debug=environ.get("RINGDL_DEBUG", "0") not in ("", "0"),
    )


def _positive(
    environ: Mapping[str, str],
    name: str,
    kind: type[int] | type[float],
    default: float,
    *,
    or_zero: bool = False,
) -> float:
    text = environ.get(name)
    if text is None:
        return default
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
