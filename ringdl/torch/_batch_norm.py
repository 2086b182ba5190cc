"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

import ringdl
from ringdl._training.process_sets import AnySet, communicator_of, global_process_set
from ringdl.torch._compiled import uncompiled

_NAME = "ringdl.SyncBatchNorm"
"""What the collectives of all layers are matched by, in the order of the calls."""


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """``torch.nn.BatchNorm1d``, ``2d`` or ``3d`` whose statistics are those of all ranks' batches.

    In training each forward gathers a mean and a sum of squares per channel and rank, in float64,
    and combines them in the order of the ranks, so that the running statistics have the same bits
    everywhere; each backward adds up two sums per channel. Batches may differ in length, and be
    empty on some ranks. Otherwise like the single-process layers; ranks call them in the same
    order.

    Args:
        num_features: channels: the extent of axis 1.
        eps: as in ``torch.nn.BatchNorm1d``, as are the others.
        process_set: whose ranks share statistics.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: AnySet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: AnySet = global_process_set
    ) -> torch.nn.Module:
        """A model with its batch normalization layers, at any depth, replaced by these.

        Layers keep their parameters and statistics. Call it before the optimizer is made.
        """
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(
            module, cls
        ):
            layer = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            layer.__dict__.update(
                {key: vars(module)[key] for key in ("_parameters", "_buffers", "training")}
            )
            return layer
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ringdl.UsageError(
                f"SyncBatchNorm({self.num_features}) takes (batch, {self.num_features}, ...), not "
                f"{tuple(input.shape)}"
            )

    @uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """The normalized batch; collective in training."""
        self._check_input_dim(input)
        communicator = communicator_of(self.process_set) if self.training else None
        if communicator is None or communicator.size == 1:
            local: torch.Tensor = super().forward(input)
            return local
        result: torch.Tensor
        result, mean, variance, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, communicator
        )
        if self.track_running_stats:
            self._track(mean, variance, int(count))
        return result

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        with torch.no_grad():
            for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
                running.copy_((1 - factor) * running.double() + factor * new)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        communicator: ringdl.Communicator,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, variance, count = _statistics(x, communicator)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, bias, mean, scale)
        ctx.call = (count, communicator)
        wide = _wide(x.dtype)
        factor = scale if weight is None else scale * weight.double()
        result = (x.to(wide) - _along(mean, x).to(wide)) * _along(factor, x).to(wide)
        if bias is not None:
            result += _along(bias, x).to(wide)
        number = torch.tensor(count, device="cpu")
        ctx.mark_non_differentiable(mean, variance, number)
        return result.to(x.dtype), mean, variance, number

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        count, communicator = ctx.call
        wide = _wide(x.dtype)
        gradient = gradient.to(wide)
        deviation = x.to(wide) - _along(mean, x).to(wide)
        axes = _axes(x)
        own = torch.stack([gradient.double().sum(axes), (gradient * deviation).double().sum(axes)])
        weight_gradient = None if weight is None else (own[1] * scale).to(weight.dtype)
        bias_gradient = None if bias is None else own[0].to(bias.dtype)
        means = communicator.allreduce(own, ringdl.Sum, f"{_NAME}.gradient") / max(count, 1)
        factor = scale if weight is None else scale * weight.double()
        gradient = gradient - _along(means[0], x).to(wide)
        gradient -= deviation * _along(means[1] * scale * scale, x).to(wide)
        gradient *= _along(factor, x).to(wide)
        return gradient.to(x.dtype), weight_gradient, bias_gradient, None, None


def _statistics(
    x: torch.Tensor, communicator: ringdl.Communicator
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and variance (by the count) of each channel over all ranks, in float64, and the count.

    Parts are combined as by Chan, Golub and LeVeque (1983), "Algorithms for Computing the Sample
    Variance".
    """
    channels = x.shape[1]
    count = x.numel() // max(channels, 1)
    values = x.detach().double()
    mean = values.sum(_axes(x)) / max(count, 1)
    squares = (values - _along(mean, x)).square().sum(_axes(x))
    own = torch.cat([mean.new_full((1,), float(count)), mean, squares])
    total = 0.0
    mean, squares = mean.new_zeros(2, channels)
    rows = communicator.allgather(own[None], _NAME)
    for row, number in zip(rows, rows[:, 0].tolist(), strict=True):
        if number == 0:
            continue
        difference = row[1 : 1 + channels] - mean
        squares = (
            squares + row[1 + channels :] + difference**2 * (total * number / (total + number))
        )
        mean = mean + difference * (number / (total + number))
        total += number
    if total < 2:
        raise ringdl.UsageError(
            f"SyncBatchNorm needs more than one value per channel in training, not {int(total)}"
        )
    return mean, squares / total, int(total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What elements are computed in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _axes(x: torch.Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


def _along(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values of channels as an array that broadcasts over x."""
    return channels.reshape(1, -1, *[1] * (x.dim() - 2))
