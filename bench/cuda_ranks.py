"""What bench/cuda_check.py measures, on each rank: `torchrun ... cuda_ranks.py ANSWER.json`.

Times are of the host's clock, from a barrier to the moment at which the result is there, on the
slowest rank; medians. Bandwidths are of bytes copied, of one rank. With RINGDL_CUDA_PEERS=0 it
measures how arrays go by way of the CPU's memory, and nothing else.
"""

from __future__ import annotations

import json
import os
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
WHOLE = 256 << 20


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
    count = WHOLE
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
    for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, WHOLE):
        tensor = torch.ones(size // 4, device="cuda")
        born_there = ringdl.empty(size // 4, device=torch.cuda.current_device())
        host = ringdl.empty(size // 4)
        name = f"{size >> 10} KiB"
        for array, where in (
            (tensor, ""),
            (born_there, " of ringdl.empty(device=)"),
            (host, " in the host's memory"),
        ):
            taken = seconds(lambda array=array: comm.allreduce_(array))  # type: ignore[misc]
            found[f"{name}{where}, us"] = round(taken * 1e6, 1)
    return found


def parts_of_the_smallest() -> dict[str, float]:
    """What an allreduce of 4 KiB is made of: nothing of it can take less than these."""
    x, host = torch.ones(1024, device="cuda"), np.ones(1024, np.float32)
    event = torch.cuda.Event()

    def launch() -> None:
        x.mul_(1)
        torch.cuda.current_stream().synchronize()

    def record() -> None:
        event.record()
        while not event.query():
            pass

    return {
        "a launch and its end, us": round(seconds(launch, 50) * 1e6, 1),
        "an event and its end, us": round(seconds(record, 50) * 1e6, 1),
        "a barrier of the ranks, us": round(seconds(comm.barrier, 50) * 1e6, 1),
        "an allreduce of 4 KiB in the host's memory, us": round(
            seconds(lambda: comm.allreduce_(host), 50) * 1e6, 1
        ),
    }


def by_way_of_the_host(copied: dict[str, float]) -> dict[str, float]:
    """The larger arrays, beside what bounds them: copies over the bus, and the host's reduction."""
    found = {}
    for size in (16 << 20, WHOLE):
        tensor = torch.ones(size // 4, device="cuda")
        on_host = ringdl.empty(size // 4)
        taken = seconds(lambda tensor=tensor: comm.allreduce_(tensor))  # type: ignore[misc]
        reduced = seconds(lambda on_host=on_host: comm.allreduce_(on_host))  # type: ignore[misc]
        slower_copy = min(copied["device to pinned, GB/s"], copied["pinned to device, GB/s"])
        ranks_of_device = -(-comm.size // torch.cuda.device_count())
        copies_alone = ranks_of_device * size / slower_copy / 1e9
        name = f"{size >> 20} MiB"
        found[f"{name}, ms"] = round(taken * 1e3, 2)
        found[f"{name}, copies alone, ms"] = round(copies_alone * 1e3, 2)
        found[f"{name}, host's reduction alone, ms"] = round(reduced * 1e3, 2)
        found[f"{name}, bound / time (asked 0.8)"] = round(max(copies_alone, reduced) / taken, 3)
    return found


def packing() -> dict[str, float]:
    """100 arrays of a bucket of 25 MiB, copied there by one launch and back by another.

    By the device's clock, which begins when all has been asked of it.
    """
    own, device = comm.split(comm.rank), torch.cuda.current_device()
    assert own is not None
    count, elements = 100, 64 << 10
    specs = [(f"w{index}", (elements,), "float32") for index in range(count)]
    buckets = ringdl.Buckets(
        specs, 1 << 30, first_bucket_bytes=1 << 30, communicator=own, device=device
    )
    tensors = [torch.randn(elements, device="cuda") for _ in range(count)]
    arrays = [handed(tensor) for tensor in tensors]
    whole = torch.empty(count * elements, device="cuda")
    other = torch.empty_like(whole)
    stream = torch.cuda.current_stream().cuda_stream

    def of_device(act: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(1_000_000)
        begin.record()
        act()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    times: dict[str, list[float]] = {"pack": [], "unpack": [], "copy": []}
    for turn in range(comm.size):
        comm.barrier()
        for _ in range(20 if turn == comm.rank else 0):
            times["copy"].append(of_device(lambda: other.copy_(whole)))
            for index in range(1, count):
                buckets.ready(index, stream, arrays[index])
            times["pack"].append(of_device(lambda: buckets.ready(0, stream, arrays[0])))
            buckets.wait(stream=stream)
            into = dict(enumerate(arrays))
            times["unpack"].append(of_device(lambda into=into: buckets.unpack(into, 1.0, stream)))
        comm.barrier()
    byte_count = 4 * count * elements
    speed = {name: byte_count / statistics.median(each) / 1e9 for name, each in times.items()}
    return {f"{name}, GB/s": round(each, 1) for name, each in speed.items()} | {
        f"{name} / copy (asked 0.9)": round(speed[name] / speed["copy"], 3)
        for name in ("pack", "unpack")
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
    ratio = found["ringdl, ms"] / found["alone, ms"]
    return found | {"ringdl / alone (asked at most 1.15)": round(ratio, 3)}


def of_the_largest(found: dict[str, float], copied: dict[str, float]) -> dict[str, float]:
    """Each rank reads all arrays' parts and writes them: as much as one copy of an array."""
    ranks_of_device = -(-comm.size // torch.cuda.device_count())
    bytes_alone = ranks_of_device * WHOLE / copied["device to device, GB/s"] / 1e3
    name = f"{WHOLE >> 10} KiB of ringdl.empty(device=), us"
    bound = bytes_alone + found["4 KiB of ringdl.empty(device=), us"]
    return {
        "bytes alone, us": round(bytes_alone, 1),
        "time / (bytes + 4 KiB's time) (asked at most 1.3)": round(found[name] / bound, 3),
    }


copied = copies()
measured: dict[str, dict[str, float]]
if os.environ.get("RINGDL_CUDA_PEERS") == "0":
    measured = {"by way of the host's memory": by_way_of_the_host(copied)}
else:
    allreduced = allreduces()
    measured = {
        "copies": copied,
        "packing": packing(),
        "allreduce": allreduced,
        "allreduce of 256 MiB": of_the_largest(allreduced, copied),
        "parts of the smallest": parts_of_the_smallest(),
        "step": step(),
    }
if comm.rank == 0:
    Path(sys.argv[1]).write_text(json.dumps(measured, indent=1))
ringdl.shutdown()
