"""What a policy is, and what it sees of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ringdl._communicator import Communicator

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


class Model(Protocol):
    """What a policy sees of one optimizer and of what it trains, on this rank.

    Arrays are NumPy's. What a policy writes into them has reached the framework's own once its
    method has returned; so ask for arrays in each call anew, and keep none. Their names and shapes
    are the same on all ranks, and they are in the same order.

    Attributes:
        communicator: the ranks that train together.
        key: begins the names of messages and collectives that belong to this model alone.
        step: how many steps of the optimizer have ended, since all ranks last joined.
    """

    communicator: Communicator
    key: str
    step: int

    @property
    def parameters(self) -> Mapping[str, Array]:
        """The trained parameters, in any call."""

    @property
    def gradients(self) -> Mapping[str, Array | None]:
        """In `Policy.before_step`: this rank's gradients, None where there is none."""

    @property
    def state(self) -> Mapping[str, Array]:
        """The floating-point arrays of the optimizer's state, as momentum, that there are now.

        A rank may have more of them than another, where a gradient was missing.
        """

    def reset_state(self) -> None:
        """Make the optimizer forget its state: it begins as a new one."""

    @property
    def learning_rate(self) -> float:
        """The optimizer's, as it is now."""


class Policy:
    """When ranks exchange what in training. Derive from it for one of your own.

    `DistributedOptimizer(optimizer, policy=...)` calls these methods on all ranks; a policy belongs
    to one optimizer. Its ``repr`` says what it is: ranks whose policies differ in it get a
    MismatchError. With one rank nothing is to be done: the optimizer is then as if it were bare.

    What a method raises on one rank is raised there, from the optimizer's step.
    """

    def averages_gradients(self, step: int) -> bool:
        """Whether ranks average their gradients in the step after so many; the same on all.

        Where they do, `before_step` sees averages. Once it says no, it does not say yes again.
        """
        del step
        return False

    def attach(self, model: Model) -> None:
        """When the optimizer is wrapped, and after each `ringdl.init`. Collective.

        The place for what all ranks have to make together; parameters may still be overwritten.

        Raises:
            UsageError: the policy is not for this model or for these ranks; on all of them.
        """

    def before_step(self, model: Model) -> None:
        """The gradients of a step are there; what is written into them is what the step uses."""

    def after_step(self, model: Model) -> None:
        """The optimizer has changed the parameters, and counted the step."""

    def count_alone(self, step: int) -> None:
        """There is one rank, which has made so many steps: nothing is exchanged."""

    def leave(self, model: Model) -> None:
        """This rank has no batch left: it has called ``join()``, and will wait for the others.

        Of a policy that has this method, `synchronize` is called after a join, too. For others all
        ranks get the parameters of the one that joined last.
        """

    def start_over(self, model: Model) -> None:
        """Training begins: before the first step, and before the first one after a join.

        The parameters of all ranks are the same now; steps count from 0.
        """

    def synchronize(self, model: Model) -> None:
        """Make the parameters of all ranks the same, to evaluate or save them. Collective."""
