"""Complex parameters: P ranks with split batches are one process with whole batches."""

from __future__ import annotations

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import needs
from tests.ranks.torch_helpers import assert_close, assert_same_bits, part, whole_batch, wrap


class Filter(torch.nn.Module):
    """Complex matrices, one of them stored by columns, beside a real layer."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = torch.nn.Parameter(torch.randn(6, 5, dtype=dtype))
        self.columns = torch.nn.Parameter(torch.randn(3, 5, dtype=dtype).t())
        self.scalar = torch.nn.Parameter(torch.tensor(1 + 2j, dtype=dtype))
        self.real = torch.nn.Linear(3, 3, dtype=torch.zeros(0, dtype=dtype).real.dtype)

    def forward(self, inputs: torch.Tensor, is_scaled: bool = True) -> torch.Tensor:
        hidden = (inputs.to(self.rows.dtype) @ self.rows).tanh() @ self.columns
        hidden = hidden * self.scalar if is_scaled else hidden
        return self.real(hidden.abs()) + hidden.conj().imag


def loss_of(model: Filter, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(inputs) - targets).square().mean()


def check_complex_training() -> None:
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    ):
        for set_to_none in (True, False):
            model, reference = Filter(), Filter()
            optimizer, plain = make(model.parameters()), make(reference.parameters())
            wrap(optimizer, model)
            for step in range(3):
                inputs, targets = whole_batch(step)
                optimizer.zero_grad(set_to_none)
                plain.zero_grad(set_to_none)
                with optimizer.no_sync():
                    loss_of(model, part(inputs), part(targets)).backward()
                loss_of(model, part(inputs), part(targets)).backward()
                (2 * loss_of(reference, inputs, targets)).backward()
                assert model.columns.grad.stride() == model.columns.stride()
                torch.testing.assert_close(model.rows.grad, reference.rows.grad)
                optimizer.step()
                plain.step()
            assert_close(model, reference)
            assert_same_bits(model.parameters())


def check_sums_and_missing_gradients() -> None:
    """In single precision; the scalar is used on the last rank only."""
    model, size = Filter(torch.complex64), hvd.size()
    parameters = [*model.parameters()]
    last = hvd.rank() == size - 1
    for op in (hvd.Sum, hvd.Average):
        optimizer = wrap(torch.optim.SGD(parameters, lr=0.1), model, op=op)
        optimizer.zero_grad()
        inputs = whole_batch(0)[0].float()
        own = torch.autograd.grad(
            model(inputs, last).sum(), parameters, allow_unused=True, materialize_grads=True
        )
        divisor = size if op == hvd.Average else 1
        expected = [sum(hvd.allgather_object(gradient)) / divisor for gradient in own]
        model(inputs, last).sum().backward()
        for parameter, gradient in zip(parameters, expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        assert_same_bits(parameter.grad for parameter in parameters)
        optimizer.zero_grad()
        loss = model(inputs, False).sum()
        loss.backward()
        assert model.scalar.grad is None


def check_replicas_and_other_ways() -> None:
    """Adasum, rounded messages, and a state that is broadcast."""
    for options in (
        {"op": hvd.Adasum},
        {"op": hvd.Adasum, "compression": hvd.Compression.bf16},
        {"compression": hvd.Compression.fp16},
        {"gradient_predivide_factor": 4.0},
    ):
        model = Filter(torch.complex64)
        with torch.no_grad():
            model.rows += ringdl.rank()
        hvd.broadcast_parameters(model.state_dict(), 0)
        optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.1), model, **options)
        before = model.rows.detach().clone()
        for step in range(2):
            optimizer.zero_grad()
            inputs, targets = (part(x).float() for x in whole_batch(step))
            loss_of(model, inputs, targets).backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert_same_bits(model.parameters())
        assert not torch.equal(before.imag, model.rows.imag)


@needs(ranks=2)
def check_sparse_complex_gradients() -> None:
    table = torch.nn.Parameter(torch.ones(8, 2, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), [("table", table)])
    rank, size = hvd.rank(), hvd.size()
    table.grad = torch.sparse_coo_tensor([[0, rank + 1]], torch.full((2, 2), 1j * size), (8, 2))
    optimizer.step()
    assert table.grad.is_sparse
    expected = torch.ones(8, 2, dtype=torch.complex64)
    expected[0] -= 1j * size
    expected[1 : size + 1] -= 1j
    assert torch.equal(table.detach(), expected)
