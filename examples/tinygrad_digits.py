"""A network in tinygrad, a framework that ringdl has never met, learns handwritten digits.

    python examples/tinygrad_digits.py                         # alone; no MPI needed
    ringdl run -n 2 examples/tinygrad_digits.py

`TinygradAdapter` is all that ringdl has to know of tinygrad. What makes the script for one machine
distributed: ``ringdl.init``, ``DistributedOptimizer``, rank 0's parameters for all, and each rank's
part of a batch (``[rank::size]``).
Needs tinygrad and clang, which it compiles with; and scikit-learn, for the data alone (1,797 images
of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from tinygrad import Context, Tensor, nn

import ringdl


class TinygradAdapter(ringdl.Adapter):
    """Tensors keep their gradients in ``grad`` until ``step()``."""

    def parameters(self, optimizer):
        return {f"parameter {index}": tensor for index, tensor in enumerate(optimizer.params)}

    def value(self, parameter):
        return parameter.numpy()

    def gradient(self, parameter):
        return None if parameter.grad is None else parameter.grad.numpy()

    def set_gradient(self, parameter, average):
        parameter.grad = Tensor(average, device=parameter.device)

    def set_value(self, parameter, array):
        parameter.assign(Tensor(array, device=parameter.device)).realize()


ringdl.register_adapter("tinygrad.nn.optim", TinygradAdapter())


class Network:
    def __init__(self) -> None:
        self.hidden, self.last = nn.Linear(64, 128), nn.Linear(128, 10)

    def __call__(self, images: Tensor) -> Tensor:
        return self.last(self.hidden(images).relu())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=96, help="images per step over all ranks")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    is_test = np.arange(len(labels)) % 5 == 4

    network = Network()
    parameters = nn.state.get_parameters(network)
    for parameter in parameters:
        parameter.assign(Tensor(ringdl.broadcast(parameter.numpy()))).realize()
    optimizer = nn.optim.SGD(parameters, lr=arguments.rate, momentum=0.9)
    optimizer = ringdl.DistributedOptimizer(optimizer)

    random = np.random.default_rng(1)  # one stream on all ranks: the same batches
    train_images, train_labels = images[~is_test], labels[~is_test]
    for epoch in range(1, arguments.epochs + 1):
        order = random.permutation(len(train_labels))
        full_batches = len(order) // arguments.batch
        losses = []
        for batch in order[: full_batches * arguments.batch].reshape(full_batches, -1):
            mine = batch[rank::size]  # its size should be a multiple of the number of ranks
            with Context(TRAINING=1):
                optimizer.zero_grad()
                guesses = network(Tensor(train_images[mine]))
                loss = guesses.sparse_categorical_crossentropy(Tensor(train_labels[mine]))
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        mean = ringdl.average_metrics({"loss": float(np.mean(losses))})["loss"]
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)

    guesses = network(Tensor(images[is_test])).numpy().argmax(axis=1)
    accuracy = float((guesses == labels[is_test]).mean())
    bits = b"".join(parameter.numpy().tobytes() for parameter in parameters)
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
