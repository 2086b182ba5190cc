"""Collectives inside of ``jax.jit``, and averaged gradients for optax.

    import ringdl, ringdl.jax, jax, optax

    ringdl.init()
    optimizer = optax.chain(ringdl.jax.average_gradients(), optax.adam(1e-3))
    params = ringdl.jax.broadcast_variables(params)

or, without optax, `value_and_grad` in place of JAX's.

The functions take arrays outside of ``jit``, too, where they are those of `ringdl`. Inside they are
carried out in the order in which the program has them, the same on all ranks.
"""

from ringdl.jax._collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from ringdl.jax._gradients import average_gradients, grad, value_and_grad
from ringdl.jax._optimizer import DistributedOptimizer
from ringdl.jax._trees import broadcast_variables

__all__ = [
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "broadcast_variables",
    "grad",
    "reducescatter",
    "value_and_grad",
]
