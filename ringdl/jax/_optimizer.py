"""DistributedOptimizer: an optax optimizer that gets gradients averaged over all ranks."""

from __future__ import annotations

from typing import Any

import ringdl
from ringdl._engine import Reduction
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.options import check_policy
from ringdl.jax._gradients import average_gradients
from ringdl.jax._plan import BUCKET_BYTES
from ringdl.jax._ranks import ranks_of
from ringdl.policies import Policy


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    op: Reduction = Reduction.Average,
    bucket_bytes: int = BUCKET_BYTES,
    communicator: ringdl.Communicator | None = None,
    compression: AnyCompression = None,
    policy: Policy | None = None,
) -> Any:
    """``optax.chain(average_gradients(...), optimizer)``, under the name of other frameworks.

    With a policy, ``update`` needs the parameters. What it changes in them is an update, too, so
    parameters that ranks have averaged are equal but for the rounding of ``apply_updates``.

    Args:
        optimizer: a GradientTransformation of optax.
        op: see `average_gradients`.
        bucket_bytes: see there.
        communicator: see there.
        compression: see there.
        policy: when ranks exchange what: one of `ringdl.policies`, by default ``AllReduce()``.

    Raises:
        UsageError: it is none.
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise ringdl.UsageError(
            f"ringdl.jax.DistributedOptimizer takes an optimizer of optax, not {optimizer!r}"
        )
    chosen = check_policy(policy, op, wire_of(compression), handed=True)
    if chosen is None:
        return optax.chain(
            average_gradients(op, bucket_bytes, communicator, compression), optimizer
        )
    from ringdl.jax._policies import follow

    return follow(optimizer, chosen, ranks_of(communicator))
