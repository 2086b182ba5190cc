"""Around the loop: metrics, learning rates, checkpoints."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import make_mlp


def check_metrics(comm: Communicator) -> None:
    rank, size = comm.rank, comm.size
    plain = hvd.average_metrics({"loss": rank, "accuracy": torch.tensor(0.5)})
    assert plain == {"accuracy": 0.5, "loss": (size - 1) / 2}
    weighted = ringdl.average_metrics({"loss": float(rank)}, weight=rank)
    total = size * (size - 1) / 2
    if size > 1:
        assert math.isclose(weighted["loss"], sum(r * r for r in range(size)) / total)
    nothing = ringdl.average_metrics({"loss": math.nan if rank == 0 else 3.0}, weight=min(rank, 1))
    assert nothing["loss"] == 3.0 or size == 1
    assert ringdl.average_metrics({}) == {}


@needs(ranks=2)
def check_metrics_of_other_names(comm: Communicator) -> None:
    with expect(ringdl.MismatchError, "loss on rank 1", "error on rank 0"):
        ringdl.average_metrics({"error" if comm.rank == 0 else "loss": 1.0})


def check_warm_up() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}])
    optimizer = hvd.DistributedOptimizer(optimizer, [("weight", weight)])
    scheduler = hvd.scale_with_warm_up(optimizer, 4, factor=3.0)
    rates = []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        weight.grad = torch.zeros(2)
        optimizer.step()
        scheduler.step()
    assert all(map(math.isclose, rates, [0.5, 0.75, 1.0, 1.25, 1.5, 1.5])), rates
    at_once = torch.optim.SGD([weight], lr=0.5)
    hvd.scale_with_warm_up(at_once, 0)
    assert at_once.param_groups[0]["lr"] == 0.5 * hvd.size()
    both = torch.optim.SGD([weight], lr=0.5)
    first = hvd.scale_with_warm_up(both, 2, factor=4.0)
    second = torch.optim.lr_scheduler.StepLR(both, 1, gamma=0.5)
    in_turn = torch.optim.lr_scheduler.SequentialLR(both, [first, second], milestones=[2])
    rates = []
    for _ in range(5):
        rates.append(both.param_groups[0]["lr"])
        both.step()
        in_turn.step()
    assert all(map(math.isclose, rates, [0.5, 1.25, 2.0, 1.0, 0.5])), rates
    with expect(ringdl.UsageError, "-1 steps"):
        hvd.scale_with_warm_up(at_once, -1)


def check_checkpoints(comm: Communicator) -> None:
    folder = Path(comm.broadcast_object(tempfile.mkdtemp() if comm.rank == 0 else None))
    own = folder if comm.rank == 0 else Path("/no/such/place/here")
    model = make_mlp(seed=comm.rank)
    hvd.save({"model": model.state_dict(), "epoch": comm.rank}, own / "checkpoint")
    state = hvd.load(own / "checkpoint")
    assert state["epoch"] == 0
    for key, value in make_mlp(seed=0).state_dict().items():
        assert torch.equal(state["model"][key], value)
    with expect(ringdl.UsageError, "rank 0 cannot write the checkpoint", "/no/such"):
        hvd.save({}, "/no/such/place/here/checkpoint")
    with expect(ringdl.UsageError, "rank 0 cannot write the checkpoint"):
        hvd.save({"function": lambda: 1}, own / "checkpoint")
    assert hvd.load(own / "checkpoint")["epoch"] == 0
    with expect(ringdl.UsageError, "rank 0 cannot read the checkpoint"):
        hvd.load(own / "nothing")
    comm.barrier()
    if comm.rank == 0:
        os.umask(mask := os.umask(0))
        assert (folder / "checkpoint").stat().st_mode & 0o777 == 0o666 & ~mask
        assert [path.name for path in folder.iterdir()] == ["checkpoint"]
