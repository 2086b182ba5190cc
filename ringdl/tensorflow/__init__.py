"""TensorFlow on ringdl: ``import ringdl.tensorflow as hvd``, then wrap the tape.

    import tensorflow as tf
    import ringdl.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)

Names and signatures are those that MPI training scripts for TensorFlow use already (``root_rank``,
not ``root``). In a ``tf.function`` collectives are carried out in the order of the program, the
same on all ranks.
"""

from typing import TYPE_CHECKING, Any

import ringdl
from ringdl import (
    Adasum,
    Average,
    Error,
    Max,
    Min,
    MismatchError,
    Product,
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
from ringdl import Error as HorovodInternalError
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
from ringdl._training.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ringdl.tensorflow._compression import Compression
from ringdl.tensorflow._exchanges import allgather, alltoall, broadcast, grouped_allgather, join
from ringdl.tensorflow._facts import (
    check_num_rank_power_of_2,
    gpu_available,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from ringdl.tensorflow._reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from ringdl.tensorflow._state import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ringdl.tensorflow._tape import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)

if TYPE_CHECKING:
    from ringdl.tensorflow._batch_norm import SyncBatchNormalization

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Error",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "StallError",
    "Sum",
    "SyncBatchNormalization",
    "UsageError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "average_metrics",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_ABSENT = {
    "BroadcastGlobalVariablesHook": "call broadcast_variables(model.variables, root_rank=0)",
    "elastic": "start the job again, from its last checkpoint",
}

ringdl.Error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph makes no other


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":  # which loads Keras
        from ringdl.tensorflow._batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    hint = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise AttributeError(f"ringdl.tensorflow has no {name}{hint}")
