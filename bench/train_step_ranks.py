"""One job of `train_step.py`: training steps of one kind on all ranks, timed on the slowest."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import ringdl.torch as hvd

OURS = ("ringdl", "recorded", "elastic")
"""The last two are for `protection.py`."""

COMMITS = 5
"""Of an elastic job, each timed."""


def make_model(inputs: int, width: int, layers: int) -> torch.nn.Sequential:
    torch.manual_seed(1)
    sizes = [inputs] + [width] * layers
    parts: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        parts += [torch.nn.Linear(before, after), torch.nn.ReLU()]
    return torch.nn.Sequential(*parts, torch.nn.Linear(width, 10))


def join_gloo(world: MPI.Comm) -> None:
    """torch.distributed among the ranks that MPI has started."""
    with socket.create_server(("", 0)) as free:
        address = (socket.gethostbyname(socket.gethostname()), free.getsockname()[1])
    host, port = world.bcast(address)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{host}:{port}", rank=world.rank, world_size=world.size
    )


def device_of(world: MPI.Comm, name: str) -> torch.device:
    """The ranks of a host take its devices by turns."""
    if name == "cpu":
        return torch.device(name)
    local = world.Split_type(MPI.COMM_TYPE_SHARED).rank
    torch.cuda.set_device(local % torch.cuda.device_count())
    return torch.device(name, torch.cuda.current_device())


def finish(device: torch.device) -> None:
    """Wait for what the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_communication(world: MPI.Comm, parameters: int, device: torch.device) -> float:
    """The median seconds of one allreduce of all gradients, with nothing else to do."""
    gradients = torch.zeros(parameters, device=device)
    finish(device)
    seconds = []
    for _ in range(5):
        world.Barrier()
        begin = time.perf_counter()
        hvd.allreduce_(gradients)
        seconds.append(world.allreduce(time.perf_counter() - begin, MPI.MAX))
    return float(np.median(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=(*OURS, "ddp", "gloo", "alone"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--parameters", type=Path, required=True, help="where rank 0 leaves them")
    chosen = parser.parse_args()
    world = MPI.COMM_WORLD
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = device_of(world, chosen.device)
    generator = torch.Generator().manual_seed(world.rank)
    inputs = torch.randn(chosen.batch, chosen.inputs, generator=generator).to(device)
    targets = torch.randint(10, (chosen.batch,), generator=generator).to(device)
    model: torch.nn.Module = make_model(chosen.inputs, chosen.width, chosen.layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    parameters = list(model.parameters())
    if chosen.kind in OURS:
        hvd.init()
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    elif chosen.kind != "alone":
        if chosen.kind == "gloo":
            join_gloo(world)
        else:
            importlib.import_module("ringdl.torch.backend")
            distributed.init_process_group("ringdl")
        model = DistributedDataParallel(model)
    seconds: list[float] = []
    commits: list[float] = []

    def time_slowest(call: Callable[[], object]) -> float:
        world.Barrier()
        begin = time.perf_counter()
        call()
        finish(device)
        return world.allreduce(time.perf_counter() - begin, MPI.MAX)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    def train(state: hvd.elastic.TorchState | None = None) -> None:
        seconds.extend(time_slowest(step) for _ in range(-3, chosen.steps))
        if state is not None:
            commits.extend(time_slowest(state.commit) for _ in range(COMMITS))

    if chosen.kind == "elastic":
        hvd.elastic.run(train, hvd.elastic.TorchState(model, optimizer))
    else:
        train()
    del seconds[:3]
    count = sum(p.numel() for p in parameters)
    answer = {
        "mpi": " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split()),
        "torch": torch.__version__,
        "parameters": count,
        "seconds": seconds,
        "commits": commits,
    }
    if chosen.kind == "ringdl":
        answer["communication"] = time_communication(world, count, device)
    if world.rank == 0:
        chosen.json.write_text(json.dumps(answer))
        learnt = torch.cat([p.detach().flatten() for p in parameters])
        np.save(chosen.parameters, learnt.cpu().numpy())
    world.Barrier()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
