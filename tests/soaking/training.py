"""Steps of training, by each policy, with what surrounds them: loaders, commits, cut networks."""

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringdl
import ringdl.numpy as rn
import ringdl.torch as hvd
from ringdl import elastic, policies
from ringdl.data import Loader
from ringdl.torch import parallel

UNITS = 48
POLICIES: tuple[Callable[[], policies.Policy], ...] = (
    policies.AllReduce,
    lambda: policies.ParameterAveraging(2, overlap=True),
    lambda: policies.ParameterAveraging(2, balance=True),
    lambda: policies.PostLocalSGD(2, 3),
    lambda: policies.DiLoCo(3),
    policies.Gossip,
    policies.AsyncGossip,
    policies.ParameterServer,
    lambda: policies.ParameterServer(1, rule="adam", staleness=2),
    lambda: policies.EASGD(2),
)


class Training:
    """Of one life of a communicator. `done`: how many steps there were."""

    def __init__(self, random: np.random.Generator, folder: Path) -> None:
        self.random, self.folder = random, folder
        self.rank, self.size = ringdl.rank(), ringdl.size()
        self.own = np.random.default_rng(self.rank)
        self.done = 0

    def policy(self) -> None:
        """A new network by one of them; at the end all ranks have the same parameters."""
        rows = self.random.integers(1, 3_000)
        its = {"w": np.zeros((rows, 20), np.float32), "b": np.zeros(7, np.float32)}
        policy = POLICIES[self.random.integers(len(POLICIES))]()
        optimizer = rn.DistributedOptimizer(rn.SGD(0.1, momentum=0.9), policy=policy)
        for _ in self.steps(policy):
            drawn = {key: self.own.normal(size=each.shape) for key, each in its.items()}
            optimizer.step(its, {key: each.astype(np.float32) for key, each in drawn.items()})
        policies.synchronize(optimizer)
        for each in its.values():
            assert np.isfinite(each).all()
            self.check_same(each)

    def steps(self, policy: policies.Policy) -> Iterator[None]:
        """Equally many on all ranks, or equally many rounds."""
        count = int(self.random.integers(1, 8))
        if isinstance(policy, policies.ParameterAveraging) and policy.balance:
            while policy.rounds < count:
                yield
        else:
            yield from [None] * count
        self.done += count

    def check_same(self, array: Any) -> None:
        digests = ringdl.allgather_object(zlib.crc32(array.tobytes()), "digest of bits")
        assert len({*digests}) == 1, digests

    def epoch(self) -> None:
        """Each sample once."""
        count = int(self.random.integers(self.size, 2_000))
        loader = Loader({"x": np.arange(count)}, 50, remainder="keep", seed=self.done)
        mine = sum(int(batch["x"].sum()) for batch in loader)
        assert ringdl.allreduce(np.array(mine), ringdl.Sum) == count * (count - 1) // 2

    def commits(self) -> None:
        """With parts of each rank, copies of them, and files; taken up again by another state."""
        count = int(self.random.integers(1, 10_000))
        checkpoint = self.folder / "checkpoints" if self.random.random() < 0.5 else None
        if checkpoint is not None and self.rank == 0 and checkpoint.exists():
            for each in checkpoint.iterdir():
                each.unlink()
        ringdl.barrier()

        def train(state: Any) -> None:
            while state.step < 4:
                state.w += 1
                state.own["rows"] = state.own["rows"] + 1
                state.step += 1
                state.commit()
            state.restore()
            assert (state.w == 4).all()
            assert (state.own["rows"] == self.rank + 4).all()

        for _ in range(1 if checkpoint is None else 2):
            state = elastic.State(
                w=np.zeros(count),
                step=0,
                own={"rows": np.full((2, count), self.rank)},
                checkpoint=checkpoint,
                checkpoint_every=2,
            )
            elastic.run(train, state)
            ringdl.barrier()  # all files are there
            self.done += 4

    def hooks(self) -> None:
        """PyTorch's backward pass, by each policy."""
        torch.manual_seed(self.done)
        model = torch.nn.Sequential(torch.nn.Linear(UNITS, UNITS), torch.nn.Linear(UNITS, 3))
        policy = POLICIES[self.random.integers(len(POLICIES))]()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), policy=policy
        )
        for _ in self.steps(policy):
            inputs = torch.from_numpy(self.own.normal(size=(8, UNITS)).astype(np.float32))
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        policies.synchronize(optimizer)
        for parameter in model.parameters():
            self.check_same(parameter.detach().numpy())

    def cut_network(self) -> None:
        """Layers over all ranks, against the same ones here."""
        torch.manual_seed(self.done)
        grid = ringdl.Grid(model=self.size)
        cut = torch.nn.Sequential(
            parallel.ColumnParallelLinear(UNITS, 2 * UNITS, communicator=grid.model),
            parallel.RowParallelLinear(2 * UNITS, UNITS, communicator=grid.model),
        )
        uncut = torch.nn.Sequential(
            torch.nn.Linear(UNITS, 2 * UNITS), torch.nn.Linear(2 * UNITS, UNITS)
        )
        uncut.load_state_dict(parallel.state_dict(cut))
        inputs = torch.randn(8, UNITS)
        gradients = []
        for model in (cut, uncut):
            x = inputs.clone().requires_grad_()
            model(x).square().sum().backward()
            gradients.append(x.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
        self.done += 1

    def actions(self) -> dict[Callable[[], None], float]:
        """How often each is done, compared with the others."""
        return {
            self.policy: 20,
            self.epoch: 10,
            self.commits: 5,
            self.hooks: 10,
            self.cut_network: 10,
        }
