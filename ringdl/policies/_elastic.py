"""Parameters of each rank, held together by a center."""

from __future__ import annotations

from ringdl._errors import UsageError
from ringdl.policies._averaging import check_count
from ringdl.policies._policy import Model, Policy
from ringdl.policies._shards import Shards, wait_for_trainers


class EASGD(Policy):
    """Ranks train by themselves, and every few steps each is drawn towards a center, and draws it.

    Elastic averaging (Zhang, Choromanska and LeCun 2015), asynchronously: nobody waits for anybody.
    Parameters of ranks explore around the center, which lies in shards as those of
    `ParameterServer` do. Ranks may make different numbers of steps, and none: see there.

    Args:
        every: so many steps are made between two times.
        alpha: the share of their difference by which both move; by default 0.9 divided by the
            number of ranks.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(self, every: int, alpha: float | None = None) -> None:
        check_count("every", every)
        if alpha is not None and not 0 < alpha <= 1:
            raise UsageError(f"alpha is {alpha!r}; pass a share, above 0 and at most 1")
        self.every, self.alpha = every, alpha

    def attach(self, model: Model) -> None:
        """See `Policy.attach`."""
        self._shards = Shards(model)

    def start_over(self, model: Model) -> None:
        """See `Policy.start_over`."""
        self._shards.fill(model)

    def after_step(self, model: Model) -> None:
        """See `Policy.after_step`."""
        if model.step % self.every == 0:
            share = 0.9 / model.communicator.size if self.alpha is None else self.alpha
            self._shards.pull(model.parameters, share)

    def leave(self, model: Model) -> None:
        """See `Policy.leave`: the center stays."""

    def synchronize(self, model: Model) -> None:
        """See `Policy.synchronize`: the center."""
        wait_for_trainers(model, "pulled")
        self._shards.fetch(model.parameters)
        model.communicator.barrier(f"{model.key}.fetched")

    def __repr__(self) -> str:
        return f"EASGD(every={self.every}, alpha={self.alpha})"
