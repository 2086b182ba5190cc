"""A policy of one's own: ranks train by themselves, and every few steps take the median of all.

    python examples/own_policy.py                            # alone; no MPI needed
    ringdl run -n 3 examples/own_policy.py
    ringdl run -n 3 examples/own_policy.py --spoiled 1

Element by element, as Yin and others (2018) do: unlike a mean, a median does not care what a
minority of ranks sends. With ``--spoiled 1`` rank 1 learns from wrong labels, and the others from
right ones; what they reach together hardly changes.
Needs torch, and scikit-learn for the data alone (1,797 images of 8 x 8 that come with it).
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

import ringdl
import ringdl.torch as hvd
from ringdl import policies


class MedianOfParameters(policies.Policy):
    """All ranks get the median of their parameters, element by element.

    Args:
        every: so many steps are made between two medians.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def after_step(self, model: policies.Model) -> None:
        if model.step % self.every == 0:
            self.synchronize(model)

    def synchronize(self, model: policies.Model) -> None:
        for name, array in model.parameters.items():
            each = model.communicator.allgather(array[None].copy(), name=f"{model.key}.{name}")
            array[...] = np.median(each, axis=0)

    def __repr__(self) -> str:  # ranks have to agree on it
        return f"MedianOfParameters(every={self.every})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--every", type=int, default=8, help="steps between two medians")
    parser.add_argument("--spoiled", type=int, default=-1, help="a rank that gets wrong labels")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    data, target = load_digits(return_X_y=True)
    images, labels = torch.tensor(data / 16, dtype=torch.float32), torch.tensor(target)
    is_test = torch.arange(len(labels)) % 5 == 4
    test_images, test_labels = images[is_test], labels[is_test]
    images, labels = images[~is_test][rank::size], labels[~is_test][rank::size]  # this rank's
    if rank == arguments.spoiled:
        labels = 9 - labels

    torch.manual_seed(1)  # replicas start equal
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), policy=MedianOfParameters(arguments.every)
    )
    for _ in range(arguments.epochs):
        for batch in torch.randperm(len(labels))[: len(target) // size // 2].split(16):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    policies.synchronize(optimizer)

    accuracy = float((model(test_images).argmax(1) == test_labels).float().mean())
    bits = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
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
