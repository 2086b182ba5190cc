"""What float32 travels as between hosts, as training scripts name it."""

from __future__ import annotations

from typing import TypeAlias, cast

import ringdl
from ringdl._reductions import CompressionName

AnyCompression: TypeAlias = str | None


def wire_of(compression: AnyCompression) -> CompressionName | None:
    """What travels: a dtype's name, or None where nothing is narrowed.

    Args:
        compression: a dtype's name, "none" or None.

    Raises:
        UsageError: it is neither.
    """
    if compression is None or compression == "none":
        return None
    if not isinstance(compression, str):
        raise ringdl.UsageError(
            f"compression is {compression!r}; take Compression.none, .fp16 or .bf16"
        )
    return cast(CompressionName, str(compression))


class Compression:
    """What ``compression`` may be."""

    none = "none"
    fp16 = "float16"
    bf16 = "bfloat16"
