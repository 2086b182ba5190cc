"""Keras 3 on ringdl: wrap the optimizer, and leave ``model.fit`` as it is.

    import ringdl.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

For the backends torch, jax and tensorflow. Names and signatures are those that MPI training scripts
use already (``root_rank``, not ``root``).
"""

from ringdl._training import names
from ringdl._training.compression import Compression
from ringdl._training.names import *  # noqa: F403
from ringdl.keras import callbacks
from ringdl.keras._models import load_model
from ringdl.keras._optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringdl.keras._state import broadcast_variables
from ringdl.keras._values import allgather, allreduce, broadcast, reducescatter

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "load_model",
    "reducescatter",
]
__all__ += names.__all__
