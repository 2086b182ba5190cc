"""DistributedOptimizer(policy=...): what policies see of torch's optimizers."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch

import ringdl
from ringdl._training import agreeing
from ringdl._training.following import Following as _Following
from ringdl._training.following import Model
from ringdl.policies import ParameterServer, Policy
from ringdl.policies._policy import Array
from ringdl.policies._server import check_options
from ringdl.torch._compiled import uncompiled
from ringdl.torch._state import HOW_TO_MEND
from ringdl.torch._wrapped import Unaveraged, wrap

NamedParameters = list[tuple[str, torch.Tensor]]


class OptimizerModel(Model):
    """An optimizer of torch and its parameters, in the CPU's memory, of which arrays are views.

    Args:
        optimizer: a bare one.
        named: its parameters, in the same order on every rank.
        communicator: the ranks.

    Raises:
        UsageError: a parameter lies elsewhere, or is not floating-point.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: NamedParameters,
        communicator: ringdl.Communicator,
    ) -> None:
        super().__init__(communicator)
        self.has_closure = False
        """Whether the current step computes gradients itself."""
        self._optimizer, self._named = weakref.ref(optimizer), named  # it owns this one
        for name, parameter in named:
            if parameter.device.type != "cpu" or not _is_fit(parameter):
                raise ringdl.UsageError(
                    f"the parameter {name!r} is {parameter.dtype} on {parameter.device}; policies "
                    "that do not average gradients are for floating-point parameters in the CPU's "
                    "memory"
                )

    def read_parameters(self) -> Mapping[str, Array]:
        """See `Model`."""
        return {name: in_numpy(parameter) for name, parameter in self._named}

    def read_gradients(self) -> Mapping[str, Array | None]:
        """See `Model`."""
        if self.has_closure:
            raise ringdl.UsageError(
                "step(closure) computes gradients inside of the step, and the policy needs them "
                "before; call backward(), and step() without a closure"
            )
        owner = self._owner()
        if getattr(owner, "grad_scale", None) is not None:
            raise ringdl.UsageError(
                "the GradScaler leaves it to this fused optimizer to divide gradients by its "
                "scale, and the policy needs them before; call scaler.unscale_(optimizer) before "
                "scaler.step(optimizer)"
            )
        if bool(getattr(owner, "found_inf", None)):  # the optimizer leaves the step out
            return dict.fromkeys((name for name, _ in self._named), None)
        for name, parameter in self._named:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ringdl.UsageError(
                    f"the gradient of {name!r} is sparse, and this policy takes dense ones; make "
                    "the embedding without sparse=True"
                )
        return {
            name: None if parameter.grad is None else in_numpy(parameter.grad)
            for name, parameter in self._named
        }

    def read_state(self) -> Mapping[str, Array]:
        """See `Model`."""
        state = self._owner().state
        return {
            f"{key} of {name}": in_numpy(value)
            for name, parameter in self._named
            for key, value in sorted(state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor) and value.device.type == "cpu" and _is_fit(value)
        }

    def reset_state(self) -> None:
        """See `Model`."""
        its = self._owner()
        its.state.clear()
        if isinstance(its, torch.optim.Adagrad):  # the only one with state before its first step
            groups = [dict(group) for group in its.param_groups]
            taken = inspect.signature(torch.optim.Adagrad).parameters  # a subclass may have more
            defaults = {name: value for name, value in its.defaults.items() if name in taken}
            its.state.update(torch.optim.Adagrad(groups, **defaults).state)

    @property
    def learning_rate(self) -> float:
        """See `Model`."""
        rates = {float(group["lr"]) for group in self._owner().param_groups}
        if len(rates) > 1:
            raise ringdl.UsageError(
                f"the parameter groups have the learning rates {sorted(rates)}, and the policy "
                "takes one; pass it its lr"
            )
        return rates.pop()

    def _owner(self) -> torch.optim.Optimizer:
        owner = self._optimizer()
        assert owner is not None  # it is in its step()
        return owner


def _is_fit(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and (tensor.is_floating_point() or tensor.is_complex())


def in_numpy(tensor: torch.Tensor) -> Array:
    """The same memory, as an array; pairs of real numbers for complex ones."""
    detached = tensor.detach()
    if detached.is_complex():
        detached = torch.view_as_real(detached)
    if detached.dtype == torch.bfloat16:
        import ml_dtypes

        array: Array = detached.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array
    return detached.numpy()


class Following(Unaveraged):
    """Steps on its own gradients; then ranks exchange what the policy says."""

    _ringdl_following: _Following
    _ringdl_model: OptimizerModel

    def _ringdl_unwrap(self) -> None:
        self._ringdl_following.end()


def follow(
    optimizer: torch.optim.Optimizer,
    policy: Policy,
    named: NamedParameters,
    communicator: ringdl.Communicator,
    check_replicas: bool,
) -> tuple[_Following, OptimizerModel]:
    """What drives a policy by the optimizer's steps. Collective.

    Raises:
        UsageError: see `OptimizerModel`; the other ranks get a MismatchError.
        MismatchError: on every rank, if policies or parameters differ.
    """
    with agreeing(communicator):
        if isinstance(policy, ParameterServer) and policy.rule != "sgd":
            for group in optimizer.param_groups:
                check_options(
                    policy.rule, {name: group.get(name) for name in ("maximize", "weight_decay")}
                )
        model = OptimizerModel(optimizer, named, communicator)
    return _Following(policy, model, HOW_TO_MEND, check_replicas), model


def follow_steps(
    optimizer: torch.optim.Optimizer,
    following: _Following,
    model: OptimizerModel,
    named: NamedParameters,
) -> None:
    """Change the optimizer's class, for a policy that averages no gradients."""
    optimizer._ringdl_following = following  # type: ignore[attr-defined]
    optimizer._ringdl_model = model  # type: ignore[attr-defined]
    wrap(optimizer, Following, named, _before_step, _after_step)


@uncompiled
def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    assert isinstance(optimizer, Following)
    optimizer._ringdl_refuse_unfrozen("exchanged")
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    optimizer._ringdl_model.has_closure = callable(closure)
    optimizer._ringdl_following.before_step()


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    assert isinstance(optimizer, Following)
    optimizer._ringdl_following.after_step()
