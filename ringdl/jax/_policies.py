"""Optimizers of optax whose steps follow a policy.

```
update(gradients, state, params)
    before    a policy sees gradients, which it may change, and parameters
    the optimizer's own update
    after     it sees parameters as they are after the step, and may change them and the state
```
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ringdl
from ringdl.jax._followers import Follower
from ringdl.jax._ranks import Ranks
from ringdl.policies import Policy


class State(NamedTuple):
    """Of an optimizer with a policy."""

    inner: Any
    """What the optimizer itself has."""
    number: Any
    """Which call of ``init`` it is from: by it a second network is told from the first."""
    step: Any
    """How many updates it has seen: one that was thrown away is noticed by it."""


class Optimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optimizer of optax whose steps follow a policy."""

    _ringdl_following: Any = None


def follow(optimizer: Any, policy: Policy, ranks: Ranks) -> Optimizer:
    """The optimizer, with a policy.

    Args:
        optimizer: a GradientTransformation.
        policy: when ranks exchange what.
        ranks: those.
    """
    follower = Follower(policy, ranks)
    numbers = itertools.count()
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> State:
        number, none = jnp.asarray([next(numbers), 0], jnp.int32)
        return State(inner.init(params), number, none)

    def update(updates: Any, state: State, params: Any = None, **extra: Any) -> tuple[Any, State]:
        if params is None:
            raise ringdl.UsageError(
                "update() of an optimizer with a policy needs the parameters: "
                "optimizer.update(gradients, state, params)"
            )

        if ranks.communicator.size == 1:
            follower.note_step()
            updates, own = inner.update(updates, state.inner, params, **extra)
            return updates, State(own, state.number, state.step + 1)

        updates = follower.before(updates, params, state.inner, state.number, state.step)
        updates, own = inner.update(updates, state.inner, params, **extra)
        after, own = follower.after(optax.apply_updates(params, updates), own)
        updates = jax.tree.map(_difference, after, params)
        return updates, State(own, state.number, state.step + 1)

    made = Optimizer(init, update)
    made._ringdl_following = follower
    return made


def _difference(new: Any, old: Any) -> Any:
    return (jnp.asarray(new) - old).astype(jnp.result_type(old))
