"""bfloat16 where autocast says so, and float16 losses scaled by GradScaler."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, classes

hvd.init()
torch.set_default_dtype(torch.float32)
losses = []
for dtype in (torch.bfloat16, torch.float16):
    torch.manual_seed(13)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype == torch.float16)
    for _ in range(4):
        total = torch.zeros(())
        for points, labels in batches(*classes(192, 12, 4)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = nn.functional.cross_entropy(model(points.float()), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
    losses.append(float(hvd.allreduce(total)))
scale = scaler.get_scale()
