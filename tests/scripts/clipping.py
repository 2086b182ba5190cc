"""A recurrent network whose gradients are clipped, first by norm, then by value."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()
torch.manual_seed(7)
model = nn.GRU(4, 8, num_layers=2, batch_first=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number, (x, y) in enumerate(batches(*tensors((120, 7, 4), (120, 7, 8), seed=7))):
    optimizer.zero_grad()
    output, _ = model(x)
    (10 * (output - y).square().mean()).backward()
    if number % 2 == 0:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
