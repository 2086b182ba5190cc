"""A quasi-Newton method with a line search: step() gets a closure."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, classes

hvd.init()
torch.manual_seed(4)
model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for points, labels in batches(*classes(72, 5, 3)):

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)  # noqa: B023
        loss.backward()
        return loss

    optimizer.step(closure)
