"""A convolutional network in TensorFlow learns handwritten digits, in a loop of its own.

    python examples/tensorflow_digits.py                         # alone; no MPI needed
    ringdl run -n 2 examples/tensorflow_digits.py

What makes the script for one machine distributed: ``hvd.init``, ``DistributedGradientTape`` around
the tape, ``broadcast_variables`` once, and each rank's part of a batch (``[rank::size]``).
Needs scikit-learn for the data alone (1,797 images of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ringdl.tensorflow as hvd


def network() -> tf.keras.Model:
    return tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(64, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8, 1).astype(np.float32)
    is_test = np.arange(len(labels)) % 5 == 4

    tf.keras.utils.set_random_seed(arguments.seed)
    model = network()
    optimizer = tf.keras.optimizers.SGD(arguments.rate, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            every = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(every)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return hvd.allreduce(loss)

    random = np.random.default_rng(arguments.seed)  # one stream on all ranks: the same batches
    train_images, train_labels = images[~is_test], labels[~is_test]
    for epoch in range(1, arguments.epochs + 1):
        order = random.permutation(len(train_labels))
        full_batches = len(order) // arguments.batch
        losses = []
        for batch in order[: full_batches * arguments.batch].reshape(full_batches, -1):
            mine = batch[rank::size]  # its size should be a multiple of the number of ranks
            losses.append(step(tf.constant(train_images[mine]), tf.constant(train_labels[mine])))
        if rank == 0 and (epoch % 5 == 0 or epoch == arguments.epochs):
            print(f"epoch {epoch}: loss {np.mean(losses):.4f}", flush=True)

    guesses = np.argmax(model(images[is_test]), axis=1)
    accuracy = float((guesses == labels[is_test]).mean())
    bits = b"".join(variable.numpy().tobytes() for variable in model.variables)
    digest = hashlib.sha256(bits).digest()[:8]
    are_equal = len(set(hvd.allgather_object(digest))) == 1
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
