"""Learning rates that change: warm-up, cosine, and by what an averaged metric says."""

import torch
from torch import nn
from torch.optim import lr_scheduler

import ringdl.torch as hvd
from tests.scripts._data import batches, classes

hvd.init()
torch.manual_seed(10)
model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(
    [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}], lr=0.2
)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
cosine = lr_scheduler.CosineAnnealingLR(optimizer, 5)
in_turn = lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])
on_plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
for _ in range(4):
    total = torch.zeros(())
    for points, labels in batches(*classes(72, 5, 3)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        in_turn.step()
        total += loss.detach()
    on_plateau.step(hvd.allreduce(total))
