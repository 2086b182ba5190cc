"""One run: a task is trained by a policy on these ranks, and what it had learnt when."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import ringdl
import ringdl.torch as hvd
from ringdl import policies
from ringdl.compare._policies import BASE, CHOICES
from ringdl.compare._tasks import TASKS, Tensors

SNAPSHOTS = 32
LAST = 1 / 8
"""Of a run: the median there is what it has reached."""


@dataclass(frozen=True)
class Run:
    """What is to be done.

    Args:
        task: its name.
        policy: its name.
        rate: the learning rate.
        seed: of the network and of the order of samples.
        steps: of each rank, if all make as many.
        budget: the same of the base run: what policies are made for, and compared at.
        slow: how many times longer than the base's step, where no rank is slow, one of the last
            rank takes.
        period: for that, how long each step of the last rank takes at least, in seconds.
        is_shown: whether the whole curve is wanted; else what it ends with, as evaluating all of
            it takes longer than training.
    """

    task: str
    policy: str
    rate: float
    seed: int
    steps: int
    budget: int
    slow: float = 1.0
    period: float = 0.0
    is_shown: bool = True


@dataclass(frozen=True)
class Curve:
    """What a run has shown: a value for each snapshot, but for the last two.

    Args:
        run: which one.
        ranks: on how many.
        examples: that all ranks have trained on.
        seconds: since the first step.
        loss: of the test's data.
        accuracy: the same.
        bytes: that ranks have sent, each on average, between processes that share no memory.
        distance: of the parameters from those of the base run, after as many examples, as a share
            of what that has moved.
        disagreement: the share of the test's data for which guesses differ from its, likewise.
    """

    run: Run
    ranks: int
    examples: list[int]
    seconds: list[float]
    loss: list[float]
    accuracy: list[float]
    bytes: list[float]
    distance: float = 0.0
    disagreement: float = 0.0

    @property
    def bytes_per_example(self) -> float:
        return self.bytes[-1] / self.examples[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, its: dict[str, Any]) -> Curve:
        return cls(**its | {"run": Run(**its["run"])})


class _Pace:
    """Sleeps until a period has passed since the last time, and what was late is not caught up.

    A sleep of the same length in each step would not do: a step after one is longer than others,
    as the caches and the core are cold, on some machines by twice.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._next = time.perf_counter() + period

    def keep(self) -> None:
        early = self._next - time.perf_counter()
        if early > 0:
            time.sleep(early)
        self._next += self._period + max(-early, 0)


class Runner:
    """Makes runs on all ranks of a communicator, which share what they compare with."""

    def __init__(self, communicator: ringdl.Communicator) -> None:
        self._its = communicator
        self._base: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def carry_out(self, run: Run) -> Curve:
        """Train. Collective."""
        its, task, choice = self._its, TASKS[run.task], CHOICES[run.policy]
        (inputs, targets), test = _data(run.task)
        torch.manual_seed(run.seed)
        network = task.network()
        first = parameters_to_vector(network.parameters()).detach().clone()
        policy: Any = choice.make(run.budget)
        optimizer = hvd.DistributedOptimizer(
            task.optimizer(network.parameters(), run.rate),
            network.named_parameters(),
            policy=policy,
        )
        length = self._length(run)
        random = np.random.default_rng((run.seed, its.rank))
        rows = task.batch // its.size
        snapshots: list[torch.Tensor] = []
        seconds: list[float] = []
        sent: list[float] = []
        made: list[int] = []
        step = 0
        its.barrier()
        sent_before = its.stats()["bytes_sent"]
        begin = time.perf_counter()
        pace = _Pace(run.period if its.rank == its.size - 1 else 0.0)
        while len(snapshots) < SNAPSHOTS:
            chosen = torch.from_numpy(random.integers(0, len(inputs), rows))
            _take_step(network, optimizer, (inputs[chosen], targets[chosen]), pace)
            step += 1
            done = policy.rounds if choice.balanced_steps else step
            # Several in one place, where there are fewer rounds than snapshots.
            while len(snapshots) < SNAPSHOTS and SNAPSHOTS * done >= length * (len(snapshots) + 1):
                made.append(step)
                seconds.append(time.perf_counter() - begin)
                sent.append(its.stats()["bytes_sent"] - sent_before)
                snapshots.append(parameters_to_vector(network.parameters()).detach().clone())
        policies.synchronize(optimizer)
        last = parameters_to_vector(network.parameters()).detach().clone()
        return self._curve(run, network, test, first, last, snapshots, seconds, sent, made)

    def _length(self, run: Run) -> int:
        """How many steps this rank makes, or balanced rounds.

        Where a slow rank makes fewer, all together make as many as if it were not slow.
        """
        choice = CHOICES[run.policy]
        if not choice.has_own_pace and not choice.balanced_steps:
            return run.steps
        of_slow = run.steps * self._its.size / (1 + run.slow * (self._its.size - 1))
        is_slow = self._its.rank == self._its.size - 1
        if choice.balanced_steps:
            return max(1, round(of_slow * run.slow / choice.balanced_steps))
        return max(SNAPSHOTS, round(of_slow if is_slow else of_slow * run.slow))

    def _curve(
        self,
        run: Run,
        network: torch.nn.Module,
        test: Tensors,
        first: torch.Tensor,
        last: torch.Tensor,
        snapshots: list[torch.Tensor],
        seconds: list[float],
        sent: list[float],
        made: list[int],
    ) -> Curve:
        its = self._its
        if CHOICES[run.policy].ends_in_mean:
            snapshots = [*its.allreduce(torch.stack(snapshots))]
            seconds = its.allreduce(np.array(seconds), ringdl.Max).tolist()
        sent = its.allreduce(np.array(sent, float)).tolist()
        unseen = 0 if run.is_shown else round(SNAPSHOTS * (1 - LAST))
        loss, accuracy = [math.nan] * unseen, [math.nan] * unseen
        for each in snapshots[unseen:]:
            vector_to_parameters(each, network.parameters())
            outputs = _outputs(network, test[0])
            loss.append(float(functional.cross_entropy(outputs, test[1])))
            accuracy.append(float((outputs.argmax(1) == test[1]).float().mean()))
        there = (
            last if run.steps == run.budget else snapshots[SNAPSHOTS * run.budget // run.steps - 1]
        )
        vector_to_parameters(there, network.parameters())
        guesses = _outputs(network, test[0]).argmax(1)
        key = run.task, run.seed
        if run.policy == BASE:
            self._base[key] = first, there, guesses
        distance = disagreement = 0.0
        if key in self._base:
            base_first, base_last, base_guesses = self._base[key]
            moved = float((base_last - base_first).norm())
            distance = float((there - base_last).norm()) / moved
            disagreement = float((guesses != base_guesses).float().mean())
        if CHOICES[run.policy].has_own_pace:  # another rank may be anywhere by now
            total = run.steps * its.size
            made = [total * number // SNAPSHOTS for number in range(1, SNAPSHOTS + 1)]
        else:
            made = its.allreduce(np.array(made), ringdl.Sum).tolist()
        examples = [steps * (TASKS[run.task].batch // its.size) for steps in made]
        values = examples, seconds, loss, accuracy, sent
        return Curve(run, its.size, *values, distance, disagreement)


def _take_step(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any, pace: _Pace
) -> None:
    """What is slow is before the backward pass, which averages gradients in its end."""
    inputs, targets = batch
    optimizer.zero_grad()
    loss = functional.cross_entropy(network(inputs), targets)
    pace.keep()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


@cache
def _data(task: str) -> tuple[Tensors, Tensors]:
    return TASKS[task].data()


@torch.no_grad()
def _outputs(network: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = network(inputs)
    return outputs
