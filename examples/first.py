"""A training script for any number of ranks, as README opens with it."""

import hashlib

import torch

import ringdl.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())  # each rank draws its own part of the data
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # all begin with rank 0's

for step in range(301):
    x = torch.randn(64 // hvd.size(), 8)
    loss = torch.nn.functional.mse_loss(model(x), x.norm(dim=1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()  # gradients are averages over all ranks when it returns
    optimizer.step()
    if step % 100 == 0:
        mean = hvd.allreduce(loss.detach()).item()
        if hvd.rank() == 0:
            print(f"step {step}: loss {mean:.3f}")

parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()[:16]
print(f"rank {hvd.rank()} of {hvd.size()} holds {digest}")
