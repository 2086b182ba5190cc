"""One primitive for all collectives of an array, which XLA carries out by calling the engine."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from ringdl import _engine
from ringdl._engine import DType, Kind, Reduction
from ringdl._errors import UsageError
from ringdl.jax._ranks import ORDER, Ranks, telling

_TARGET = "ringdl_collective"
_token: Any = getattr(jax.ffi, "abstract_token", None) or core.abstract_token  # by jax 0.11, before


def collect(
    x: Any, kind: Kind, ranks: Ranks, op: Reduction = Reduction.Sum, root: Any = None
) -> jax.Array:
    """The collective, in a function that is being traced.

    Raises:
        UsageError: elements, a shape or a root that it does not take; other ranks get a
            MismatchError.
    """
    with telling(ranks, kind, kind.name):
        x = jnp.asarray(x)
        op = reduction_of(op)
        _refuse_wrong(x, kind, ranks.communicator.size)
        root = _root(root, ranks.communicator.size) if kind == Kind.broadcast else -1
    result: jax.Array = collective_p.bind(x, kind=kind, op=op, root=root, **ranks.place())
    return result


def reduction_of(op: Any) -> Reduction:
    """The reduction.

    Raises:
        UsageError: it is none of ringdl's own.
    """
    if not isinstance(op, Reduction):
        raise UsageError(f"ringdl.jax reduces by ringdl's own reductions, not by {op!r}")
    return op


def _root(root: Any, size: int) -> int:
    try:
        number = operator.index(root)
    except TypeError:
        raise UsageError(
            f"root is {root!r}; pass the number of a rank, known when compiling"
        ) from None
    if not 0 <= number < size:
        raise UsageError(f"root {root} is not a rank; ranks are 0 to {size - 1}")
    return number


def _refuse_wrong(x: jax.Array, kind: Kind, size: int) -> None:
    if x.dtype.name not in DType.__members__:
        raise UsageError(
            f"arrays of dtype {x.dtype.name} are not supported; use one of "
            f"{', '.join(DType.__members__)}"
        )
    if x.ndim == 0 and kind not in (Kind.allreduce, Kind.broadcast):
        raise UsageError(f"{kind.name} goes by rows, and an array without axes has none")
    if kind == Kind.alltoall and x.shape[0] % size != 0:
        raise UsageError(
            f"alltoall gives each of {size} ranks as many rows inside of "
            f"jax.jit, and there are {x.shape[0]}; pad them, or call it outside"
        )


def _result(x: Any, *, kind: Kind, rank: int, size: int, **_: Any) -> Any:
    rows = x.shape[0] if x.ndim > 0 else 1
    if kind == Kind.allgather:
        rows *= size
    elif kind == Kind.reducescatter:
        rows = rows // size + (rank < rows % size)
    else:
        return x.update(weak_type=False), {ORDER}
    whole = x.sharding.update(spec=[None] * x.ndim)
    return x.update(shape=(rows, *x.shape[1:]), weak_type=False, sharding=whole), {ORDER}


def lower(
    ctx: Any,
    *operands: Any,
    aliased: int = 0,
    count: int = 0,
    plan: int = 0,
    wire: DType | None = None,
    **params: Any,
) -> Any:
    """XLA's call of the engine, between the token before and the one after it.

    Args:
        ctx: JAX's.
        operands: arrays, of which the first `aliased` ones become the results if XLA can let go
            of them.
        aliased: see above.
        count: how many of them are gradients; 0: it is a collective of one array; -1: a policy is
            called, whose number is in the place of the plan's.
        plan: the number of their plan.
        wire: what those of float32 travel as between hosts.
        params: those of the primitive.
    """
    devices = device_count(ctx)
    avals = [_token, *ctx.avals_in]
    if devices > 1:
        operands = (*operands, stablehlo.partition_id())
        avals.append(jax.core.ShapedArray((), jnp.uint32))
    inner = ctx.replace(avals_in=avals, avals_out=[_token, *ctx.avals_out])
    aliases = {index: index for index in range(1, aliased + 1)}
    call = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True, operand_output_aliases=aliases)
    ranks: Ranks = params["ranks"]
    numbers = {"ranks": ranks.number, "rank": params["rank"], "size": params["size"]}
    numbers |= {"kind": params["kind"].value, "reduction": params["op"].value}
    numbers |= {"root": params["root"], "count": count, "plan": plan, "devices": devices}
    numbers["wire"] = -1 if wire is None else wire.value
    attributes = {name: np.int64(number) for name, number in numbers.items()}
    token, *results = call(inner, ctx.tokens_in.get(ORDER), *operands, **attributes)
    ctx.set_tokens_out(mlir.TokenSet({ORDER: token}))
    ctx.module_context.add_keepalive(ranks)
    return results


def device_count(ctx: Any) -> int:
    """How many devices make the call, each for itself."""
    its = ctx.module_context.axis_context
    manual = getattr(its, "manual_axes", None)
    count: int = its.mesh.size if manual is not None else getattr(its, "num_devices", 1)
    if count > 1 and manual != frozenset(its.mesh.axis_names if manual is not None else ()):
        raise UsageError(
            f"ringdl's collectives are called here in a function that is compiled for {count} "
            "devices at once; call them inside of a jax.shard_map over all axes of the mesh, where "
            "each device calls for itself, or between compiled functions"
        )
    if count > 1:
        _refuse_compilation_cache()
    return count


def _refuse_compilation_cache() -> None:
    """A crash becomes an error.

    jaxlib 0.10 dies when it serializes a program of several devices that has tokens among its
    results: it looks for their layout.
    """
    settings: Any = jax.config
    if settings.jax_compilation_cache_dir and settings.jax_enable_compilation_cache:
        raise UsageError(
            "jaxlib crashes when it puts a program of several devices with ringdl's collectives "
            "into its persistent compilation cache; before anything is compiled, turn that off "
            "(JAX_ENABLE_COMPILATION_CACHE=0), or have one device per rank"
        )


def refuse_platform(ctx: Any, *_: Any, **__: Any) -> Any:
    """In place of `lower`, for what is not a CPU."""
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
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
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


collective_p = Primitive("ringdl_collective")
collective_p.def_effectful_abstract_eval(_result)
dispatch.simple_impl(collective_p)
mlir.register_lowering(collective_p, refuse_platform)
mlir.register_lowering(collective_p, lower, platform="cpu")
ad.primitive_jvps[collective_p] = _derivative
ad.primitive_transposes[collective_p] = _transposed
batching.primitive_batchers[collective_p] = _batched
jax.ffi.register_ffi_target(_TARGET, _engine.xla_handler(), platform="cpu")
