"""Sparse gradients: summed row by row, the same bits everywhere, whoever has some."""

from __future__ import annotations

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.support import needs
from tests.ranks.torch_helpers import assert_same_bits, wrap

ROWS = 20


class Words(torch.nn.Module):
    """Two tables and a dense layer; which of them are used is the caller's choice."""

    def __init__(self, is_sparse: bool, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = torch.nn.Embedding(ROWS, 3, sparse=is_sparse)
        self.second = torch.nn.Embedding(ROWS, 3, sparse=is_sparse)
        self.dense = torch.nn.Linear(3, 2)
        self.to(dtype)

    def forward(self, numbers: torch.Tensor, tables: str) -> torch.Tensor:
        hidden = sum(getattr(self, name)(numbers) for name in tables.split())
        return self.dense(hidden).square().mean()


def numbers_of(step: int, rank: int) -> torch.Tensor:
    """Rows with repetitions, within a rank and between ranks; rank 0 of step 1 has none."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(
        0, ROWS // 2 + rank, (0 if (step, rank) == (1, 0) else 6,), generator=generator
    )


def tables_of(step: int, rank: int) -> str:
    """The second table is new in step 2, on the last rank only, and used by nobody in step 4."""
    is_used = step == 3 or (step == 2 and rank == ringdl.size() - 1)
    return "first second" if is_used else "first"


def train(model: Words, optimizer: torch.optim.Optimizer, is_split: bool) -> None:
    """The reference adds the ranks' losses up."""
    ranks = [ringdl.rank()] if is_split else range(ringdl.size())
    for step in range(5):
        optimizer.zero_grad()
        for rank in ranks:
            if len(numbers_of(step, rank)):
                loss = model(numbers_of(step, rank), tables_of(step, rank))
                (loss if is_split else loss / len(ranks)).backward()
        optimizer.step()


def compare(model: Words, reference: Words) -> None:
    for (name, parameter), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
        assert (parameter.grad is None) == (expected.grad is None), name
    assert_same_bits(model.parameters())


def check_sparse_training() -> None:
    with torch.sparse.check_sparse_tensor_invariants():
        for make in (torch.optim.SGD, torch.optim.Adagrad):
            model, reference = Words(True), Words(True)
            train(model, wrap(make(model.parameters(), lr=0.5), model), True)
            train(reference, make(reference.parameters(), lr=0.5), False)
            assert model.first.weight.grad.is_coalesced()
            compare(model, reference)


def check_sparse_as_dense_for_an_optimizer_that_takes_sparse_ones_only() -> None:
    models = [torch.nn.Embedding(ROWS, 3, sparse=True, dtype=torch.float64) for _ in range(2)]
    for model in models:
        hvd.broadcast_parameters(model.state_dict(), 0)
    models[1].load_state_dict(models[0].state_dict())
    pairs = [
        (model, wrap(torch.optim.SparseAdam(model.parameters()), model, sparse_as_dense=as_dense))
        for model, as_dense in zip(models, (True, False), strict=True)
    ]
    for step in range(3):
        for model, optimizer in pairs:
            optimizer.zero_grad()
            for _ in range(2):
                model(numbers_of(step, ringdl.rank())).square().sum().backward()
            assert model.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(models[0].weight, models[1].weight, rtol=1e-10, atol=1e-12)
    assert_same_bits(models[0].parameters())


def check_sparse_as_dense() -> None:
    model, reference = Words(True), Words(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, wrap(optimizer, model, sparse_as_dense=True), True)
    train(reference, torch.optim.Adam(reference.parameters(), lr=0.1), False)
    assert model.first.weight.grad.layout == torch.strided
    compare(model, reference)


def check_rows_of_all_ranks() -> None:
    size, rank = ringdl.size(), ringdl.rank()
    for op, divisor in ((ringdl.Average, size), (ringdl.Sum, 1)):
        table = torch.nn.Embedding(ROWS, 2, sparse=True)
        hvd.broadcast_parameters(table.state_dict())
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), table, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, rank, ROWS - 1])).sum().backward()
            gradient = table.weight.grad
            assert gradient.is_sparse
            assert gradient._nnz() == size + 1
            expected = torch.zeros(ROWS, 2)
            expected[:size] = 2
            expected[-1] = size
            torch.testing.assert_close(gradient.to_dense(), expected / divisor)
            assert_same_bits([gradient.indices(), gradient.values()])
        optimizer.step()


@needs(ranks=3)
def check_short_values_are_added_in_fp32() -> None:
    """Each small value alone would be lost beside 2048."""
    for dtype, small in ((torch.bfloat16, 6.0), (torch.float16, 0.75)):
        table = torch.nn.Embedding(4, 1, sparse=True).to(dtype)
        hvd.broadcast_parameters(table.state_dict())
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=0.1), table, op=ringdl.Sum)
        value = 2048.0 if ringdl.rank() == 0 else small
        (table(torch.tensor([1])) * value).sum().backward()
        expected = torch.tensor(2048.0 + small * (ringdl.size() - 1)).to(dtype)
        assert expected > 2048
        assert table.weight.grad.values().item() == expected
        assert table.weight.grad.dtype == dtype
        optimizer.step()


def check_missing_on_all_ranks() -> None:
    model = Words(True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    for _ in range(2):
        model(torch.tensor([1, 2]), "first").backward()
        assert model.second.weight.grad is None
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert model.first.weight.grad is None


def check_sparse_here_and_dense_there() -> None:
    """What a rank assigned itself is dense: the sum is as if both had been the same."""
    is_dense = ringdl.rank() == 0
    for steps in range(1, 3):
        table = torch.nn.Embedding(6, 2, sparse=True).double()
        hvd.broadcast_parameters(table.state_dict())
        optimizer = wrap(torch.optim.SGD(table.parameters(), lr=1), table, op=ringdl.Sum)
        for step in range(steps):
            optimizer.zero_grad()
            if is_dense and step == steps - 1:
                table.weight.grad = torch.ones(6, 2, dtype=torch.float64)
            else:
                table(torch.tensor([3])).sum().backward()
            optimizer.step()
        expected = torch.ones(6, 2, dtype=torch.float64)
        expected[3] += ringdl.size() - 1
        assert torch.equal(table.weight.grad.to_dense(), expected)
        assert_same_bits(table.parameters())


def check_views_after_a_table_has_left_the_buckets() -> None:
    model = Words(True)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    addresses = set()
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1 + ringdl.rank()]), "first").backward()
        optimizer.step()
        if step > 0:
            addresses.add(model.dense.weight.grad.data_ptr())
    assert len(addresses) == 1
