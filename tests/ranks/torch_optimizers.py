"""Every optimizer of torch.optim: P ranks with split batches are one process with whole batches,
also after a broadcast of the root's state in the middle."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.torch_helpers import (
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    whole_batch,
    wrap,
)

STEPS = 3
"""Before the broadcast, and again after it."""


class Rows(torch.nn.Module):
    """Sparse gradients, of few rows in each batch; with a dense layer or without."""

    def __init__(self, has_dense: bool) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.table = torch.nn.Embedding(50, 3, sparse=True)
        self.dense = torch.nn.Linear(3, 3) if has_dense else torch.nn.Identity()
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        numbers = (inputs[:, 0] * 10).long().remainder(50)
        return torch.tanh(self.dense(self.table(numbers)))


def make_matrices() -> torch.nn.Module:
    """2-D parameters only, which is what Muon takes."""
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 10, bias=False), torch.nn.Tanh(), torch.nn.Linear(10, 3, bias=False)
    ).double()


def case(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    make_model: Callable[[], torch.nn.Module] = make_mlp,
    **options: object,
) -> tuple[Callable[[], torch.nn.Module], Callable[..., torch.optim.Optimizer]]:
    return make_model, lambda parameters: make_optimizer(parameters, **options)


def mixed_rows() -> torch.nn.Module:
    return Rows(has_dense=True)


def only_rows() -> torch.nn.Module:
    return Rows(has_dense=False)


optim = torch.optim
CASES = {
    "SGD": case(optim.SGD, lr=0.1, weight_decay=0.01),
    "SGD momentum": case(optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "SGD nesterov": case(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": case(optim.SGD, lr=0.05, momentum=0.9, fused=True),
    "SGD sparse": case(optim.SGD, mixed_rows, lr=0.5),
    "SGD sparse momentum": case(optim.SGD, mixed_rows, lr=0.5, momentum=0.9),
    "Adam": case(optim.Adam, lr=0.01, weight_decay=0.01),
    "Adam amsgrad": case(optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "Adam fused": case(optim.Adam, lr=0.01, fused=True),
    "Adam lr tensor": case(optim.Adam, lr=torch.tensor(0.01, dtype=torch.float64)),
    "AdamW": case(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW foreach": case(optim.AdamW, lr=0.01, foreach=True, maximize=True),
    "AdamW fused": case(optim.AdamW, lr=0.01, amsgrad=True, fused=True),
    "Adamax": case(optim.Adamax, lr=0.01),
    "NAdam": case(optim.NAdam, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": case(optim.RAdam, lr=0.01),
    "Adagrad": case(optim.Adagrad, lr=0.05, lr_decay=0.01),
    "Adagrad fused": case(optim.Adagrad, lr=0.05, fused=True),
    "Adagrad sparse": case(optim.Adagrad, mixed_rows, lr=0.5, lr_decay=0.01),
    "Adadelta": case(optim.Adadelta, lr=0.5),
    "RMSprop": case(optim.RMSprop, lr=0.01, momentum=0.5),
    "RMSprop centered": case(optim.RMSprop, lr=0.01, centered=True, foreach=True),
    "Rprop": case(optim.Rprop, lr=0.01),
    "ASGD": case(optim.ASGD, lr=0.05, t0=2.0),
    "LBFGS": case(optim.LBFGS, lr=0.5, max_iter=4, history_size=3),
    "LBFGS strong_wolfe": case(optim.LBFGS, max_iter=4, line_search_fn="strong_wolfe"),
    "SparseAdam": case(optim.SparseAdam, only_rows, lr=0.1),
    "Adafactor": case(optim.Adafactor, lr=0.05),
    "Muon": case(optim.Muon, make_matrices, lr=0.01),
}


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[float]:
    for step in steps:
        inputs, targets = map(cut, whole_batch(step))

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            return loss

        yield float(optimizer.step(closure).detach())


def compare(name: str) -> None:
    make_model, make_optimizer = CASES[name]
    reference = make_model()
    expected = list(
        train(reference, make_optimizer(reference.parameters()), range(2 * STEPS), lambda x: x)
    )

    model = make_model()
    optimizer = wrap(make_optimizer(model.parameters()), model)
    losses = list(train(model, optimizer, range(STEPS), part))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    model = make_model()
    optimizer = make_optimizer(model.parameters())
    if ringdl.rank() == 0:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    wrap(optimizer, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses += train(model, optimizer, range(STEPS, 2 * STEPS), part)

    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    assert_same_bits(model.parameters())


def check_every_optimizer() -> None:
    failed = {}
    for name in CASES:
        try:
            with torch.sparse.check_sparse_tensor_invariants():  # Adagrad warns without a choice
                compare(name)
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed, failed


def check_no_optimizer_is_left_out() -> None:
    bases = {torch.optim.Optimizer}
    classes = {
        value
        for value in vars(torch.optim).values()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    tried = {type(make(make_model().parameters())) for make_model, make in CASES.values()}
    assert classes - bases == tried
    assert len(CASES) >= 20


class Lookahead(torch.optim.Optimizer):
    """One that does not call its base's constructor, as some outside of PyTorch do not."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._base, self.param_groups = base, base.param_groups
        self.state, self.defaults = base.state, base.defaults

    def step(self, closure: Any = None) -> Any:
        return self._base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._base.zero_grad(set_to_none)


def check_optimizers_without_hooks() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        Lookahead(torch.optim.SGD([weight], lr=1.0)),
        [("weight", weight)],
        backward_passes_per_step=2,
    )
    (weight.sum() * ringdl.rank()).backward()  # of two: averaged in step()
    optimizer.step()
    assert weight.tolist() == [-(ringdl.size() - 1) / 2] * 2
