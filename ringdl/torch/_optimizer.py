"""DistributedOptimizer: a script's optimizer, stepping on gradients averaged over all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

import ringdl
from ringdl._training import Gradients, agreeing
from ringdl._training.compression import AnyCompression, wire_of
from ringdl._training.following import Following
from ringdl._training.options import check_passes, check_policy, check_reduction
from ringdl._training.process_sets import (
    AnySet,
    ProcessSet,
    communicator_of,
    global_process_set,
)
from ringdl.policies import Policy
from ringdl.torch._adasum import Changes, combine_steps
from ringdl.torch._closure import reduced_closure
from ringdl.torch._compiled import leave_uncompiled, uncompiled
from ringdl.torch._compression import Compression
from ringdl.torch._gradients import Hooks, ParameterGradients, find_owner
from ringdl.torch._policies import follow, follow_steps
from ringdl.torch._state import HOW_TO_MEND, check_parts, refuse_parts, replicas_of
from ringdl.torch._wrapped import Alone, Wrapped, unwrap, wrap

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)
NamedParameters = list[tuple[str, torch.Tensor]]


def DistributedOptimizer(  # noqa: N802 (the name that training scripts use)
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: AnyCompression = Compression.none,
    backward_passes_per_step: int = 1,
    op: ringdl.Reduction | ringdl.AdasumOp = ringdl.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: AnySet = global_process_set,
    check_replicas: bool = True,
    policy: Policy | None = None,
) -> AnyOptimizer:
    """Make an optimizer average its gradients over all ranks. Collective.

    Returns the very same object, its class changed to a subclass: learning-rate schedulers, hooks
    and references made before stay valid, and ``state_dict()`` is what it was. An optimizer may be
    wrapped again, and so may its parameters, in another one: that replaces the earlier wrapper,
    whose ``step()`` is then refused. So a notebook's cell can run twice. Gradients are averaged
    when ``backward()`` returns, so clipping needs no extra call. ``step()`` joins the averaging on
    a rank that had no backward (its gradients count as zeros), and averages what fewer passes than
    ``backward_passes_per_step`` have left: where that may be, call ``synchronize()`` on all ranks
    before gradients are clipped or unscaled. The first ``step()`` compares the parameters of all
    ranks. A gradient that no rank produced stays None.

    A second backward before ``step()`` adds to the averaged gradients and averages again; with
    ``op=Sum`` that counts the earlier ones once per rank, so accumulate under ``no_sync()`` there.
    Ranks that run a backward at all must run the same number of them between two steps, and step
    equally often: else the gradients of different steps meet, which is a MismatchError.

    ``step(closure)`` gives the optimizer the loss of all ranks, reduced as the gradients are, and
    returns it: a line search takes the same decisions everywhere.

    Sparse gradients (``nn.Embedding(sparse=True)``) stay sparse: the rows of all ranks are gathered
    and added up, and become ``.grad`` as a coalesced tensor. Which parameters have them is found
    when the first one appears; then those move out of the buckets, and the others' views move.

    The optimizer gains ``synchronize()``, ``skip_synchronize()``, ``no_sync()`` and ``replan()``.

    Args:
        optimizer: any torch.optim.Optimizer, over parameters on the CPU or on CUDA devices. Those
            that do not require gradients now take no part.
        named_parameters: ``model.named_parameters()``, in the same order on every rank; may hold
            more than the optimizer's. By default names are made from the parameter group and the
            position in it.
        compression: ``Compression.bf16`` or ``.fp16``: what float32 gradients travel as between
            hosts, half as many bytes; sums are formed in float32.
        backward_passes_per_step: average only once in this many backward passes; gradients are
            summed over them.
        op: Average or Sum. Or Adasum: each rank steps on its own gradients, and what the steps
            have changed is combined, parameter by parameter (see `ringdl.AdasumOp`); a learning
            rate for one rank then serves many.
        gradient_predivide_factor: gradients are divided by it before they are summed, and the
            averages multiplied by it: so that sums of 16-bit gradients stay in range. For Average.
        num_groups: accepted, but without effect, like `groups`: the buckets decide which gradients
            travel together, which does not change any value.
        groups: as `num_groups`.
        sparse_as_dense: average sparse gradients as dense ones, like all others. They stay dense,
            but for SparseAdam, which takes sparse ones only.
        process_set: whose ranks average: a `ProcessSet` or a `ringdl.Communicator`. On a rank that
            is not in the process set nothing is averaged.
        check_replicas: whether the first ``step()`` compares the parameters of all ranks; the same
            on all of them. RINGDL_CHECK_REPLICAS=0 says no for all optimizers.
        policy: when ranks exchange what: one of `ringdl.policies`, by default ``AllReduce()``, all
            that is said above. With others gradients are each rank's own, and the arguments that
            say how gradients are averaged keep their defaults.

    Raises:
        UsageError: if names are duplicate or missing, or another argument is wrong; the other ranks
            get a MismatchError.
        MismatchError: on every rank, if the parameters' names, shapes, dtypes or order differ.
    """
    is_alone = isinstance(process_set, ProcessSet) and process_set.included() is False
    with (
        nullcontext()  # then the others make no call here that could wait for this one
        if is_alone or isinstance(op, ringdl.AdasumOp)
        else agreeing(communicator_of(process_set))
    ):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ringdl.UsageError(
                "DistributedOptimizer wraps a torch.optim.Optimizer, not a "
                f"{type(optimizer).__name__}"
            )
        check_reduction(op, gradient_predivide_factor, ringdl.Adasum)
        check_passes(backward_passes_per_step)
        policy = check_policy(policy, op, wire_of(compression), gradient_predivide_factor)
        _refuse_groups(num_groups, groups)
        named = _name_parameters(optimizer, named_parameters)
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not (trained or is_alone or isinstance(op, ringdl.AdasumOp)):
            raise ringdl.UsageError(
                "no parameter of this optimizer requires a gradient, so there is nothing to average"
            )
        if not is_alone:
            refuse_parts(named, communicator_of(process_set))
    unwrap(optimizer)
    if is_alone:
        wrap(optimizer, Alone, named)
        return optimizer
    following = None
    if policy is not None:
        ranks = communicator_of(process_set)
        following, model = follow(optimizer, policy, trained, ranks, check_replicas)
        if not following.averages_gradients:
            _replace(trained)
            follow_steps(optimizer, following, model, named)
            return optimizer
    if isinstance(op, ringdl.AdasumOp):
        _replace(named)
        changes = Changes(named, wire_of(compression), communicator_of(process_set), check_replicas)
        combine_steps(optimizer, changes)
        return optimizer
    _replace(trained)
    takes_sparse_only = isinstance(optimizer, torch.optim.SparseAdam)
    with agreeing(communicator_of(process_set)):
        store = ParameterGradients(trained, sparse_as_dense, takes_sparse_only)
    gradients = Gradients(
        store,
        op,
        wire_of(compression),
        backward_passes_per_step,
        communicator_of(process_set),
        gradient_predivide_factor,
        check_replicas,
    )
    gradients.following = following
    optimizer._ringdl_gradients = gradients  # type: ignore[attr-defined]
    optimizer._ringdl_backward = Hooks(gradients, store)  # type: ignore[attr-defined]
    optimizer._ringdl_following = following  # type: ignore[attr-defined]
    wrap(optimizer, Distributed, named, _before_step, _after_step)
    return optimizer


class Distributed(Wrapped):
    """Averages gradients before each step."""

    _ringdl_gradients: Gradients[torch.Tensor]
    _ringdl_backward: Hooks
    _ringdl_following: Following | None
    _ringdl_skips = False
    _ringdl_is_synchronized = False
    _ringdl_has_warned = False

    def _ringdl_unwrap(self) -> None:
        self._ringdl_backward.replace()
        if self._ringdl_following is not None:
            self._ringdl_following.end()

    @property
    def _ringdl_averages(self) -> bool:
        following = self._ringdl_following
        return following is None or following.averages_gradients

    def synchronize(self) -> None:
        """Average what ``backward()`` has not averaged yet. Collective."""
        if self._ringdl_averages:
            self._ringdl_gradients.synchronize()
            self._ringdl_is_synchronized = True

    def replan(self) -> None:
        """Put gradients into buckets in the order in which rank 0's first backward made them.

        At first they are in the reverse order of registration. If a model uses its layers in
        another order, little is averaged while ``backward()`` runs. Call it on all ranks after the
        first ``step()``; the views move. Sums of floats may be rounded differently from then on.
        Collective.

        Raises:
            UsageError: there was no backward, or gradients are being averaged.
        """
        self._ringdl_gradients.replan()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` in this context averages nothing (after ``synchronize()``)."""
        self._ringdl_skips = True
        try:
            yield
        finally:
            self._ringdl_skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Average only once in this many backward passes from now on; the same on all ranks."""
        check_passes(passes)
        self._ringdl_gradients.set_passes_per_round(passes)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """``backward()`` here adds to local gradients; the next one outside averages the sum."""
        with self._ringdl_gradients.local():
            yield

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients; a rank without a backward after it joins in ``step()``."""
        self._ringdl_gradients.end_failed_pass()  # before what is in flight is written into
        super().zero_grad(*args, **kwargs)
        self._ringdl_gradients.expect_round()


leave_uncompiled(Distributed)


def _warn_of_synchronize(optimizer: Distributed) -> None:
    """Once: scripts that change gradients between the two mean to skip the second averaging."""
    was_synchronized, optimizer._ringdl_is_synchronized = optimizer._ringdl_is_synchronized, False
    if was_synchronized and not optimizer._ringdl_skips and not optimizer._ringdl_has_warned:
        optimizer._ringdl_has_warned = True
        warnings.warn(
            "optimizer.step() called without optimizer.skip_synchronize() after "
            "optimizer.synchronize(): gradients are averaged already, and are not averaged again; "
            "say so with `with optimizer.skip_synchronize(): optimizer.step()`, or leave "
            "synchronize() out",
            UserWarning,
            stacklevel=4,
        )


def _refuse_groups(num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None) -> None:
    if num_groups < 0 or (isinstance(groups, int) and groups < 0):
        raise ringdl.UsageError("num_groups and groups are numbers of groups: at least 0")
    if groups is None or isinstance(groups, int):
        return
    listed = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in listed):
        raise ringdl.UsageError("groups is a number, or a list of lists of parameters")
    if len({id(parameter) for parameter in listed}) < len(listed):
        raise ringdl.UsageError("groups holds a parameter twice; each belongs to one group")


@uncompiled
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Runs first in ``step()``, also where a scheduler has replaced ``step`` on the instance."""
    assert isinstance(optimizer, Distributed)
    gradients = optimizer._ringdl_gradients
    gradients.refuse_replaced()
    _warn_of_synchronize(optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):  # something that this optimizer's step takes
        closure = None
    averages = optimizer._ringdl_averages and not optimizer._ringdl_skips
    if averages and (gradients.is_pending or closure is None):
        gradients.synchronize()
    optimizer._ringdl_refuse_unfrozen("averaged")
    if optimizer._ringdl_following is None:
        check_parts(optimizer._ringdl_named_parameters, gradients)
        gradients.check_replicas(replicas_of(optimizer._ringdl_named_parameters), HOW_TO_MEND)
    else:
        optimizer._ringdl_following.before_step()
    if closure is None or not optimizer._ringdl_averages:
        return None
    reduced = reduced_closure(closure, gradients)
    if len(args) > 1:
        return (args[0], reduced, *args[2:]), kwargs
    return args, kwargs | {"closure": reduced}


@uncompiled
def _after_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert isinstance(optimizer, Distributed)
    optimizer._ringdl_gradients.finish_step()
    optimizer._ringdl_backward.come_last()
    if optimizer._ringdl_following is not None:
        optimizer._ringdl_following.after_step()


def _name_parameters(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> NamedParameters:
    """The optimizer's parameters, each once; in the order of ``named_parameters``, if given."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if named_parameters is None:
        named = [
            (f"group{group_index}.{index}", parameter)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        ]
    else:
        named = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
        if not all(
            isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
            for pair in named
        ):
            raise ringdl.UsageError(
                "named_parameters must be (name, parameter) pairs, as model.named_parameters() is"
            )
    # A tied parameter may have several names; the first one stays.
    unique = {
        id(parameter): (name, parameter)
        for name, parameter in reversed(named)
        if id(parameter) in own
    }
    ordered = [unique.pop(id(parameter)) for _, parameter in named if id(parameter) in unique]
    twice = [name for name, count in Counter(name for name, _ in ordered).items() if count > 1]
    if twice:
        raise ringdl.UsageError(
            f"named_parameters gives the name {twice[0]!r} to different parameters"
        )
    unnamed = len(own) - len(ordered)
    if unnamed:
        raise ringdl.UsageError(
            f"named_parameters lacks {unnamed} of the optimizer's {len(own)} parameters"
        )
    return ordered


def _replace(named: NamedParameters) -> None:
    """A gradient lives in one bucket: earlier hooks stop averaging these parameters."""
    for _, parameter in named:
        owner = find_owner(parameter)
        if owner is not None:
            owner.replace(parameter)
