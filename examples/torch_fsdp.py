"""FSDP2 over ringdl: each rank keeps a share of the parameters and of the optimizer's state.

    ringdl run -n 2 examples/torch_fsdp.py
    mpirun -n 8 python examples/torch_fsdp.py

An ordinary script for FSDP2, and these lines that make it use ringdl:

    + import ringdl.torch.backend
    - dist.init_process_group("gloo")
    + dist.init_process_group("ringdl")

Needs torch and scikit-learn (1,797 images of 8 x 8 that come with it).
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import ringdl.torch.backend  # noqa: F401 (registers the backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=48, help="images per step over all ranks")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    dist.init_process_group("ringdl")
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float(), torch.tensor(labels)
    data = TensorDataset(images[300:], labels[300:])
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, arguments.batch // dist.get_world_size(), sampler=sampler)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for own_images, own_labels in loader:
            optimizer.zero_grad()
            functional.cross_entropy(model(own_images), own_labels).backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = float((model(images[:300]).argmax(1) == labels[:300]).float().mean())
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.3f}; rank 0 keeps {kept} of {whole} parameters")
        if arguments.json:
            figures = {"accuracy": accuracy, "kept": kept / whole, "ranks": dist.get_world_size()}
            arguments.json.write_text(json.dumps(figures) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
