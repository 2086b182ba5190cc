"""What ``torch.distributed``'s reductions are for ringdl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import ringdl

_REDUCTIONS = {
    dist.ReduceOp.SUM: ringdl.Sum,
    dist.ReduceOp.AVG: ringdl.Average,
    dist.ReduceOp.MIN: ringdl.Min,
    dist.ReduceOp.MAX: ringdl.Max,
    dist.ReduceOp.PRODUCT: ringdl.Product,
    dist.ReduceOp.BAND: ringdl.BitAnd,
    dist.ReduceOp.BOR: ringdl.BitOr,
    dist.ReduceOp.BXOR: ringdl.BitXor,
}

Factor = float | torch.Tensor | None


def reduction_of(op: Any) -> tuple[ringdl.Reduction, Factor]:
    """A reduction, and what each rank's tensors are multiplied by before, if by anything.

    Args:
        op: torch's; None is the sum.

    Raises:
        UsageError: ringdl does not have it.
    """
    if op is None:
        return ringdl.Sum, None
    for known, reduction in _REDUCTIONS.items():
        if op == known:
            return reduction, None
    if op == dist.ReduceOp.PREMUL_SUM:
        state = op.__getstate__()  # there is no other way to the factor
        if isinstance(state, tuple) and state[1] is not None:
            return ringdl.Sum, state[1]
    raise ringdl.UsageError(
        "ringdl has no such reduction; take ReduceOp.SUM, AVG, MIN, MAX, PRODUCT, BAND, BOR or BXOR"
    )


def scale(tensors: Sequence[torch.Tensor], factor: Factor) -> None:
    """Multiply in place, if there is a factor.

    Raises:
        UsageError: the tensors are not floating-point.
    """
    if factor is None:
        return
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ringdl.UsageError(
                f"PREMUL_SUM is for floating-point tensors, not for {tensor.dtype}; multiply them "
                "yourself, and take ReduceOp.SUM"
            )
        tensor.mul_(factor)
