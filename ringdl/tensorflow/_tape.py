"""A tape whose gradients are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import tensorflow as tf

import ringdl
from ringdl._reductions import Op
from ringdl._training.compression import AnyCompression
from ringdl._training.process_sets import AnySet, ProcessSet, global_process_set
from ringdl.tensorflow._compression import Compression
from ringdl.tensorflow._exchanges import ranks_as
from ringdl.tensorflow._gradients import Options, average
from ringdl.tensorflow._graph import as_it_is


@as_it_is
def DistributedGradientTape(  # noqa: N802 (the name that training scripts use)
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = ringdl.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: AnySet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape with the records of another one, whose ``gradient()`` averages over all ranks.

    All gradients of a call are averaged at once. Each is copied once, into memory that the ranks
    share, and is reduced there; the tensors that ``gradient()`` returns are parts of that memory.

    A gradient that is None on all ranks stays None. One that is None on some counts as zeros there;
    in a ``tf.function`` that is an error, on every rank. ``tf.IndexedSlices`` are gathered: the
    rows of all ranks, divided by their number.

    Args:
        gradtape: a ``tf.GradientTape``.
        device_dense: accepted, but without effect, like `device_sparse`, `num_groups`, `groups`:
            all gradients travel together.
        device_sparse: see `device_dense`.
        compression: ``Compression.fp16`` or ``.bf16``: what float32 gradients travel as between
            hosts.
        sparse_as_dense: make tensors of ``tf.IndexedSlices`` first.
        op: Average or Sum; or Adasum, gradient by gradient.
        gradient_predivide_factor: gradients are divided by it before they are summed, and the
            averages multiplied by it. For Average.
        num_groups: see `device_dense`.
        groups: see `device_dense`.
        process_set: whose ranks average. On a rank that is not in it nothing is averaged.
        scale_local_gradients: divide the gradients of local sources (``register_local_source``) by
            the number of ranks, as averages are.

    Raises:
        UsageError: another argument is wrong; or, from ``gradient()``, a gradient is no
            floating-point one: other ranks get a MismatchError.
        MismatchError: from ``gradient()``, on every rank, if gradients differ in number, order,
            shapes or dtypes.
    """
    del device_dense, device_sparse
    if not isinstance(gradtape, tf.GradientTape):
        raise ringdl.UsageError(
            f"DistributedGradientTape wraps a tf.GradientTape, not a {type(gradtape).__name__}"
        )
    if op not in (ringdl.Average, ringdl.Sum, ringdl.Adasum):
        raise ringdl.UsageError(f"gradients are reduced with Average, Sum or Adasum, not {op}")
    if gradient_predivide_factor != 1.0 and (
        op != ringdl.Average or not gradient_predivide_factor > 0
    ):
        raise ringdl.UsageError(
            f"gradient_predivide_factor={gradient_predivide_factor} with {op}: it is a positive "
            "number, and only averages are divided"
        )
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise ringdl.UsageError("num_groups and groups are numbers of groups: at least 0")
    options = Options(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        process_set,
        scale_local_gradients,
    )
    kind: Any = type(gradtape)
    tape = object.__new__(_averaging(kind))
    tape.__dict__ = gradtape.__dict__
    tape._options, tape._local = options, {}
    return tape


@as_it_is
def PartialDistributedGradientTape(  # noqa: N802
    gradtape: tf.GradientTape, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """`DistributedGradientTape`, where the weights of ``local_layers`` are local sources."""
    tape = DistributedGradientTape(gradtape, *args, **options)
    layers = local_layers or []
    for layer in layers if isinstance(layers, Iterable) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise ringdl.UsageError(f"local_layers holds {layer!r}, which is no layer of Keras")
        for variable in layer.trainable_weights:
            tape.register_local_source(variable)
    return tape


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: AnyCompression = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = ringdl.Average,
    **options: Any,
) -> Any:
    """Make a Keras optimizer average its gradients: see `ringdl.keras.DistributedOptimizer`.

    Args:
        optimizer: one that `ringdl.keras.DistributedOptimizer` takes.
        name: accepted, but without effect, like `use_locking`, `device_dense`, `device_sparse`.
        use_locking: see `name`.
        device_dense: see `name`.
        device_sparse: see `name`.
        compression: see `ringdl.keras.DistributedOptimizer`, as for all others.
        sparse_as_dense: see `compression`.
        backward_passes_per_step: see `compression`.
        op: see `compression`.
        options: more of those of `ringdl.keras.DistributedOptimizer`.

    Raises:
        UsageError: it is an optimizer of TensorFlow 1.
    """
    del use_locking, device_dense, device_sparse
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ringdl.UsageError(
            f"{type(optimizer).__name__} is an optimizer of TensorFlow 1; take one of tf.keras, or "
            "average its gradients by grouped_allreduce() between compute_gradients() and "
            "apply_gradients()"
        )
    from ringdl import keras

    return keras.DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        **options,
    )


class _Averaging:
    """What `DistributedGradientTape` adds to a tape: the state of the other one is its own."""

    __slots__ = ("_local", "_options")
    _options: Options
    _local: dict[int, Any]

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable as this rank has it, but for its scale."""
        self._local[id(source)] = source

    @as_it_is
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The averages, in the structure of the sources. Collective.

        The arguments are those of ``tf.GradientTape.gradient``; ``use_generic_names`` has no
        effect.
        """
        if isinstance(use_generic_names, tf.UnconnectedGradients):  # the fourth of the tape's own
            unconnected_gradients = use_generic_names
        own = super().gradient(  # type: ignore[misc]
            target, sources, output_gradients, unconnected_gradients
        )
        listed, gradients = tf.nest.flatten(sources), tf.nest.flatten(own)
        options = self._options
        process_set = options.process_set
        if isinstance(process_set, ProcessSet) and process_set.included() is False:
            return own
        shared = [i for i, source in enumerate(listed) if id(source) not in self._local]
        averages = average(
            [listed[index] for index in shared], [gradients[index] for index in shared], options
        )
        for index in range(len(listed)):
            if id(listed[index]) in self._local and options.scale_local:
                gradients[index] = _divided(gradients[index], process_set)
        for index, its_average in zip(shared, averages, strict=True):
            gradients[index] = its_average
        return tf.nest.pack_sequence_as(sources, gradients)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: Any = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Pairs of sources and gradients: of local sources, and of the others. Collective."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = [*zip(sources, gradients, strict=True)]
        return (
            [pair for pair in pairs if id(pair[0]) in self._local],
            [pair for pair in pairs if id(pair[0]) not in self._local],
        )


@cache
def _averaging(kind: Any) -> Any:
    if issubclass(kind, _Averaging):
        return kind
    return type(kind.__name__, (_Averaging, kind), {"__slots__": ()})


def _divided(gradient: Any, process_set: AnySet) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _divided(gradient.values, process_set)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else gradient / ranks_as(gradient.dtype, process_set)
