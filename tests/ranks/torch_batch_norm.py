"""SyncBatchNorm against one process with the whole batch."""

from __future__ import annotations

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import expect, needs
from tests.ranks.torch_helpers import assert_close, assert_same_bits, part, wrap

SHAPES = ((24, 5), (24, 5, 7), (24, 5, 3, 4), (24, 5, 2, 3, 2))
PLAIN = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}


def plain_of(shape: tuple[int, ...], **options: object) -> torch.nn.Module:
    return PLAIN.get(len(shape), torch.nn.BatchNorm3d)(5, **options).double()


def check_against_one_process() -> None:
    for shape in SHAPES:
        for options in ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False}):
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 100
            weights = torch.randn(shape, generator=generator, dtype=torch.float64)
            plain = plain_of(shape, **options)
            layer = hvd.SyncBatchNorm(5, **options).double()
            whole, own = x.clone().requires_grad_(), part(x).clone().requires_grad_()
            for _ in range(2):
                expected = plain(whole)
                result = layer(own)
                torch.testing.assert_close(result, part(expected), rtol=1e-9, atol=1e-9)
            (expected * weights).sum().backward()
            (result * part(weights)).sum().backward()
            assert whole.grad is not None
            torch.testing.assert_close(own.grad, part(whole.grad), rtol=1e-9, atol=1e-11)
            for name, parameter in plain.named_parameters():
                own_gradient = dict(layer.named_parameters())[name].grad
                total = ringdl.allreduce(own_gradient, ringdl.Sum)
                torch.testing.assert_close(total, parameter.grad, rtol=1e-9, atol=1e-9)
            for name, buffer in plain.named_buffers():
                torch.testing.assert_close(dict(layer.named_buffers())[name], buffer)
            assert_same_bits(layer.buffers())
            plain.eval()
            layer.eval()
            torch.testing.assert_close(layer(part(x)), plain(x).chunk(hvd.size())[hvd.rank()]) if (
                plain.track_running_stats
            ) else None


def check_uneven_batches() -> None:
    """Rank 0 has none."""
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return
    x = torch.arange(6.0 * (size - 1)).reshape(-1, 2).sin()
    layer, plain = hvd.SyncBatchNorm(2), torch.nn.BatchNorm1d(2)
    own = x[3 * (rank - 1) : 3 * rank] if rank > 0 else x[:0]
    result, expected = layer(own), plain(x)
    if rank > 0:
        torch.testing.assert_close(result, expected[3 * (rank - 1) : 3 * rank])
    result.sum().backward()
    torch.testing.assert_close(layer.running_var, plain.running_var)
    half = layer(torch.randn(4, 2, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16


def check_conversion_and_training() -> None:
    """A converted model learns what one process learns."""

    def make() -> torch.nn.Module:
        torch.manual_seed(2)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3),
            torch.nn.Sequential(torch.nn.BatchNorm2d(4), torch.nn.ReLU()),
            torch.nn.Flatten(),
            torch.nn.Linear(4 * 16, 3),
            torch.nn.BatchNorm1d(3),
        ).double()

    reference = make()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(make())
    assert sum(isinstance(layer, hvd.SyncBatchNorm) for layer in model.modules()) == 2
    assert model.state_dict().keys() == reference.state_dict().keys()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        x = torch.randn(24, 1, 6, 6, generator=generator, dtype=torch.float64)
        y = torch.randn(24, 3, generator=generator, dtype=torch.float64)
        for one, its, inputs, targets in (
            (model, optimizer, part(x), part(y)),
            (reference, plain, x, y),
        ):
            its.zero_grad()
            torch.nn.functional.mse_loss(one(inputs), targets).backward()
            its.step()
    assert_close(model, reference)
    for own, other in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(own, other)


def check_a_layer_more_on_one_rank() -> None:
    """Layers are matched by the order of their calls, not of their construction."""
    if hvd.rank() == 0:
        hvd.SyncBatchNorm(3)
    layer = hvd.SyncBatchNorm(3)
    layer(torch.ones(2, 3) * hvd.rank())
    torch.testing.assert_close(layer.running_mean, torch.full((3,), 0.1 * (hvd.size() - 1) / 2))


@needs(ranks=2)
def check_refusals() -> None:
    layer = hvd.SyncBatchNorm(3)
    with expect(ringdl.UsageError, "takes (batch, 3, ...), not (3,)"):
        layer(torch.zeros(3))
    with expect(ringdl.UsageError, "more than one value per channel"):
        layer(torch.zeros(1 if hvd.rank() == 0 else 0, 3))
