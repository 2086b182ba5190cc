"""Models that were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from ringdl._training.compression import AnyCompression, Compression
from ringdl.keras._optimizer import DistributedOptimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: AnyCompression = Compression.none,
    legacy_opts: bool = False,
    **options: Any,
) -> Any:
    """Load a model, saved with a wrapped optimizer or a bare one, and wrap its optimizer.

    Args:
        filepath: as ``keras.saving.load_model`` takes it; all ranks have to see the file.
        custom_optimizers: classes of optimizers that are not Keras' own.
        custom_objects: other classes and functions of the model, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: accepted, but without effect.
        options: see `DistributedOptimizer`. ``backward_passes_per_step`` is to be given again.
    """
    del legacy_opts
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.saving.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression, **options)
    return model
