"""Trains on all ranks, and prints a digest of the parameters, which are the same everywhere."""

import hashlib
import sys

import numpy as np
import torch
from torch import nn

import ringdl
import ringdl.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 8)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
random = np.random.default_rng(hvd.rank())
for _ in range(20):
    x = torch.from_numpy(random.standard_normal((16, 64), np.float32))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).digest()
digests = ringdl.allgather(np.frombuffer(digest, np.uint8)[None].copy())
assert (digests == digests[0]).all(), "ranks hold other bits"
sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {digest.hex()}\n")
