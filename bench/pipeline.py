"""How much of the time the ranks of a pipeline compute, beside the bound of its schedule.

    python -m ringdl run -n 2 bench/pipeline.py [--microbatches 8] [--chunks 1] [--json FILE]

Stages are equal: linear layers of float32, or, with ``--sleep``, layers that only take time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringdl
from ringdl.torch import parallel


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Sleep(torch.nn.Module):
    """Takes time, forward and twice as much backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(self.scale * x, self.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=64, help="of a microbatch")
    parser.add_argument("--layers", type=int, default=4, help="of a stage")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a layer")
    parser.add_argument("--json", type=Path)
    its = parser.parse_args()
    comm = ringdl.init()
    torch.set_num_threads(1)
    count = comm.size * its.chunks * its.layers
    if its.sleep:
        layers: list[Any] = [lambda: Sleep(its.sleep) for _ in range(count)]
    else:
        layers = [lambda: torch.nn.Linear(its.features, its.features) for _ in range(count)]
    pipeline = parallel.Pipeline(
        layers,
        torch.nn.functional.mse_loss,
        comm,
        microbatches=its.microbatches,
        chunks=its.chunks,
    )
    inputs = torch.randn(its.rows * its.microbatches, its.features)
    shares = []
    for step in range(its.steps + 2):
        pipeline.zero_grad()
        comm.barrier()
        busy, begin = pipeline.busy_seconds, time.perf_counter()
        pipeline.step(inputs, inputs)
        comm.barrier()
        whole = time.perf_counter() - begin
        share = comm.allreduce(np.array([(pipeline.busy_seconds - busy) / whole]))[0]
        if step > 1:
            shares.append(float(share))
    bound = parallel.utilization(comm.size, its.microbatches, its.chunks)
    if comm.rank == 0:
        median = float(np.median(shares))
        low, high = np.percentile(shares, [10, 90])
        print(
            f"{comm.size} ranks, {its.microbatches} microbatches, {its.chunks} chunks: ranks "
            f"compute {median:.3f} of the time ({low:.3f} to {high:.3f}); the bound is "
            f"{bound:.3f}, of which that is {median / bound:.3f}"
        )
        if its.json:
            found = {"ranks": comm.size, "shares": shares, "bound": bound}
            its.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
