"""Collectives of numbers and arrays outside of models: metrics, counts."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import ringdl
from ringdl._training.compression import AnyCompression, Compression, wire_of


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ringdl.Reduction | None = None,
    compression: AnyCompression = Compression.none,
) -> Any:
    """Reduce a value over all ranks. Collective.

    Args:
        value: a number, an array, or a tensor of Keras' backend; the same shape on all ranks.
        name: what ranks match it by; by default the order of calls.
        average: False: the sum, where `op` is not given; else the average.
        prescale_factor: of the value, before.
        postscale_factor: of the result.
        op: Average, Sum, Min, Max or Product.
        compression: ``Compression.fp16`` or ``.bf16``: what a float32 value travels as.

    Returns:
        An array of NumPy, or one of its numbers.
    """
    reduction = op or (ringdl.Sum if average is False else ringdl.Average)
    array = keras.ops.convert_to_numpy(value)
    scaled = array if prescale_factor == 1.0 else array * prescale_factor
    wire = wire_of(compression)
    if wire is not None and scaled.dtype == np.float32:
        import ml_dtypes  # so that NumPy knows bfloat16

        narrow = scaled.astype(ml_dtypes.bfloat16 if wire == "bfloat16" else wire)
        result = ringdl.allreduce(narrow, reduction, name=name).astype(np.float32)
    else:
        result = ringdl.allreduce(scaled, reduction, name=name)
    return result if postscale_factor == 1.0 else result * postscale_factor


def allgather(value: Any, name: str | None = None) -> Any:
    """Collect the rows of all ranks' arrays, in rank order. See `allreduce`."""
    return ringdl.allgather(keras.ops.convert_to_numpy(value), name=name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of rank `root_rank`, on all ranks. See `allreduce`."""
    return ringdl.broadcast(keras.ops.convert_to_numpy(value), root_rank, name=name)


def reducescatter(
    value: Any, name: str | None = None, op: ringdl.Reduction = ringdl.Average
) -> Any:
    """Reduce, and give each rank its part of the rows. See `allreduce`."""
    return ringdl.reducescatter(keras.ops.convert_to_numpy(value), op, name=name)
