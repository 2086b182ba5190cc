"""Policies in compiled functions: XLA calls them, twice in a step, with the arrays that it has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ringdl import _engine
from ringdl._engine import Kind, Reduction
from ringdl._errors import UsageError
from ringdl._training.handed import Handed
from ringdl.jax._gradients import Leaves, flat
from ringdl.jax._plan import HOW_TO_MEND, error_of
from ringdl.jax._primitive import device_count, lower, refuse_platform
from ringdl.jax._ranks import ORDER, Ranks
from ringdl.policies import Policy
from ringdl.policies._policy import Array

_PLACE = "place"
"""Which network a call is of, and which step."""


class Follower:
    """A policy for one optimizer, whose arrays are JAX's.

    Args:
        policy: when ranks exchange what.
        ranks: those.
        how_to_mend: what to do if parameters differ at the first step.
    """

    def __init__(self, policy: Policy, ranks: Ranks, how_to_mend: str = HOW_TO_MEND) -> None:
        self._ranks = ranks
        self.handed = Handed(policy, ranks.communicator, how_to_mend)
        self._numbers: dict[Any, int] = {}
        """Of its calls, by what they pass."""

    def before(self, gradients: Any, parameters: Any, state: Any, number: Any, step: Any) -> Any:
        """The gradients that a step is to use. Collective, as the policy is.

        Args:
            gradients: of the step.
            parameters: before it.
            state: the optimizer's.
            number: which network they are of.
            step: how many steps the state has seen.
        """
        given = _floats(gradients, _is_trained)
        parts = {"gradients": given, "parameters": _floats(parameters, _is_trained)}
        parts |= {"state": _floats(state), _PLACE: [("number", number), ("step", step)]}
        results = iter(self._call("before", parts, len(given)))
        return _replaced(gradients, results, _is_trained)

    def after(self, parameters: Any, state: Any) -> tuple[Any, Any]:
        """Parameters and state after a step. Collective, as the policy is."""
        parts = {"parameters": _floats(parameters, _is_trained), "state": _floats(state)}
        results = iter(self._call("after", parts, None))
        return _replaced(parameters, results, _is_trained), _replaced(state, results, _is_float)

    def call(
        self, when: str, changed: Mapping[str, Any], read: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The same of arrays by name: those of `changed`, as they are then."""
        parts = {part: [*its.items()] for part, its in {**changed, **read}.items()}
        count = sum(map(len, changed.values()))
        results = iter(self._call(when, parts, count))
        return {part: {name: next(results) for name in its} for part, its in changed.items()}

    def note_step(self) -> None:
        """A step of one rank alone: what is compiled is for no more of them."""
        if hasattr(self.handed.policy, "rounds"):  # which scripts may end by
            nothing: dict[str, Any] = {"gradients": {}, "parameters": {}, "state": {}}
            self.call("before", {}, nothing)
            self.call("after", {}, nothing)
        else:
            follow_p.bind(call=-1, count=0, **self._ranks.place())

    def synchronize(self, parameters: Any = None) -> Any:
        """See `ringdl.policies.synchronize`."""
        if parameters is None:
            raise UsageError(
                "with JAX pass the parameters: params = synchronize(optimizer, params)"
            )
        jax.effects_barrier()
        named = _floats(parameters, _is_trained)
        copies = {name: jax.device_get(leaf).copy() for name, leaf in named}
        self.handed.synchronize(copies)
        return _replaced(parameters, map(jnp.asarray, copies.values()), _is_trained)

    def start_over(self) -> None:
        """See `ringdl.policies.start_over`."""
        jax.effects_barrier()
        self.handed.start_over()

    def _call(self, when: str, parts: Mapping[str, Leaves], count: int | None) -> list[Any]:
        operands = [jnp.asarray(leaf) for named in parts.values() for _, leaf in named]
        specs = {
            what: [(name, jnp.shape(leaf), jnp.result_type(leaf)) for name, leaf in named]
            for what, named in parts.items()
        }
        key = (when, *((what, *its) for what, its in specs.items()))
        if key not in self._numbers:
            self._numbers[key] = len(_calls)
            _calls.append(_Call(weakref.ref(self.handed), when, specs))
        number = self._numbers[key]
        how = {"call": number, "count": len(operands) if count is None else count}
        return follow_p.bind(*operands, **how, **self._ranks.place())  # type: ignore[no-any-return]


class _Call(NamedTuple):
    """A place in a compiled function."""

    handed: weakref.ref[Handed]
    when: str
    specs: Mapping[str, Sequence[tuple[str, tuple[int, ...], Any]]]


_calls: list[_Call] = []
"""By number; compiled functions may live for as long as the process."""


def _carry_out(number: int, memory: list[Array]) -> str:
    call, each = _calls[number], iter(memory)
    handed = call.handed()
    if handed is None and not memory:
        return ""  # of one rank, whose rounds nobody asks for any more
    if handed is None:
        return "ringdl.UsageError: the optimizer of this compiled function is gone; keep it"
    arrays: dict[str, Mapping[str, Array]] = {
        what: {name: next(each).view(dtype).reshape(shape) for name, shape, dtype in its}
        for what, its in call.specs.items()
    }
    place = {name: int(each[()]) for name, each in arrays.pop(_PLACE, {}).items()}
    return error_of(lambda: handed.carry_out(call.when, arrays, **place))


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_trained(leaf: Any) -> bool:
    """Integers are what ``optax.masked`` leaves alone."""
    return not hasattr(leaf, "dtype") or bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def _floats(tree: Any, is_one: Callable[[Any], bool] = _is_float) -> Leaves:
    return [(name, leaf) for name, leaf in flat(tree)[0] if is_one(leaf)]


def _replaced(tree: Any, by: Iterator[Any], is_one: Callable[[Any], bool]) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    whole = [next(by) if is_one(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(structure, whole)


def _results(*operands: Any, count: int, **_: Any) -> Any:
    return [each.update(weak_type=False) for each in operands[:count]], {ORDER}


def _lower(ctx: Any, *operands: Any, call: int, count: int, **params: Any) -> Any:
    if device_count(ctx) > 1:
        raise UsageError("a policy is for one device of each rank; average gradients instead")
    how: Any = {"kind": Kind.allreduce, "op": Reduction.Average, "root": -1}
    return lower(ctx, *operands, aliased=count, count=-1, plan=call, **how, **params)


follow_p = Primitive("ringdl_follow")
follow_p.multiple_results = True
follow_p.def_effectful_abstract_eval(_results)
dispatch.simple_impl(follow_p)
mlir.register_lowering(follow_p, refuse_platform)
mlir.register_lowering(follow_p, _lower, platform="cpu")
_engine.xla_ask_policies(_carry_out)
