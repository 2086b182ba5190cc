"""What bench/cuda_check.py measures, on each rank: `torchrun ... cuda_ranks.py ANSWER.json`.

Times are of the host's clock, from a barrier to the moment at which the result is there, on the
slowest rank; medians. Bandwidths are of bytes copied, of one rank.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import ringdl
from ringdl._frameworks.torch import handed

ringdl.init()
comm = ringdl.get_communicator()
torch.cuda.set_device(comm.local_rank % torch.cuda.device_count())


def seconds(act: Callable[[], object], times: int = 15) -> float:
    """Of the slowest rank, once everything that was asked of the device is done."""
    found = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        comm.barrier()
        begin = time.perf_counter()
        act()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    slowest = comm.allreduce(np.array(found[3:]), ringdl.Max)
    return float(statistics.median(slowest))


def alone(act: Callable[[], object], times: int = 15) -> float:
    """The same, of one rank after the other."""
    found = 0.0
    for turn in range(comm.size):
        comm.barrier()
        if turn == comm.rank:
            torch.cuda.synchronize()
            samples = []
            for _ in range(times):
                begin = time.perf_counter()
                act()
                torch.cuda.synchronize()
                samples.append(time.perf_counter() - begin)
            found = statistics.median(samples)
        comm.barrier()
    return float(comm.allreduce(np.array([found]), ringdl.Max)[0])


def copies() -> dict[str, float]:
    count = 256 << 20
    on_device = torch.empty(count, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(on_device)
    pinned = torch.empty(count, dtype=torch.uint8).pin_memory()
    ordinary = torch.empty(count, dtype=torch.uint8)
    cases = {
        "device to device": lambda: other.copy_(on_device, non_blocking=True),
        "device to pinned": lambda: pinned.copy_(on_device, non_blocking=True),
        "pinned to device": lambda: on_device.copy_(pinned, non_blocking=True),
        "device to ordinary": lambda: ordinary.copy_(on_device),
        "pinned to pinned": lambda: ordinary.copy_(pinned),
    }
    return {f"{name}, GB/s": round(count / alone(act) / 1e9, 1) for name, act in cases.items()}


def allreduces() -> dict[str, float]:
    found = {}
    for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20):
        tensor = torch.ones(size // 4, device="cuda")
        name = f"{size >> 10} KiB"
        taken = seconds(lambda tensor=tensor: comm.allreduce_(tensor))  # type: ignore[misc]
        found[f"{name}, us"] = round(taken * 1e6, 1)
        found[f"{name}, GB/s"] = round(size / taken / 1e9, 2)
        host = torch.ones(size // 4)
        taken = seconds(lambda host=host: comm.allreduce_(host))  # type: ignore[misc]
        found[f"{name} in the host's memory, us"] = round(taken * 1e6, 1)
    return found


def packing() -> dict[str, float]:
    """A bucket's gradients are copied there by one launch: how fast, by the device's clock."""
    own, device = comm.split(comm.rank), torch.cuda.current_device()
    assert own is not None
    count, elements = 100, 64 << 10
    specs = [(f"w{index}", (elements,), "float32") for index in range(count)]
    buckets = ringdl.Buckets(
        specs, 1 << 30, first_bucket_bytes=1 << 30, communicator=own, device=device
    )
    tensors = [torch.randn(elements, device="cuda") for _ in range(count)]
    sources = [handed(tensor) for tensor in tensors]
    whole = torch.empty(count * elements, device="cuda")
    other = torch.empty_like(whole)
    stream = torch.cuda.current_stream().cuda_stream

    def of_device(act: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        act()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    packed, copied = [], []
    for _ in range(20):
        copied.append(of_device(lambda: other.copy_(whole)))
        for index in range(1, count):
            buckets.ready(index, stream, sources[index])
        packed.append(of_device(lambda: buckets.ready(0, stream, sources[0])))
        buckets.wait(stream=stream)
    gigabytes = 4 * count * elements / 1e9
    pack, copy = (gigabytes / statistics.median(times) for times in (packed, copied))
    return {
        "pack, GB/s": round(pack, 1),
        "copy, GB/s": round(copy, 1),
        "pack / copy": round(pack / copy, 3),
    }


def step() -> dict[str, float]:
    """A model of 100 million parameters, by SGD."""

    def make() -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [torch.nn.Linear(2240, 2240) for _ in range(20)]
        return torch.nn.Sequential(
            *(x for layer in layers for x in (layer, torch.nn.ReLU()))
        ).cuda()

    inputs = torch.randn(2048, 2240, device="cuda")
    found = {}
    for name in ("alone", "ringdl"):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if name == "ringdl":
            import ringdl.torch

            optimizer = ringdl.torch.DistributedOptimizer(optimizer, model.named_parameters())

        def one(
            model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer
        ) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        found[f"{name}, ms"] = round(seconds(one, 8) * 1e3, 2)
        found["parameters"] = sum(p.numel() for p in model.parameters())
        del model, optimizer
        torch.cuda.empty_cache()
    found["ringdl / alone"] = round(found["ringdl, ms"] / found["alone, ms"], 3)
    return found


measured = {
    "copies": copies(),
    "packing": packing(),
    "allreduce": allreduces(),
    "step": step(),
}
if comm.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(measured, indent=1))
ringdl.shutdown()
