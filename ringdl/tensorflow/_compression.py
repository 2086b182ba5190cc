"""What float32 travels as between hosts, under the names of MPI training scripts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor(str):
    """A dtype's name, for `ringdl`, which also narrows and widens tensors by hand."""

    __slots__ = ()

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The tensor narrowed, if it is wider, and what it was."""
        is_narrowed = self != "none" and tensor.dtype in (tf.float32, tf.float64)
        return tf.cast(tensor, str(self)) if is_narrowed else tensor, tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """What `compress` narrowed, as wide as it was."""
        return tf.cast(tensor, ctx)


class Compression:
    """What ``compression`` may be."""

    none = Compressor("none")
    fp16 = Compressor("float16")
    bf16 = Compressor("bfloat16")
