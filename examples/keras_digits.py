"""A convolutional network in Keras learns handwritten digits, with model.fit.

    KERAS_BACKEND=torch python examples/keras_digits.py       # alone; no MPI needed
    KERAS_BACKEND=jax ringdl run -n 2 examples/keras_digits.py

What makes the script for one machine distributed: ``hvd.init``, ``hvd.DistributedOptimizer``, two
callbacks, and each rank's part of the data (``[rank::size]``). It is the same for all backends.
Needs scikit-learn for the data alone (1,797 images of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringdl
import ringdl.keras as hvd


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    is_test = np.arange(len(labels)) % 5 == 4

    model = network()
    optimizer = keras.optimizers.SGD(arguments.rate, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(hvd.DistributedOptimizer(optimizer), loss, metrics=["accuracy"])

    whole = np.flatnonzero(~is_test)
    whole = whole[: len(whole) // size * size]  # as many images on each rank
    mine = whole[rank::size]
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    history = model.fit(
        images[mine],
        labels[mine],
        batch_size=arguments.batch // size,
        epochs=arguments.epochs,
        callbacks=callbacks,
        verbose=0,
    ).history
    if rank == 0:
        for epoch, mean in enumerate(history["loss"], start=1):
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)

    guesses = model.predict(images[is_test], verbose=0).argmax(axis=1)
    accuracy = float((guesses == labels[is_test]).mean())
    bits = b"".join(weight.tobytes() for weight in model.get_weights())
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
