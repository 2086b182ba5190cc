"""A network in plain NumPy learns handwritten digits; ringdl.Buckets average its gradients by hand.

    python examples/numpy_digits.py                         # alone; no MPI needed
    ringdl run -n 2 examples/numpy_digits.py

What an adapter such as ringdl.torch does, without a framework: the gradients are the buckets' own
memory (``views``), each layer says ``ready`` as soon as backward has written its gradient, so the
last layers' averages are on their way while the first ones are still computing, and ``wait`` ends
the round.
Needs scikit-learn, for the data alone (1,797 images of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import ringdl
import ringdl.data

WIDTHS = (64, 256, 128, 10)
MOMENTUM = 0.9


class Network:
    """Dense layers with ReLU between, float32; parameters are weight 0, bias 0, weight 1, ..."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.parameters: list[np.ndarray] = []
        for fan_in, fan_out in pairwise(WIDTHS):
            weight = random.normal(0, np.sqrt(2 / fan_in), (fan_in, fan_out))
            self.parameters += [weight.astype(np.float32), np.zeros(fan_out, np.float32)]
        self.layers = len(self.parameters) // 2

    def forward(self, images: np.ndarray) -> list[np.ndarray]:
        """The input of every layer, and at the end the logits."""
        values = [images]
        for layer in range(self.layers):
            weight, bias = self.parameters[2 * layer : 2 * layer + 2]
            out = values[-1] @ weight + bias
            values.append(np.maximum(out, 0) if layer < self.layers - 1 else out)
        return values

    def backward(
        self, values: list[np.ndarray], labels: np.ndarray, buckets: ringdl.Buckets
    ) -> float:
        """Write gradients into the buckets, last layer first; return the mean cross-entropy."""
        gradients = buckets.views()
        odds = np.exp(values[-1] - values[-1].max(axis=1, keepdims=True))
        odds /= odds.sum(axis=1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -float(np.log(odds[rows, labels] + 1e-12).mean())
        odds[rows, labels] -= 1
        flow = odds / np.float32(len(labels))
        for layer in reversed(range(self.layers)):
            weight, bias = 2 * layer, 2 * layer + 1
            np.sum(flow, axis=0, out=gradients[bias])
            buckets.ready(bias)
            np.matmul(values[layer].T, flow, out=gradients[weight])
            buckets.ready(weight)
            if layer:
                flow = (flow @ self.parameters[weight].T) * (values[layer] > 0)
        return loss


def load_data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images and labels, then test images and labels (every fifth)."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    is_test = np.arange(len(labels)) % 5 == 4
    return images[~is_test], labels[~is_test], images[is_test], labels[is_test]


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
    images, labels, test_images, test_labels = load_data()
    network = Network(arguments.seed)  # the same seed: replicas start equal
    buckets = ringdl.Buckets(
        [(f"parameter {i}", p.shape, p.dtype) for i, p in enumerate(network.parameters)],
        bucket_bytes=64 << 10,  # small, so that even this network fills more than one
    )
    velocities = [np.zeros_like(parameter) for parameter in network.parameters]
    # For data that is too large for the memory, pass ringdl.data.Files("train-*.safetensors").
    loader = ringdl.data.Loader(
        {"images": images, "labels": labels}, arguments.batch // size, seed=arguments.seed
    )
    for epoch in range(1, arguments.epochs + 1):
        losses = []
        for batch in loader:
            values = network.forward(batch["images"])
            losses.append(network.backward(values, batch["labels"], buckets))
            buckets.wait()
            for parameter, velocity, gradient in zip(
                network.parameters, velocities, buckets.views(), strict=True
            ):
                velocity *= MOMENTUM
                velocity -= np.float32(arguments.rate) * gradient
                parameter += velocity
        if rank == 0 and (epoch % 5 == 0 or epoch == arguments.epochs):
            waiting = f"waiting for data {loader.waiting_share:.1%}"
            print(f"epoch {epoch}: loss {np.mean(losses):.4f} (rank 0's images), {waiting}")

    guesses = network.forward(test_images)[-1].argmax(axis=1)
    accuracy = float((guesses == test_labels).mean())
    digest = hashlib.sha256(b"".join(p.tobytes() for p in network.parameters)).digest()[:8]
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
