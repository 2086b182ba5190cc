"""Learning rates for larger global batches."""

from __future__ import annotations

import torch

import ringdl


def scale_with_warm_up(
    optimizer: torch.optim.Optimizer, steps: int, factor: float | None = None
) -> torch.optim.lr_scheduler.LinearLR:
    """Raise the learning rate from what it is to a multiple of it, step by step.

    With P ranks a global batch is P times as large, and the learning rate may be, too, once the
    parameters no longer change quickly (Goyal et al. 2017, "Accurate, Large Minibatch SGD").

    Args:
        optimizer: whose groups have the learning rates of one rank; they have the multiple when
            this returns, as the initial ones of schedulers that are made after it.
        steps: how many steps it takes; 0 scales at once.
        factor: the multiple, at least 1; by default the number of ranks.

    Returns:
        A scheduler, whose ``step()`` follows each ``optimizer.step()``; others may go on from it
        (``torch.optim.lr_scheduler.SequentialLR``).

    Raises:
        UsageError: a negative number of steps, or a factor under 1.
    """
    multiple = float(ringdl.size()) if factor is None else factor
    if steps < 0 or not multiple >= 1:
        raise ringdl.UsageError(
            f"scale_with_warm_up: {steps} steps to the factor {multiple}; give at least 0 steps "
            "and a factor of at least 1"
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * multiple  # groups may share a tensor
        group["initial_lr"] = group["lr"] * 1.0
    begin = 1 / multiple if steps > 0 else 1.0
    return torch.optim.lr_scheduler.LinearLR(optimizer, begin, total_iters=max(steps, 1))
