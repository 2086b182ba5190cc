"""torch.distributed over Gloo and ringdl in one process, through one store: before and after."""

import sys

import torch
import torch.distributed as dist

import ringdl

if sys.argv[1] == "before":
    dist.init_process_group("gloo")
ringdl.init()
assert ringdl.size() == 3
if sys.argv[1] == "after":
    dist.init_process_group("gloo")
for _ in range(3):
    x = torch.full((1000,), float(ringdl.rank()))
    dist.all_reduce(x)
    assert (ringdl.allreduce(torch.full((1000,), float(ringdl.rank())), ringdl.Sum) == x).all()
dist.barrier()
dist.destroy_process_group()
ringdl.shutdown()
ringdl.init()
ringdl.barrier()
print("both worked", flush=True)
