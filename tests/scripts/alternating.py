"""Fine-tuning: a frozen body, and two heads of which each step uses one."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()
torch.manual_seed(9)
body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])
model = nn.ModuleDict({"body": body, "heads": heads})
for parameter in body[0].parameters():
    parameter.requires_grad_(False)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for number, (x, y) in enumerate(batches(*tensors((144, 6), (144, 2), seed=9))):
    optimizer.zero_grad()
    output = heads[number % 3 == 2](body(x))
    nn.functional.mse_loss(output, y).backward()
    optimizer.step()
