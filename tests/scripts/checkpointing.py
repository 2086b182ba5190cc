"""Activations are computed again in the backward pass; and the run is saved and goes on."""

import io

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()


def make():
    torch.manual_seed(11)
    made = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 2)])
    own = torch.optim.AdamW(made.parameters(), lr=0.02)
    return made, hvd.DistributedOptimizer(own, named_parameters=made.named_parameters())


def train(data):
    for x, y in data:
        optimizer.zero_grad()
        first = checkpoint(model[0], x, use_reentrant=False).tanh()
        second = checkpoint(model[1], first, use_reentrant=True).tanh()
        nn.functional.mse_loss(model[2](second), y).backward()
        optimizer.step()


data = [*batches(*tensors((192, 6), (192, 2), seed=11))]
model, optimizer = make()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
train(data[:4])

file = io.BytesIO()
if hvd.rank() == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
saved = hvd.broadcast_object(file.getvalue(), root_rank=0)
del optimizer

model, optimizer = make()
state = torch.load(io.BytesIO(saved))
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
train(data[4:])
