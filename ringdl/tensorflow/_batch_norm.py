"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ringdl
from ringdl.tensorflow._reductions import allreduce


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):  # type: ignore[misc]
    """``tf.keras.layers.BatchNormalization`` whose statistics are those of all ranks' batches.

    In training each call adds up sums and squares per channel over the ranks, in float64. Batches
    may differ in length, and be empty on some ranks.

    Args:
        fused: only False.
        kwargs: those of ``tf.keras.layers.BatchNormalization``.

    Raises:
        UsageError: it is to be fused.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused or fused is None:
            raise ringdl.UsageError(
                "SyncBatchNormalization computes statistics of its own, so it is not fused; leave "
                "fused out"
            )
        if not hasattr(tf.keras, "ops"):  # tf_keras, where layers may be fused
            kwargs["fused"] = False
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Mean and variance of each channel: what the layer normalizes with in training."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        mask = kwargs.get("mask", args[0] if len(args) == 1 else None)
        if mask is None:
            count = tf.size(inputs) / tf.maximum(tf.size(mean), 1)
        else:
            count = tf.reduce_sum(tf.cast(mask, tf.float64))
        count = tf.broadcast_to(tf.cast(count, tf.float64), tf.shape(mean))
        its_mean, its_variance = (tf.cast(each, tf.float64) for each in (mean, variance))
        own = [
            count,
            tf.math.multiply_no_nan(its_mean, count),  # those of an empty batch are NaN
            tf.math.multiply_no_nan(its_variance + its_mean**2, count),
        ]
        count, total, squares = tf.unstack(allreduce(tf.stack(own), op=ringdl.Sum))
        all_mean = total / count
        all_variance = tf.maximum(squares / count - all_mean**2, 0)
        return tf.cast(all_mean, mean.dtype), tf.cast(all_variance, variance.dtype)
