"""What a type checker says of a user's script."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]
SCRIPT = """
from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch

import ringdl
import ringdl.torch as hvd

array = np.ones(3, np.float32)
tensor = torch.ones(3)
Floats = npt.NDArray[np.float32]


def collectives() -> None:
    assert_type(ringdl.allreduce(tensor, ringdl.Sum, name="x"), torch.Tensor)
    for result in (ringdl.allreduce(array), ringdl.allreduce_(array), ringdl.broadcast(array)):
        result.astype(np.int64)
    floats: Floats = ringdl.allreduce_async(array).wait()
    assert_type(ringdl.allgather(floats), Floats)
    assert_type(ringdl.grouped_allreduce([tensor]), list[torch.Tensor])
    assert_type(ringdl.gather(tensor), torch.Tensor | None)
    assert_type(ringdl.alltoall(tensor), torch.Tensor)
    assert_type(ringdl.alltoall(tensor, [3]), tuple[torch.Tensor, list[int]])
    assert_type(ringdl.get_communicator().reducescatter(tensor), torch.Tensor)
    assert_type(hvd.synchronize(hvd.allreduce_async(tensor)), torch.Tensor)
    assert_type(hvd.alltoall(tensor, [3]), tuple[torch.Tensor, torch.Tensor])


class Own(torch.optim.Optimizer):
    own = 3


def optimizers(model: torch.nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), op=hvd.Average, policy=ringdl.policies.Gossip()
    )
    with optimizer.no_sync():
        optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.replan()
    optimizer.set_backward_passes_per_step(2)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    again: torch.optim.AdamW = hvd.DistributedOptimizer(optimizer)
    own = hvd.DistributedOptimizer(Own(model.parameters(), {}))
    assert_type(own.own, int)
    assert isinstance(own, hvd.WrappedOptimizer)
    own.no_sync()
    assert_type(own.own, int)


def wrong(model: torch.nn.Module) -> None:
    ringdl.allreduce("text")  # refused
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), compresion=None)  # refused
"""


def test_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(script)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert errors, checked.stdout + checked.stderr
    lines = enumerate(SCRIPT.splitlines(), start=1)
    refused = {str(number) for number, line in lines if line.endswith("# refused")}
    assert {line.split(":")[1] for line in errors} == refused, checked.stdout
