"""Policies where a framework hands over its arrays for each call, and holds them by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ringdl
from ringdl._training.following import Following, Model
from ringdl.policies import Policy
from ringdl.policies._policy import Array


class Handed:
    """A policy for one optimizer.

    Args:
        policy: when ranks exchange what.
        communicator: the ranks.
        how_to_mend: what to do if parameters differ at the first step.
    """

    def __init__(self, policy: Policy, communicator: ringdl.Communicator, how_to_mend: str) -> None:
        self.policy, self.communicator = policy, communicator
        self._how_to_mend = how_to_mend
        self._model = _Model(communicator)
        self._following: Following | None = None
        self._of: Any = None
        """What the parameters are called, and their shapes."""
        self._number: int | None = None
        self._step: int | None = None
        self._epoch = communicator.epoch

    def carry_out(
        self,
        when: str,
        arrays: Mapping[str, Mapping[str, Array]],
        number: int | None = None,
        step: int | None = None,
    ) -> None:
        """Call the policy, which changes arrays in place. Collective, as the policy is.

        Args:
            when: "before" a step, or "after" it.
            arrays: "gradients" (before), "parameters" and "state", each by name.
            number: which network they are of, where names do not tell (before).
            step: how many steps their optimizer's state has seen, where it tells (before).

        Raises:
            UsageError: they are of another network than before, or of another step than the one
                that follows.
        """
        self._follow()
        if number is not None and self._number not in (None, number):
            raise ringdl.UsageError(
                "the optimizer's state is of another call of init() than that of its first step, "
                "and an optimizer with a policy steps one network; make an optimizer, and a "
                "policy, for each, or, to train the same one anew, call "
                "ringdl.policies.start_over(optimizer) first"
            )
        if step is not None and self._step not in (None, step):
            raise ringdl.UsageError(
                f"the optimizer's state has seen {step} steps, and its policy {self._step}: what "
                "an update has returned was thrown away, as optax.MultiSteps and apply_if_finite "
                "do (put them inside: DistributedOptimizer(optax.MultiSteps(...), policy=...)), or "
                "a state was loaded (call ringdl.policies.start_over(optimizer) then)"
            )
        self._number = self._number if number is None else number
        self._step = self._step if step is None else step + 1
        self._model.now = arrays
        try:
            if when == "before":
                self._driven().before_step()
            else:
                self._driven().after_step()
        finally:
            self._model.now = {}

    def synchronize(self, parameters: Mapping[str, Array]) -> None:
        """See `ringdl.policies.synchronize`; the arrays are changed in place."""
        self._model.now = {"parameters": parameters, "state": {}}
        try:
            self._driven().synchronize()
        finally:
            self._model.now = {}

    def start_over(self) -> None:
        """See `ringdl.policies.start_over`."""
        self._number = self._step = None
        if self._following is not None:
            self._following.start_over()

    def _follow(self) -> None:
        """After another `ringdl.init` some ranks may be new, so all begin as at first."""
        if self._epoch != self.communicator.epoch:
            self._epoch = self.communicator.epoch
            self._following = self._number = self._step = None

    def _driven(self) -> Following:
        self._follow()
        if self.communicator.size > 1:  # else nothing is handed over
            its = {name: array.shape for name, array in self._model.now["parameters"].items()}
            if self._following is None:
                self._of = its
            elif self._of != its:
                raise _another_network()
        if self._following is None:
            self._following = Following(self.policy, self._model, self._how_to_mend, averages=True)
        return self._following


def _another_network() -> ringdl.UsageError:
    return ringdl.UsageError(
        "an optimizer with a policy steps one network, and these parameters are not those of its "
        "first step; make an optimizer, and a policy, for each"
    )


class _Model(Model):
    """What policies see: the arrays of the current call."""

    def __init__(self, communicator: ringdl.Communicator) -> None:
        super().__init__(communicator)
        self.now: Mapping[str, Mapping[str, Array]] = {}

    def read_parameters(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._read("parameters")

    def read_gradients(self) -> Mapping[str, Array | None]:
        """See `Model`."""
        its = self._read("gradients")
        return {name: its.get(name) for name in self._read("parameters")}

    def read_state(self) -> Mapping[str, Array]:
        """See `Model`."""
        return self._read("state")

    def reset_state(self) -> None:
        """See `Model`."""
        raise ringdl.UsageError(
            "the optimizer's state is not reset here; pass optimizer_state='average' or 'keep'"
        )

    def _read(self, what: str) -> Mapping[str, Array]:
        if what not in self.now:
            raise ringdl.UsageError(
                f"a policy has no {what} here: the framework hands them over for each step"
            )
        return self.now[what]
