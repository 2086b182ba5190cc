"""A network that does not fit into a rank's memory trains on a grid, as in one process.

Arguments: the grid's data, pipeline and model axes.
"""

import resource
import subprocess
import sys

import torch
from torch.nn import functional

import ringdl
import ringdl.torch as hvd
from ringdl import Grid
from ringdl.torch import parallel

LAYERS, UNITS, ROWS, STEPS = 4, 2000, 16, 2
PARAMETERS = LAYERS * UNITS * (UNITS + 1) * 8
LIMIT = int(3.5 * PARAMETERS)
"""Bytes beyond what a process has before; Adam takes four times the parameters."""


def layer(number: int, grid: Grid | None) -> torch.nn.Module:
    if grid is None or grid.model.size == 1:
        made: torch.nn.Module = torch.nn.Linear(UNITS, UNITS, dtype=torch.float64)
    else:
        kind = parallel.RowParallelLinear if number % 2 else parallel.ColumnParallelLinear
        made = kind(UNITS, UNITS, communicator=grid.model, dtype=torch.float64)
    return made if number % 2 else torch.nn.Sequential(made, torch.nn.Tanh())


def start(module: torch.nn.Module) -> None:
    """The same parameters, however they are cut, and one at a time."""
    cuts = parallel.cuts_of(module)
    for name, parameter in sorted(module.named_parameters()):
        generator = torch.Generator().manual_seed(int(name.split(".")[0]))
        cut = cuts.get(name)
        shape = [*parameter.shape]
        if cut is not None:
            shape[cut.dim] = cut.size
        whole = torch.randn(shape, generator=generator, dtype=torch.float64) / UNITS**0.5
        with torch.no_grad():
            parameter.copy_(whole if cut is None else cut.own(whole))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(
        torch.randn(ROWS, UNITS, generator=generator, dtype=torch.float64) for _ in range(2)
    )


def limit(address_space: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.RLIM_INFINITY))


def used() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def train_uncut() -> torch.nn.Sequential:
    network = torch.nn.Sequential(*(layer(number, None) for number in range(LAYERS)))
    start(network)
    optimizer = torch.optim.Adam(network.parameters(), 0.001)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        functional.mse_loss(network(inputs), targets).backward()
        optimizer.step()
    return network


def train_cut(grid: Grid) -> dict[str, torch.Tensor]:
    makers = [lambda number=number: layer(number, grid) for number in range(LAYERS)]
    network = parallel.Pipeline(
        makers,
        functional.mse_loss,
        grid.pipeline,
        microbatches=max(1, 2 * (grid.pipeline.size - 1)),
    )
    start(network)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(network.parameters(), 0.001),
        network.named_parameters(),
        backward_passes_per_step=network.passes,
        process_set=grid.data,
    )
    for step in range(STEPS):
        rows = parallel.span(ROWS, grid.data)
        inputs, targets = (each.narrow(0, *rows) for each in batch(step))
        optimizer.zero_grad()
        network.step(inputs, targets)
        optimizer.step()
    del optimizer
    limit(resource.RLIM_INFINITY)
    return parallel.state_dict(network, grid.pipeline)


def limit_beyond_now() -> None:
    torch.set_num_threads(1)
    torch.linalg.vector_norm(torch.randn(500, 500) @ torch.randn(500, 500))  # buffers
    limit(used() + LIMIT)


def main() -> None:
    if sys.argv[1:] == ["uncut"]:
        limit_beyond_now()
        train_uncut()
        return
    ringdl.init()
    grid = Grid(*map(int, sys.argv[1:4]))
    if ringdl.rank() == 0:
        print(grid, flush=True)
        uncut = subprocess.run(
            [sys.executable, __file__, "uncut"], capture_output=True, text=True, check=False
        )
        assert "can't allocate memory" in uncut.stderr, uncut.stderr
    ringdl.barrier()
    limit_beyond_now()
    state = train_cut(grid)
    if ringdl.rank() == 0:
        whole = train_uncut().state_dict()
        assert sorted(state) == sorted(whole)
        for name, tensor in whole.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-9)
    sums = ringdl.allgather_object({name: float(tensor.sum()) for name, tensor in state.items()})
    assert all(each == sums[0] for each in sums)
    print(f"rank {ringdl.rank()} has trained a part of what does not fit", flush=True)


if __name__ == "__main__":
    main()
