"""A convolutional network with batch normalization, momentum and weight decay."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, classes

hvd.init()
torch.manual_seed(1)
model = nn.Sequential(
    nn.Unflatten(1, (1, 6, 6)),
    nn.Conv2d(1, 5, 3),
    hvd.SyncBatchNorm(5),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(80, 4),
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
loss_of = nn.CrossEntropyLoss()
for _ in range(2):
    for points, labels in batches(*classes(96, 36, 4)):
        optimizer.zero_grad()
        loss = loss_of(model(points), labels)
        loss.backward()
        optimizer.step()
