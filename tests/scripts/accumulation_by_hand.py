"""Gradients of several passes in one step, as single-machine scripts do it."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()
PASSES = 3
torch.manual_seed(6)
model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number, (x, y) in enumerate(batches(*tensors((216, 6), (216, 2), seed=6))):
    loss = nn.functional.mse_loss(model(x), y) / PASSES
    loss.backward()
    if (number + 1) % PASSES == 0:
        optimizer.step()
        optimizer.zero_grad()
