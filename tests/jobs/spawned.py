"""Ranks that torch.multiprocessing has spawned train by DistributedDataParallel over ringdl."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import ringdl
import ringdl.torch.backend

RANKS = 2


def train(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("ringdl", rank=rank, world_size=RANKS)
    assert (ringdl.rank(), ringdl.size()) == (rank, RANKS)
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    model(torch.full((1, 3), float(rank + 1))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.5] * 3]
    dist.destroy_process_group()
    print(f"rank {rank} has trained", flush=True)


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        free_port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (free_port,), nprocs=RANKS)
