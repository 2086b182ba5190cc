"""Classification: a convolutional network learns handwritten digits, on any number of ranks.

    python examples/torch_digits.py                         # alone; no MPI needed
    ringdl run -n 2 examples/torch_digits.py

An ordinary single-machine script, and these lines that make it distributed:

    + import ringdl.data
    + import ringdl.torch as hvd
    + hvd.init()
    - loader = DataLoader(data, arguments.batch, shuffle=True)
    + sampler = ringdl.data.ShardedSampler(data, remainder="drop")
    + loader = DataLoader(data, arguments.batch // hvd.size(), sampler=sampler)
    - nn.BatchNorm2d(16),
    + hvd.SyncBatchNorm(16),
    + hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    + optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    + scheduler = hvd.scale_with_warm_up(optimizer, ...)    # larger batches, larger steps
    + sampler.set_epoch(epoch)
    + metrics = hvd.average_metrics(metrics, weight=len(images))
    - torch.save(state, path)
    + hvd.save(state, path)

Needs torch and scikit-learn (1,797 images of 8 x 8 that come with it).
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import ringdl.data
import ringdl.torch as hvd


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Training images and labels, and every fifth for the test."""
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(
        images[is_test], labels[is_test]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate of one rank")
    parser.add_argument("--checkpoint", type=Path, help="save the model in this file")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    data, test_data = load_data()
    sampler = ringdl.data.ShardedSampler(data, remainder="drop")
    loader = DataLoader(data, arguments.batch // hvd.size(), sampler=sampler)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        hvd.SyncBatchNorm(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = hvd.scale_with_warm_up(optimizer, steps=20, factor=2.0)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()

        model.eval()
        images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test_data.tensors)
        with torch.no_grad():
            guesses = model(images)
        metrics = {
            "loss": functional.cross_entropy(guesses, labels),
            "accuracy": (guesses.argmax(1) == labels).float().mean(),
        }
        metrics = hvd.average_metrics(metrics, weight=len(images))
        if hvd.rank() == 0:
            print("epoch {}: loss {loss:.4f}, accuracy {accuracy:.3f}".format(epoch, **metrics))
    if arguments.checkpoint:
        hvd.save(model.state_dict(), arguments.checkpoint)
    if arguments.json and hvd.rank() == 0:
        arguments.json.write_text(json.dumps({**metrics, "ranks": hvd.size()}) + "\n")


if __name__ == "__main__":
    main()
