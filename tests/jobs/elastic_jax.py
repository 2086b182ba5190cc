"""Trains in compiled functions on ranks of which one is killed: the others compile them again.

elastic_jax.py RANK STEP
"""

import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax

import ringdl.jax
from ringdl import elastic


def main(dies: int, at: int) -> None:
    ringdl.init()
    number = ringdl.rank()
    optimizer = optax.chain(ringdl.jax.average_gradients(), optax.sgd(0.1, momentum=0.9))
    parameters = {"w": jnp.zeros(50)}
    state = elastic.JaxState(parameters=parameters, momenta=optimizer.init(parameters), step=0)

    @jax.jit
    def step(parameters: Any, momenta: Any, target: Any) -> Any:
        gradients = jax.grad(lambda its: ((its["w"] - target) ** 2).sum())(parameters)
        updates, momenta = optimizer.update(gradients, momenta, parameters)
        return optax.apply_updates(parameters, updates), momenta

    def train(state: elastic.State) -> None:
        while state.step < 200:
            if (state.step, number) == (at, dies):
                os.kill(os.getpid(), signal.SIGKILL)
            target = jnp.arange(50.0) + ringdl.rank()
            state.parameters, state.momenta = step(state.parameters, state.momenta, target)
            state.step += 1
            state.commit()

    elastic.run(train, state)
    error = float(abs(state.parameters["w"] - jnp.arange(50.0) - (ringdl.size() - 1) / 2).max())
    sys.stdout.write(f"rank {number} of {ringdl.size()} has ended, with an error of {error}\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
