"""DistributedOptimizer: an optax optimizer that gets gradients averaged over all ranks."""

from __future__ import annotations

from typing import Any

import ringdl
from ringdl.jax._gradients import average_gradients


def DistributedOptimizer(optimizer: Any, **options: Any) -> Any:  # noqa: N802
    """``optax.chain(average_gradients(**options), optimizer)``, under the name of other frameworks.

    Args:
        optimizer: a GradientTransformation of optax.
        options: see `average_gradients`.

    Raises:
        UsageError: it is none.
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise ringdl.UsageError(
            f"ringdl.jax.DistributedOptimizer takes an optimizer of optax, not {optimizer!r}"
        )
    return optax.chain(average_gradients(**options), optimizer)
