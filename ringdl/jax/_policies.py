"""Optimizers of optax whose steps follow a policy.

```
update(gradients, state, params)
    before    a policy sees gradients, which it may change, and parameters
    the optimizer's own update
    after     it sees parameters as they are after the step, and may change them and the state
```
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ringdl
from ringdl.jax._followers import Follower
from ringdl.jax._gradients import reduce_tree
from ringdl.jax._plan import Options
from ringdl.jax._ranks import Ranks
from ringdl.policies import Policy

_MOST_STEPS = 1 << 30


class State(NamedTuple):
    """Of an optimizer with a policy."""

    step: Any
    """How many steps have ended."""
    inner: Any
    """What the optimizer itself has."""


class Optimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optimizer of optax whose steps follow a policy."""

    _ringdl_following: Any = None


def follow(optimizer: Any, policy: Policy, ranks: Ranks, options: Options) -> Optimizer:
    """The optimizer, with a policy.

    Args:
        optimizer: a GradientTransformation.
        policy: when ranks exchange what.
        ranks: those.
        options: of gradients, where the policy averages them.
    """
    follower = Follower(policy, ranks)
    inner = optax.with_extra_args_support(optimizer)
    averaged = _averaged_steps(policy)

    def init(params: Any) -> State:
        return State(jnp.zeros((), jnp.int32), inner.init(params))

    def update(updates: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        if params is None:
            raise ringdl.UsageError(
                "update() of an optimizer with a policy needs the parameters: "
                "optimizer.update(gradients, state, params)"
            )

        if ranks.communicator.size == 1:
            updates, own = inner.update(updates, state.inner, params, **extra)
            return updates, State(state.step + 1, own)

        def average(gradients: Any) -> Any:
            return reduce_tree(gradients, None, ranks, options)

        if averaged > 0:
            is_averaged = state.step < averaged
            updates = jax.lax.cond(is_averaged, average, lambda each: each, updates)
        updates = follower.before(updates, params, state.inner)
        updates, own = inner.update(updates, state.inner, params, **extra)
        after, own = follower.after(optax.apply_updates(params, updates), own)
        updates = jax.tree.map(lambda new, old: (new - old).astype(old.dtype), after, params)
        return updates, State(state.step + 1, own)

    made = Optimizer(init, update)
    made._ringdl_following = follower
    return made


def _averaged_steps(policy: Policy) -> int:
    """In how many steps it averages gradients: after these it does not any more."""
    low, high = 0, _MOST_STEPS
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if policy.averages_gradients(middle) else (low, middle)
    return low
