"""Collectives inside of ``jax.jit``, and averaged gradients for optax.

    import ringdl, ringdl.jax, jax, optax

    ringdl.init()
    optimizer = optax.chain(ringdl.jax.average_gradients(), optax.adam(1e-3))

The functions take arrays outside of ``jit``, too, where they are those of `ringdl`. Inside they are
carried out in the order in which the program has them, the same on all ranks.
"""

from ringdl.jax._collectives import allgather, allreduce, alltoall, broadcast, reducescatter
from ringdl.jax._gradients import average_gradients
from ringdl.jax._trees import broadcast_variables

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "average_gradients",
    "broadcast",
    "broadcast_variables",
    "reducescatter",
]
