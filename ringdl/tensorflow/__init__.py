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
from ringdl._training import names
from ringdl._training.names import *  # noqa: F403
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
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
__all__ += names.__all__

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
