"""Several small batches per step, in mixed precision, on any number of ranks.

    python examples/torch_accumulation.py                         # alone; no MPI needed
    ringdl run -n 2 examples/torch_accumulation.py

An ordinary single-machine script, and these lines that make it distributed:

    + import ringdl.data
    + import ringdl.torch as hvd
    + hvd.init()
    + sampler = ringdl.data.ShardedSampler(data, remainder="drop")
    - loader = DataLoader(data, arguments.batch, shuffle=True, drop_last=True)
    + loader = DataLoader(data, arguments.batch // hvd.size(), sampler=sampler, drop_last=True)
    + hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    + optimizer = hvd.DistributedOptimizer(
    +     optimizer, model.named_parameters(), backward_passes_per_step=arguments.passes)
    + sampler.set_epoch(epoch)

Gradients are averaged once per step, in the last of its backward passes; they are averages when
GradScaler checks them, so all ranks skip the same steps.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16, help="images per pass over all ranks")
    parser.add_argument("--passes", type=int, default=3, help="passes per step")
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    torch.manual_seed(1)
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16).float(), torch.tensor(labels)
    data = TensorDataset(images[300:], labels[300:])
    sampler = ringdl.data.ShardedSampler(data, remainder="drop")
    loader = DataLoader(data, arguments.batch // hvd.size(), sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=arguments.passes
    )
    dtype = getattr(torch, arguments.dtype)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    number = 0
    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for own_images, own_labels in loader:
            with torch.autocast("cpu", dtype=dtype):
                loss = functional.cross_entropy(model(own_images), own_labels)
            scaler.scale(loss / arguments.passes).backward()
            number += 1
            if number % arguments.passes == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    with torch.no_grad():
        accuracy = float((model(images[:300]).argmax(1) == labels[:300]).float().mean())
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.3f} after {number // arguments.passes} steps")
        if arguments.json:
            figures = {"accuracy": accuracy, "ranks": hvd.size()}
            arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
