"""What averaging gradients is told, under the names that MPI training scripts use."""

from __future__ import annotations

from typing import Any

import ringdl


def check_reduction(op: Any, predivisor: float, *others: Any) -> Any:
    """Refuse what gradients are not reduced with.

    Args:
        op: Average or Sum.
        predivisor: ``gradient_predivide_factor``.
        others: what `op` may be, too: Adasum.

    Returns:
        `op`.

    Raises:
        UsageError: it is another one; or the predivisor is no positive number, or not 1 although
            nothing is averaged.
    """
    if op not in (ringdl.Average, ringdl.Sum, *others):
        names = "Average, Sum or Adasum" if others else "Average or Sum"
        raise ringdl.UsageError(f"gradients are reduced with {names}, not {op}")
    if predivisor != 1.0 and (op != ringdl.Average or not predivisor > 0):
        raise ringdl.UsageError(
            f"gradient_predivide_factor={predivisor} with {op}: it is a positive number, and only "
            "averages are divided"
        )
    return op


def check_passes(passes: int) -> None:
    """Check ``backward_passes_per_step``.

    Raises:
        UsageError: it is not positive.
    """
    if passes < 1:
        raise ringdl.UsageError(f"backward_passes_per_step must be at least 1, not {passes}")
