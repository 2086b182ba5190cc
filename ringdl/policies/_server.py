"""Parameters that ranks push to and fetch from, each at its own pace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, TypeAlias

from ringdl._engine import UpdateRule
from ringdl._errors import UsageError
from ringdl._numbers import is_positive
from ringdl.policies._averaging import check_count
from ringdl.policies._policy import Array, Model, Policy
from ringdl.policies._shards import Shards, wait_for_trainers

Rule: TypeAlias = Literal["sgd", "adagrad", "adam"]


def check_options(rule: str, options: Mapping[str, object]) -> None:
    """Refuse options of an optimizer whose steps a rule takes the place of.

    Raises:
        UsageError: one of them is set.
    """
    for name, value in options.items():
        if value:
            raise UsageError(
                f"with rule={rule!r} gradients are pushed, and what the optimizer does by "
                f"{name}={value!r} is not done; leave it out, or take rule='sgd'"
            )


class ParameterServer(Policy):
    """Ranks push what they have learnt to shards of the parameters, and fetch these: Downpour SGD.

    From Dean and others (2012). Nobody waits for anybody: a slow rank slows none. Updates of a
    shard are one after the other. Ranks of a shard's host push and fetch in its memory themselves;
    for others its rank does so in the background.

    With a staleness it is stale-synchronous (Ho and others 2013): a rank that has pushed c times
    goes on once all have pushed c - staleness times. What it fetches then holds all of these.

    A rank that has called `ringdl.policies.synchronize` serves until the others have called it; one
    that makes no step does nothing else.

    A rank that ends loses only what it has not pushed. Ranks may make different numbers of steps;
    with a staleness, one that has no batch left calls ``join()``.

    Args:
        servers: how many ranks have shards in their memory: "all", or so many.
        push_every: so many steps are pushed together.
        fetch_every: so many steps are made between two fetches.
        rule: "sgd": what a rank's optimizer has changed is added to the parameters. "adagrad" and
            "adam": gradients are pushed, and change the parameters by this rule (of Adam with the
            usual betas), whose state is kept with the shards. Of the wrapped optimizer they take
            the learning rate alone. A gradient that is missing counts as zero.
        staleness: see above. None: there is no bound.
        lr: the learning rate of "adagrad" and "adam"; by default that of the wrapped optimizer.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        servers: Literal["all"] | int = "all",
        push_every: int = 1,
        fetch_every: int = 1,
        rule: Rule = "sgd",
        staleness: int | None = None,
        lr: float | None = None,
    ) -> None:
        if servers != "all":
            check_count("servers", servers, what="ranks")
        check_count("push_every", push_every)
        check_count("fetch_every", fetch_every)
        if staleness is not None:
            check_count("staleness", staleness, at_least=0, what="pushes")
        if rule not in UpdateRule.__members__:
            raise UsageError(f"rule is {rule!r}; pass 'sgd', 'adagrad' or 'adam'")
        if rule == "sgd" and lr is not None:
            raise UsageError(
                "lr is for the rules 'adagrad' and 'adam'; with 'sgd' the wrapped optimizer's "
                "counts"
            )
        if lr is not None and not is_positive(lr):
            raise UsageError(f"lr is {lr!r}; pass a positive number")
        self.servers, self.push_every, self.fetch_every = servers, push_every, fetch_every
        self.rule, self.staleness, self.lr = rule, staleness, lr

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        size = model.communicator.size
        if self.servers != "all" and self.servers > size:
            raise UsageError(f"servers is {self.servers}, and there are {size} ranks")
        if self.rule != "sgd" and self.lr is None:
            _ = model.learning_rate  # raises if there is none
        servers = None if self.servers == "all" else self.servers
        self._shards = Shards(model, UpdateRule[self.rule], servers)
        self._pushes = self._steps = 0
        self._has_gradients = False
        self._pending: dict[str, Array] = {}
        """Gradients to be pushed; by "sgd" the parameters, less what is to be pushed."""

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        self._shards.fill(model)
        self._pushes = self._steps = 0
        self._has_gradients = False
        for name, array in model.parameters.items():
            self._pending[name] = array.copy()
            if self.rule != "sgd":
                self._pending[name][...] = 0

    def before_step(self, model: Model) -> None:
        """See `Policy.before_step`."""
        if self.rule == "sgd":
            return
        import numpy as np

        for name, gradient in model.gradients.items():
            if gradient is None:
                continue
            if not math.isfinite(gradient.sum(dtype=np.float64)):
                raise UsageError(
                    f"the gradient of {name!r} is not finite, and pushed it would make the "
                    "parameters of all ranks so; leave such steps out, or take rule='sgd' and an "
                    "optimizer that does"
                )
            self._pending[name] += gradient
            self._has_gradients = True

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        self._steps += 1
        if self._steps == self.push_every:
            self._push(model)
            if self.staleness is not None:  # else nobody asks
                self._shards.count(self._pushes)
                self._shards.wait_for(self._pushes - self.staleness)
        if model.step % self.fetch_every == 0:
            self._fetch(model)

    def leave(self, model: Model) -> None:
        """See `Policy.leave`."""
        if self._steps > 0:
            self._push(model)
        if self.staleness is not None:
            self._shards.count(None)

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: what the shards hold, once all have pushed."""
        self.leave(model)
        wait_for_trainers(model, "pushed")
        self._fetch(model)
        model.communicator.barrier(f"{model.key}.fetched")
        self._pushes = 0
        self._shards.count(0)
        self._shards.flush()
        model.communicator.barrier(f"{model.key}.counted")

    def _push(self, model: Model) -> None:
        """A push that an error has ended half-way is not pushed again."""
        self._pushes += 1
        self._steps = 0
        if self.rule == "sgd":
            parameters = model.parameters
            for name, before in self._pending.items():
                before -= parameters[name]  # the change, but for its sign
            try:
                self._shards.push(self._pending, 1.0)
            finally:
                for name, before in self._pending.items():
                    before[...] = parameters[name]
        elif self._has_gradients:
            self._has_gradients = False
            rate = model.learning_rate if self.lr is None else self.lr
            try:
                self._shards.push(self._pending, rate)
            finally:
                for gradient in self._pending.values():
                    gradient[...] = 0

    def _fetch(self, model: Model) -> None:
        """What is not pushed yet stays to be pushed."""
        parameters = model.parameters
        if self.rule != "sgd":
            self._shards.fetch(parameters)
            return
        for name, before in self._pending.items():
            before -= parameters[name]
        try:
            self._shards.fetch(parameters)
        finally:
            for name, before in self._pending.items():
                before += parameters[name]

    def __repr__(self) -> str:
        return (
            f"ParameterServer(servers={self.servers!r}, push_every={self.push_every}, "
            f"fetch_every={self.fetch_every}, rule={self.rule!r}, staleness={self.staleness}, "
            f"lr={self.lr})"
        )
