"""The gradients of a bucket: one call of the engine, in the memory that they have."""

from __future__ import annotations

from typing import Any

from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ringdl._engine import Kind
from ringdl.jax._plan import Plan
from ringdl.jax._primitive import lower, refuse_platform
from ringdl.jax._ranks import ORDER, Ranks


def reduce_bucket(
    gradients: list[Any],
    parameters: list[Any],
    plan: Plan,
    bucket: int,
    ranks: Ranks,
) -> list[Any]:
    """Averages, or sums, of arrays of one dtype: the arrays' own memory, if XLA lets it go.

    Args:
        gradients: at least one.
        parameters: compared between ranks when this is called for the first time in an epoch.
        plan: of all gradients.
        bucket: the number of this one.
        ranks: whose.
    """
    how = {"count": len(gradients), "plan": plan, "bucket": bucket, **ranks.place()}
    return reduce_bucket_p.bind(*gradients, *parameters, **how)  # type: ignore[no-any-return]


def _results(*operands: Any, count: int, **_: Any) -> Any:
    return [each.update(weak_type=False) for each in operands[:count]], {ORDER}


def _lower(ctx: Any, *operands: Any, plan: Plan, bucket: int, count: int, **params: Any) -> Any:
    numbers: Any = {"aliased": count, "count": count, "plan": plan.number}
    how: Any = {"kind": Kind.allreduce, "op": plan.options.op, "root": plan.root(bucket)}
    return lower(ctx, *operands, wire=plan.options.wire, **numbers, **how, **params)


def _derivative(primals: Any, tangents: Any, *, count: int, **params: Any) -> Any:
    results = reduce_bucket_p.bind(*primals, count=count, **params)
    given = [ad.instantiate_zeros(tangent) for tangent in tangents[:count]]
    return results, reduce_bucket_p.bind(*given, count=count, **params)


def _transposed(cotangents: Any, *_: Any, **params: Any) -> Any:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return reduce_bucket_p.bind(*given, **params)


def _batched(operands: Any, axes: Any, *, count: int, **params: Any) -> Any:
    return reduce_bucket_p.bind(*operands, count=count, **params), axes[:count]


reduce_bucket_p = Primitive("ringdl_reduce_bucket")
reduce_bucket_p.multiple_results = True
reduce_bucket_p.def_effectful_abstract_eval(_results)
dispatch.simple_impl(reduce_bucket_p)
mlir.register_lowering(reduce_bucket_p, refuse_platform)
mlir.register_lowering(reduce_bucket_p, _lower, platform="cpu")
ad.primitive_jvps[reduce_bucket_p] = _derivative
ad.primitive_transposes[reduce_bucket_p] = _transposed
batching.primitive_batchers[reduce_bucket_p] = _batched
