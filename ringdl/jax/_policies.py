"""Policies in compiled functions: XLA calls them, twice in a step, with the arrays that it has.

```
update(gradients, state, params)
    before    a policy sees gradients, which it may change, and parameters
    the optimizer's own update
    after     it sees parameters as they are after the step, and may change them and the state
```
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

import ringdl
from ringdl import _engine
from ringdl._engine import Kind, Reduction
from ringdl._training.following import Following, Model
from ringdl.jax._gradients import Leaves, flat, reduce_tree
from ringdl.jax._plan import HOW_TO_MEND, Options, error_of
from ringdl.jax._primitive import lower, refuse_platform
from ringdl.jax._ranks import ORDER, Ranks
from ringdl.policies import Policy
from ringdl.policies._policy import Array

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
    follower = _Follower(policy, ranks)
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


class _Model(Model):
    """What policies see: the arrays of the current call."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks.communicator)
        self.now: dict[str, Mapping[str, Array]] = {}

    def read_parameters(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._read("parameters")

    def read_gradients(self) -> Mapping[str, Array | None]:
        """See `Model`."""
        return self._read("gradients")

    def read_state(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._read("state")

    def reset_state(self) -> None:
        """See `Model`."""
        raise ringdl.UsageError("the state of optax's optimizers is not reset; average or keep it")

    def _read(self, what: str) -> Mapping[str, Array]:
        if what not in self.now:
            raise ringdl.UsageError(
                f"with JAX a policy has no {what} here: they are arguments of compiled functions"
            )
        return self.now[what]


class _Follower:
    """A policy for one optimizer of optax."""

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self._policy, self._ranks = policy, ranks
        self._model = _Model(ranks)
        self._following: Following | None = None

    def before(self, gradients: Any, parameters: Any, state: Any) -> Any:
        """The gradients that a step is to use. Collective, as the policy is."""
        named, structure = flat(gradients)
        parts = {"gradients": named, "parameters": flat(parameters)[0], "state": _floats(state)}
        return jax.tree.unflatten(structure, self._call("before", parts, len(named)))

    def after(self, parameters: Any, state: Any) -> tuple[Any, Any]:
        """Parameters and state after a step. Collective, as the policy is."""
        named, structure = flat(parameters)
        leaves, own = jax.tree.flatten(state)
        floats = _floats(state)
        results = self._call("after", {"parameters": named, "state": floats}, None)
        changed = iter(results[len(named) :])
        whole = [next(changed) if _is_float(leaf) else leaf for leaf in leaves]
        return (
            jax.tree.unflatten(structure, results[: len(named)]),
            jax.tree.unflatten(own, whole),
        )

    def synchronize(self, parameters: Any = None) -> Any:
        """See `ringdl.policies.synchronize`."""
        if parameters is None:
            raise ringdl.UsageError(
                "with JAX pass the parameters: params = synchronize(optimizer, params)"
            )
        jax.effects_barrier()
        named, structure = flat(parameters)
        copies = {name: jax.device_get(leaf).copy() for name, leaf in named}
        self._model.now = {"parameters": copies}
        self._driven().synchronize()
        self._model.now = {}
        return jax.tree.unflatten(structure, [jnp.asarray(copies[name]) for name, _ in named])

    def _driven(self) -> Following:
        if self._following is None:
            self._following = Following(self._policy, self._model, HOW_TO_MEND)
        return self._following

    def _call(self, when: str, parts: Mapping[str, Leaves], count: int | None) -> list[Any]:
        operands = [jnp.asarray(leaf) for named in parts.values() for _, leaf in named]
        specs = {
            what: [(name, jnp.shape(leaf), jnp.result_type(leaf)) for name, leaf in named]
            for what, named in parts.items()
        }
        _calls.append(_Call(self, when, specs))
        how = {"call": len(_calls) - 1, "count": len(operands) if count is None else count}
        return follow_p.bind(*operands, **how, **self._ranks.place())  # type: ignore[no-any-return]

    def carry_out(self, when: str, arrays: dict[str, Mapping[str, Array]]) -> None:
        """What XLA has called for, with its arrays."""
        self._model.now = arrays
        following = self._driven()
        try:
            if when == "before":
                following.before_step()
            else:
                following.after_step()
        finally:
            self._model.now = {}


class _Call(NamedTuple):
    """A place in a compiled function."""

    follower: _Follower
    when: str
    specs: Mapping[str, Sequence[tuple[str, tuple[int, ...], Any]]]


_calls: list[_Call] = []
"""By number; compiled functions may live for as long as the process."""


def _carry_out(number: int, memory: list[Array]) -> str:
    call, each = _calls[number], iter(memory)
    arrays: dict[str, Mapping[str, Array]] = {
        what: {name: next(each).view(dtype).reshape(shape) for name, shape, dtype in its}
        for what, its in call.specs.items()
    }
    return error_of(lambda: call.follower.carry_out(call.when, arrays))


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _floats(tree: Any) -> Leaves:
    return [(name, leaf) for name, leaf in flat(tree)[0] if _is_float(leaf)]


def _results(*operands: Any, count: int, **_: Any) -> Any:
    return [each.update(weak_type=False) for each in operands[:count]], {ORDER}


def _lower(ctx: Any, *operands: Any, call: int, count: int, **params: Any) -> Any:
    how: Any = {"kind": Kind.allreduce, "op": Reduction.Average, "root": -1}
    return lower(ctx, *operands, aliased=count, count=-1, plan=call, **how, **params)


follow_p = Primitive("ringdl_follow")
follow_p.multiple_results = True
follow_p.def_effectful_abstract_eval(_results)
dispatch.simple_impl(follow_p)
mlir.register_lowering(follow_p, refuse_platform)
mlir.register_lowering(follow_p, _lower, platform="cpu")
_engine.xla_ask_policies(_carry_out)
