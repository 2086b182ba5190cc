"""A network in JAX learns handwritten digits, with optax and jit.

    python examples/jax_digits.py                         # alone; no MPI needed
    ringdl run -n 2 examples/jax_digits.py

What makes the script for one machine distributed: ``ringdl.init``, ``average_gradients`` before the
optimizer, ``broadcast_variables`` once, and each rank's part of a batch (``[rank::size]``).
Needs optax, and scikit-learn for the data alone (1,797 images of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import ringdl
import ringdl.jax

WIDTHS = (64, 256, 128, 10)


def initial(seed: int) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
    return [
        (jax.random.normal(key, (fan_in, fan_out)) * (2 / fan_in) ** 0.5, jnp.zeros(fan_out))
        for key, fan_in, fan_out in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
    ]


def logits(parameters: list[tuple[jax.Array, jax.Array]], images: jax.Array) -> jax.Array:
    *hidden, (weight, bias) = parameters
    for its_weight, its_bias in hidden:
        images = jax.nn.relu(images @ its_weight + its_bias)
    return images @ weight + bias


def loss(parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    every = optax.softmax_cross_entropy_with_integer_labels(logits(parameters, images), labels)
    return every.mean()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    is_test = np.arange(len(labels)) % 5 == 4

    optimizer = optax.chain(ringdl.jax.average_gradients(), optax.sgd(arguments.rate, momentum=0.9))
    parameters = ringdl.jax.broadcast_variables(initial(arguments.seed))
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters, state, images, labels):
        its_loss, gradients = jax.value_and_grad(loss)(parameters, images, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, ringdl.jax.allreduce(its_loss)

    random = np.random.default_rng(arguments.seed)  # one stream on all ranks: the same batches
    train_images, train_labels = images[~is_test], labels[~is_test]
    for epoch in range(1, arguments.epochs + 1):
        order = random.permutation(len(train_labels))
        full_batches = len(order) // arguments.batch
        losses = []
        for batch in order[: full_batches * arguments.batch].reshape(full_batches, -1):
            mine = batch[rank::size]  # its size should be a multiple of the number of ranks
            parameters, state, mean = step(
                parameters, state, train_images[mine], train_labels[mine]
            )
            losses.append(mean)
        if rank == 0 and (epoch % 5 == 0 or epoch == arguments.epochs):
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)

    guesses = logits(parameters, images[is_test]).argmax(axis=1)
    accuracy = float((guesses == labels[is_test]).mean())
    bits = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(parameters))
    digest = hashlib.sha256(bits).digest()[:8]
    digests = ringdl.allgather(np.frombuffer(digest, np.uint8)[None].copy())
    are_equal = bool((digests == digests[0]).all())
    if rank == 0:
        print(f"test accuracy {accuracy:.3f}")
        ranks = f"all {size} ranks hold" if size > 1 else "the only rank holds"
        print(f"{ranks} the same bits: {digest.hex()}" if are_equal else "the ranks' bits differ")
        if arguments.json:
            summary = {"accuracy": accuracy, "ranks": size, "digest": digest.hex()}
            arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
