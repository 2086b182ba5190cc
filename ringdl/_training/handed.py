"""Policies where a framework hands over its arrays for each call, and holds them by itself."""

from __future__ import annotations

from collections.abc import Mapping

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

    def carry_out(self, when: str, arrays: Mapping[str, Mapping[str, Array]]) -> None:
        """Call the policy, which changes arrays in place. Collective, as the policy is.

        Args:
            when: "before" a step, or "after" it.
            arrays: "gradients" (before), "parameters" and "state", each by name.
        """
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
        self._model.now = {"parameters": parameters}
        try:
            self._driven().synchronize()
        finally:
            self._model.now = {}

    def _driven(self) -> Following:
        if self._following is None:
            self._following = Following(self.policy, self._model, self._how_to_mend, averages=True)
        return self._following


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
        return self._read("gradients")

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
