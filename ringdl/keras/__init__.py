"""Keras 3 on ringdl: wrap the optimizer, and leave ``model.fit`` as it is.

    import ringdl.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss=...)
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

For the backends torch, jax and tensorflow. Names and signatures are those that MPI training scripts
use already (``root_rank``, not ``root``).
"""

from ringdl import (
    Average,
    Error,
    MismatchError,
    RankFailedError,
    StallError,
    Sum,
    UsageError,
    average_metrics,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ringdl._training.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringdl._training.compression import Compression
from ringdl._training.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ringdl.keras import callbacks
from ringdl.keras._models import load_model
from ringdl.keras._optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringdl.keras._state import broadcast_variables
from ringdl.keras._values import allgather, allreduce, broadcast, reducescatter

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Error",
    "MismatchError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "RankFailedError",
    "StallError",
    "Sum",
    "UsageError",
    "add_process_set",
    "allgather",
    "allreduce",
    "average_metrics",
    "broadcast",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
