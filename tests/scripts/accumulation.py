"""Gradients of several passes in one step, as the wrapper offers it."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()
PASSES = 3
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 2))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=PASSES
)
for number, (x, y) in enumerate(batches(*tensors((216, 6), (216, 2), seed=5))):
    loss = nn.functional.mse_loss(model(x), y) / PASSES
    loss.backward()
    if (number + 1) % PASSES == 0:
        optimizer.step()
        optimizer.zero_grad()
