"""One primitive for all collectives, which XLA carries out by calling the engine.

Calls are ordered by an effect: XLA passes a token from one to the next, through loops and from one
compiled function to another. So all ranks that run the same program make them in the same order,
and none waits for one that another rank makes later.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch, effects
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import ringdl
from ringdl import _engine, _startup
from ringdl._engine import DType, Kind, Reduction
from ringdl._errors import UsageError

_TARGET = "ringdl_collective"
_token: Any = getattr(jax.ffi, "abstract_token", None) or core.abstract_token  # by jax 0.11, before
_numbers = itertools.count()


class _Order(effects.Effect):
    def __repr__(self) -> str:
        return "the order of ringdl's collectives"

    __str__ = __repr__


_order = _Order()
effects.lowerable_effects.add_type(_Order)
effects.ordered_effects.add_type(_Order)
effects.control_flow_allowed_effects.add_type(_Order)
effects.custom_derivatives_allowed_effects.add_type(_Order)
effects.remat_allowed_effects.add_type(_Order)


def _settle() -> None:
    """Wait for what XLA is still to carry out, and forget what has failed there.

    JAX keeps the token of a call that failed, and all later ones of the thread fail by it.
    """
    with suppress(Exception):  # which whoever needs the result gets, too
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()


_startup.before_shutdown.append(_settle)


class Ranks:
    """The ranks of a compiled function's collectives: of one communicator, from epoch to epoch."""

    def __init__(self, communicator: ringdl.Communicator) -> None:
        self.communicator = communicator
        self.number = next(_numbers)
        communicator._shared.add(self)
        self._bind()
        weakref.finalize(self, _engine.xla_forget, self.number).atexit = False

    def _bind(self) -> None:
        its = self.communicator
        its._bind()
        engine: Any = its._engine
        if isinstance(engine, _engine.Communicator):
            _engine.xla_use(self.number, engine, its._group, its._timeout)
        else:  # a group of ranks that there are no more
            _engine.xla_forget(self.number)


def ranks_of(communicator: ringdl.Communicator | None) -> Ranks:
    """Those of a communicator, by default of the one of `ringdl.init`; always the same object."""
    its = ringdl.get_communicator() if communicator is None else communicator
    if not isinstance(its, ringdl.Communicator):
        raise UsageError(f"communicator is {its!r}; pass one of ringdl.get_communicator().group()")
    found: Ranks | None = its.__dict__.get("_jax_ranks")
    if found is None:
        found = its.__dict__["_jax_ranks"] = Ranks(its)
    return found


def collect(
    x: Any, kind: Kind, ranks: Ranks, op: Reduction = Reduction.Sum, root: int = -1
) -> jax.Array:
    """The collective, in a function that is being traced.

    Raises:
        UsageError: elements or a shape that it does not take.
    """
    x = jnp.asarray(x)
    its = ranks.communicator
    if x.dtype.name not in DType.__members__:
        raise UsageError(
            f"arrays of dtype {x.dtype.name} are not supported; use one of "
            f"{', '.join(DType.__members__)}"
        )
    if x.ndim == 0 and kind not in (Kind.allreduce, Kind.broadcast):
        raise UsageError(f"{kind.name} goes by rows, and an array without axes has none")
    if kind == Kind.alltoall and x.shape[0] % its.size != 0:
        raise UsageError(
            f"alltoall gives each of {its.size} ranks as many rows inside of "
            f"jax.jit, and there are {x.shape[0]}; pad them, or call it outside"
        )
    if kind == Kind.broadcast and not 0 <= root < its.size:
        raise UsageError(f"root {root} is not a rank; ranks are 0 to {its.size - 1}")
    place = {"ranks": ranks, "rank": its.rank, "size": its.size}
    result: jax.Array = collective_p.bind(x, kind=kind, op=op, root=root, **place)
    return result


def _result(x: Any, *, kind: Kind, rank: int, size: int, **_: Any) -> Any:
    shape = x.shape
    if kind == Kind.allgather:
        shape = (shape[0] * size, *shape[1:])
    elif kind == Kind.reducescatter:
        shape = (shape[0] // size + (rank < shape[0] % size), *shape[1:])
    return jax.core.ShapedArray(shape, x.dtype), {_order}


def _lower(ctx: Any, *arrays: Any, aliases: Any = None, ranks: Ranks, **params: Any) -> Any:
    """XLA's call of the engine, with the token of the effect behind its arrays."""
    inner = ctx.replace(avals_in=[*ctx.avals_in, _token], avals_out=[*ctx.avals_out, _token])
    lower = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=aliases)
    numbers = {"ranks": ranks.number, "rank": params["rank"], "size": params["size"]}
    numbers |= {"kind": params["kind"].value, "reduction": params["op"].value}
    numbers |= {"root": params["root"], "count": len(arrays)}
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    *results, token = lower(inner, *arrays, ctx.tokens_in.get(_order), **attributes)
    ctx.set_tokens_out(mlir.TokenSet({_order: token}))
    ctx.module_context.add_keepalive(ranks)
    return results


def _refuse_platform(ctx: Any, *_: Any, **__: Any) -> Any:
    platform = (ctx.platforms or ctx.module_context.platforms)[0]
    raise UsageError(
        "inside of jax.jit ringdl's collectives are for the CPU, and this is compiled for "
        f"{platform}; call them between compiled functions, or compile under "
        "jax.default_device(jax.devices('cpu')[0])"
    )


def _derivative(primals: Any, tangents: Any, **params: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    kind, op = params["kind"], params["op"]
    reduces = kind in (Kind.allreduce, Kind.reducescatter)
    if reduces and op not in (Reduction.Sum, Reduction.Average):
        raise UsageError(
            f"a reduction by {op.name} has no gradient here; reduce outside of what is "
            "differentiated (jax.lax.stop_gradient), or by Sum or Average"
        )
    result: Any = collective_p.bind(x, **params)
    if isinstance(tangent, ad.Zero):
        shape: Any = jax.core.ShapedArray(result.shape, result.dtype)
        return result, ad.Zero(shape.to_tangent_aval())
    return result, collective_p.bind(tangent, **params)


def _transposed(cotangent: Any, x: Any, *, kind: Kind, ranks: Ranks, op: Any, **its: Any) -> Any:
    """Of the map from all ranks' arrays to all ranks' results: every rank has a loss of its own."""
    size, rank, root = its["size"], its["rank"], its["root"]
    cotangent = ad.instantiate_zeros(cotangent)
    if kind in (Kind.allreduce, Kind.alltoall):
        return (collect(cotangent, kind, ranks, op, root),)
    if kind == Kind.allgather:
        return (collect(cotangent, Kind.reducescatter, ranks),)
    if kind == Kind.broadcast:
        total = collect(cotangent, Kind.allreduce, ranks)
        return (total if rank == root else jnp.zeros_like(total),)
    rows = x.aval.shape[0]
    begin = rank * (rows // size) + min(rank, rows % size)
    padded = jnp.zeros(x.aval.shape, cotangent.dtype)
    padded = padded.at[begin : begin + cotangent.shape[0]].set(cotangent)
    return (collect(padded, Kind.allreduce, ranks, op),)


def _batched(arguments: Any, axes: Any, **params: Any) -> Any:
    (x,), (axis,) = arguments, axes
    if params["kind"] not in (Kind.allreduce, Kind.broadcast):  # which go by rows
        x, axis = jnp.moveaxis(x, axis, -1), x.ndim - 1
    return collective_p.bind(x, **params), axis


def reduce_all(arrays: list[Any], ranks: Ranks, op: Reduction) -> list[Any]:
    """Several arrays of one dtype by one call, in the memory that they have, if XLA lets it go."""
    if len(arrays) < 2:
        return [collect(array, Kind.allreduce, ranks, op) for array in arrays]
    its = ranks.communicator
    place = {"ranks": ranks, "rank": its.rank, "size": its.size}
    return reduce_all_p.bind(*arrays, op=op, **place)  # type: ignore[no-any-return]


def _lower_all(ctx: Any, *arrays: Any, **params: Any) -> Any:
    aliases = {index: index for index in range(len(arrays))}
    return _lower(ctx, *arrays, aliases=aliases, kind=Kind.allreduce, root=-1, **params)


def _derivative_of_all(primals: Any, tangents: Any, **params: Any) -> Any:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return tuple(reduce_all_p.bind(*each, **params) for each in (primals, tangents))


def _transposed_all(cotangents: Any, *_: Any, **params: Any) -> Any:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return reduce_all_p.bind(*given, **params)


@cache
def _compiled(primitive: Any, params: frozenset[tuple[str, Any]]) -> Callable[..., Any]:
    """For calls outside of compiled functions, as those under an eager ``grad``."""
    return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)))


def _evaluate(primitive: Any) -> Callable[..., Any]:
    return lambda *arrays, **params: _compiled(primitive, frozenset(params.items()))(*arrays)


collective_p = Primitive("ringdl_collective")
collective_p.def_effectful_abstract_eval(_result)
collective_p.def_impl(_evaluate(collective_p))
mlir.register_lowering(collective_p, _refuse_platform)
mlir.register_lowering(collective_p, _lower, platform="cpu")
ad.primitive_jvps[collective_p] = _derivative
ad.primitive_transposes[collective_p] = _transposed
batching.primitive_batchers[collective_p] = _batched
jax.ffi.register_ffi_target(_TARGET, _engine.xla_handler(), platform="cpu")

reduce_all_p = Primitive("ringdl_reduce_all")
reduce_all_p.multiple_results = True
reduce_all_p.def_effectful_abstract_eval(
    lambda *arrays, **_: ([jax.core.ShapedArray(x.shape, x.dtype) for x in arrays], {_order})
)
reduce_all_p.def_impl(_evaluate(reduce_all_p))
mlir.register_lowering(reduce_all_p, _refuse_platform)
mlir.register_lowering(reduce_all_p, _lower_all, platform="cpu")
ad.primitive_jvps[reduce_all_p] = _derivative_of_all
ad.primitive_transposes[reduce_all_p] = _transposed_all
batching.primitive_batchers[reduce_all_p] = lambda xs, axes, **params: (
    reduce_all_p.bind(*xs, **params),
    axes,
)
