"""DistributedOptimizer: an optax optimizer that gets gradients averaged over all ranks."""

from __future__ import annotations

from typing import Any

import ringdl
from ringdl._engine import Reduction
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.options import check_policy
from ringdl.jax._collectives import allreduce
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

    Of what else ``update`` is given, the optimizer gets the averages, too: of ``value``, by which
    ``reduce_on_plateau`` decides, and of ``grad``. Else ranks would decide differently.

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
        UsageError: it is none; or, of ``update``, it is given a ``value_fn``, which line searches
            would evaluate on each rank by itself.
    """
    import optax

    if not isinstance(optimizer, optax.GradientTransformation):
        raise ringdl.UsageError(
            f"ringdl.jax.DistributedOptimizer takes an optimizer of optax, not {optimizer!r}"
        )
    chosen = check_policy(policy, op, wire_of(compression), handed=True)
    if chosen is None:
        averaging = average_gradients(op, bucket_bytes, communicator, compression)
        return _chained(averaging, optimizer, op, communicator)
    from ringdl.jax._policies import follow

    return follow(optimizer, chosen, ranks_of(communicator))


def _chained(
    averaging: Any, optimizer: Any, op: Reduction, communicator: ringdl.Communicator | None
) -> Any:
    import optax

    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> tuple[Any, Any]:
        return averaging.init(params), inner.init(params)

    def update(
        updates: Any, state: tuple[Any, Any], params: Any = None, **extra: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        if extra.get("value_fn") is not None and ranks_of(communicator).communicator.size > 1:
            raise ringdl.UsageError(
                "a line search evaluates value_fn on each rank's own data, and so each rank would "
                "make another step; take an optimizer without one, as "
                "optax.lbfgs(learning_rate, linesearch=None)"
            )
        averages, its = averaging.update(updates, state[0], params)
        if extra.get("value") is not None:
            extra["value"] = allreduce(extra["value"], op, communicator)
        if extra.get("grad") is not None:
            extra["grad"] = averages
        changed, own = inner.update(averages, state[1], params, **extra)
        return changed, (its, own)

    return optax.GradientTransformationExtraArgs(init, update)
