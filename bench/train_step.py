"""A training step in PyTorch: ringdl, DDP over Gloo, and the same ranks computing alone.

    OMP_NUM_THREADS=1 python -m ringdl run -n 2 bench/train_step.py
    OMP_NUM_THREADS=1 python -m ringdl run -n 2 bench/train_step.py --json bench/results/step.json

The three take turns, step by step, in the same processes, with models of their own: 27 million
parameters, SGD, the default zero_grad(). A step begins for all ranks at once; its time is that of
the slowest rank. ringdl's and DDP's parameters are compared in the end. How long the gradients take
by themselves is measured, too: what a step takes longer than computing alone is the part of it that
computing does not hide.

On simulated hosts (bench/hosts.py; as root), with a model whose communication takes about as long
as computing, and with links so slow that what TCP takes of the cores that all hosts share is small
beside that:

    python bench/hosts.py up --hosts 4 --rate 200mbit
    OMP_NUM_THREADS=1 python bench/hosts.py run --mpi openmpi --layout 1+1+1+1 -- \
        bench/train_step.py --inputs 512 --width 512 --layers 8 --batch 1280
    python bench/hosts.py down
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import ringdl.torch as hvd


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


def make_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]
) -> Callable[[], None]:
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each kind, after two for warming")
    parser.add_argument("--batch", type=int, default=32, help="rows per rank")
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write all times to this file")
    chosen = parser.parse_args()
    hvd.init()
    world = MPI.COMM_WORLD
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join_gloo(world)
    generator = torch.Generator().manual_seed(world.rank)
    batch = (
        torch.randn(chosen.batch, chosen.inputs, generator=generator),
        torch.randint(10, (chosen.batch,), generator=generator),
    )
    kinds = ("ringdl", "gloo", "alone")
    models = {n: make_model(chosen.inputs, chosen.width, chosen.layers) for n in kinds}
    optimizers = {n: torch.optim.SGD(m.parameters(), lr=1e-3) for n, m in models.items()}
    hvd.DistributedOptimizer(optimizers["ringdl"], models["ringdl"].named_parameters())
    called = {**models, "gloo": DistributedDataParallel(models["gloo"])}
    steps = {n: make_step(called[n], optimizers[n], batch) for n in models}
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-2, chosen.steps):
        for name in names[turn % 3 :] + names[: turn % 3]:
            world.Barrier()
            begin = time.perf_counter()
            steps[name]()
            mine = time.perf_counter() - begin
            if turn >= 0:
                seconds[name].append(world.allreduce(mine, MPI.MAX))
    gradients = np.zeros(sum(p.numel() for p in models["ringdl"].parameters()), np.float32)
    communication = []
    for _ in range(5):
        world.Barrier()
        begin = time.perf_counter()
        hvd.allreduce_(torch.from_numpy(gradients))
        communication.append(world.allreduce(time.perf_counter() - begin, MPI.MAX))
    for ours, theirs in zip(
        models["ringdl"].parameters(), models["gloo"].parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    if world.rank == 0:
        report(chosen, world, seconds, float(np.median(communication)), gradients.size)
    world.Barrier()
    distributed.destroy_process_group()


def report(
    chosen: argparse.Namespace,
    world: MPI.Comm,
    seconds: dict[str, list[float]],
    communication: float,
    parameters: int,
) -> None:
    version = " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split())
    lines = [f"{parameters / 1e6:.1f} M parameters, {world.size} ranks, {version}"]
    for name, times in seconds.items():
        low, median, high = np.percentile(times, (10, 50, 90)) * 1e3
        lines.append(f"{name:8} {median:8.1f} ms  (p10 {low:.1f}, p90 {high:.1f})")
    ratios = {
        other: float(np.median(np.array(seconds[other]) / np.array(seconds["ringdl"])))
        for other in ("gloo", "alone")
    }
    lines += [f"{other} / ringdl = {ratio:.2f}" for other, ratio in ratios.items()]
    visible = float(np.median(np.array(seconds["ringdl"]) - np.array(seconds["alone"])))
    hidden = 1 - visible / communication
    lines.append(f"communication alone {communication * 1e3:.1f} ms, of which {hidden:.0%} hidden")
    sys.stdout.write("\n".join(lines) + "\n")
    if chosen.json:
        text = Path("/proc/cpuinfo").read_text()
        model = text.partition("model name")[2].partition("\n")[0].lstrip("\t :")
        machine = {
            "cpu": model,
            "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(),
        }
        answer = {"machine": machine, "mpi": version, "torch": torch.__version__}
        answer |= {"ranks": world.size, "parameters": parameters, "batch": chosen.batch}
        answer |= {"ratios": ratios, "communication": communication, "hidden": hidden}
        answer |= {"command": shlex.join(["bench/train_step.py", *sys.argv[1:]])}
        answer["seconds"] = seconds
        chosen.json.write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
