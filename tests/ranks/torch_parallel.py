"""Networks that are cut over ranks, against the same networks in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator, Grid
from ringdl.torch import parallel
from tests.ranks.support import expect, needs
from tests.ranks.torch_pipelines import EXACT, all_ranks, alone, layers, random, rows_of

VOCABULARY, FEATURES, LENGTH = 31, 24, 12


def check_exchanges() -> None:
    """Each against what the table says, with its gradient."""
    its = all_ranks()
    size, rank = its.size, its.rank
    for rows in (2 * size, 2 * size + 1, size - 1):
        for dim in (0, 1, -1):
            shape = [3, 4, 5]
            shape[dim] = rows
            whole = random(*shape, seed=1)
            addends = [random(*shape, seed=2 + each) for each in range(size)]
            total = torch.stack(addends).sum(0)
            mine = parallel.span(rows, its)

            def own(x: torch.Tensor, dim: int = dim, mine: Any = mine) -> torch.Tensor:
                return x.narrow(dim, *mine)

            cases: list[tuple[Any, Any, Any, Any, Any]] = [
                (parallel.copy, whole, whole, addends[rank], total),
                (parallel.add, addends[rank], total, whole, whole),
                (parallel.gather, own(whole), whole, whole, own(whole)),
                (parallel.scatter, whole, own(whole), own(whole), whole),
                (parallel.allgather, own(whole), whole, addends[rank], own(total)),
                (parallel.reducescatter, addends[rank], own(total), own(whole), whole),
            ]
            for call, given, expected, gradient, expected_gradient in cases:
                x = given.clone().requires_grad_()
                words = (dim,) if call not in (parallel.copy, parallel.add) else ()
                y = call(x, its, *words)
                torch.testing.assert_close(y, expected, **EXACT)
                y.backward(gradient)
                torch.testing.assert_close(x.grad, expected_gradient, **EXACT)
    whole = random(2 * size + 1, 3, size + 2)
    x = whole.narrow(0, *parallel.span(2 * size + 1, its)).clone().requires_grad_()
    y = parallel.alltoall(x, its, cut=2, joined=0)
    torch.testing.assert_close(y, whole.narrow(2, *parallel.span(size + 2, its)), **EXACT)
    y.backward(y.detach() * 3)
    torch.testing.assert_close(x.grad, 3 * x.detach(), **EXACT)


def check_alltoall_of_less_than_ranks() -> None:
    """Some have no part along the one dimension, so nothing to give or to get a gradient of."""
    its = all_ranks()
    whole = random(1, 3, its.size)
    x = whole.narrow(0, *parallel.span(1, its)).clone().requires_grad_()
    y = parallel.alltoall(x, its, cut=2, joined=0)
    torch.testing.assert_close(y, whole.narrow(2, its.rank, 1), **EXACT)
    y.backward(y.detach() * 3)
    torch.testing.assert_close(x.grad, 3 * x.detach(), **EXACT)
    nothing = parallel.alltoall(x[:, :0], its, cut=2, joined=0)  # an empty batch
    assert nothing.shape == (1, 0, 1)
    nothing.sum().backward()


@needs(ranks=2)
def check_messages() -> None:
    its = all_ranks()
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    if its.rank == 0:
        (parallel.send(w * random(3, 4).T, 1, its) + 0 * w).backward()
        torch.testing.assert_close(w.grad, 5 * random(3, 4).sum(), **EXACT)
    elif its.rank == 1:
        x = parallel.receive(torch.empty(4, 3, dtype=torch.float64), 0, its)
        torch.testing.assert_close(x, 2 * random(3, 4).T, **EXACT)
        (5 * x).sum().backward()


class Transformer(torch.nn.Module):
    """One of two layers, cut or not, its sequences cut or not."""

    def __init__(self, communicator: Communicator, is_sequence_cut: bool, heads: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        dim = 1 if is_sequence_cut else None
        its: dict[str, Any] = {"communicator": communicator, "dtype": torch.float64}
        cut = {**its, "sequence_dim": dim}
        self.communicator, self.is_sequence_cut = communicator, is_sequence_cut
        self.tokens = parallel.VocabularyParallelEmbedding(VOCABULARY, FEATURES, **cut)
        self.places = torch.nn.Parameter(torch.randn(LENGTH, FEATURES, dtype=torch.float64))
        norm: Callable[..., torch.nn.Module] = parallel.SequenceParallelLayerNorm
        if not is_sequence_cut:
            norm = torch.nn.LayerNorm
            its = {"dtype": torch.float64}
        self.layers = torch.nn.ModuleList()
        for _ in range(2):
            layer = torch.nn.ModuleDict(
                {
                    "before": norm(FEATURES, **its),
                    "attention": parallel.ParallelAttention(FEATURES, heads, **cut),
                    "between": norm(FEATURES, **its),
                    "mlp": parallel.ParallelMLP(FEATURES, 2 * FEATURES + 1, **cut),
                }
            )
            self.layers.append(layer)
        self.last = norm(FEATURES, **its)
        self.head = parallel.ColumnParallelLinear(
            FEATURES,
            VOCABULARY,
            bias=False,
            communicator=communicator,
            sequence_dim=dim,
            dtype=torch.float64,
        )
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places = self.places
        if self.is_sequence_cut:
            places = parallel.scatter(places, self.communicator, 0)
        x = self.tokens(ids) + places
        for layer in self.layers:
            x = x + layer["attention"](layer["before"](x))
            x = x + layer["mlp"](layer["between"](x))
        return parallel.cross_entropy(
            self.head(self.last(x)), targets, self.communicator, vocabulary=VOCABULARY
        )


def batch(seed: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, :2] = -100
    return ids[:, :-1], targets


def train(model: Any, optimizer: Any, batches: list[Any]) -> list[float]:
    losses = []
    for each in batches:
        optimizer.zero_grad()
        loss = model(*each)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check_transformer() -> None:
    """Forward, backward and some steps of Adam; its state is that of the uncut one."""
    size = hvd.size()
    heads = size if FEATURES % size == 0 else 0
    if heads == 0:
        return
    for is_sequence_cut in (False, True):
        uncut = Transformer(alone(), False, heads)
        cut = Transformer(all_ranks(), is_sequence_cut, heads)
        for name, tensor in parallel.state_dict(cut).items():
            assert (tensor == uncut.state_dict()[name]).all(), name
        batches = [batch(seed) for seed in range(4)]
        expected = train(uncut, torch.optim.Adam(uncut.parameters(), 0.01), batches)
        losses = train(cut, torch.optim.Adam(cut.parameters(), 0.01), batches)
        torch.testing.assert_close(losses, expected, **EXACT)
        state = parallel.state_dict(cut)
        assert [*state] == [*uncut.state_dict()]
        for name, tensor in uncut.state_dict().items():
            torch.testing.assert_close(state[name], tensor, **EXACT, msg=name)
        other = Transformer(all_ranks(), not is_sequence_cut, heads)
        parallel.load_state_dict(other, uncut.state_dict())
        torch.testing.assert_close(other(*batches[0]), uncut(*batches[0]), **EXACT)
        if size > 1:
            assert cut.head.weight.shape[0] < VOCABULARY
            assert cut.head.weight is cut.tokens.weight


def check_compiled_layers() -> None:
    """By torch.compile: exchanges run between graphs."""
    its = all_ranks()
    if FEATURES % its.size != 0:
        return
    model = Transformer(its, True, its.size)
    reference = copy.deepcopy(model)
    loss = torch.compile(model, backend="aot_eager")(*batch(0))
    expected = reference(*batch(0))
    torch.testing.assert_close(loss, expected, **EXACT)
    loss.backward()
    expected.backward()
    for name, parameter in model.named_parameters():
        gradient = reference.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, gradient, **EXACT, msg=name)


def check_clipping() -> None:
    """By the norm of the uncut network's gradients; copies of a module know how they are cut."""
    its = all_ranks()
    if FEATURES % its.size != 0:
        return
    for is_sequence_cut in (False, True):
        uncut = Transformer(alone(), False, its.size)
        cut = copy.deepcopy(Transformer(its, is_sequence_cut, its.size))
        for model in (uncut, cut):
            model(*batch(0)).backward()
        expected = torch.nn.utils.clip_grad_norm_(uncut.parameters(), 0.1)
        norm = parallel.clip_grad_norm_(cut, 0.1)
        torch.testing.assert_close(norm, expected, **EXACT)
        cuts = parallel.cuts_of(cut)
        for name, parameter in cut.named_parameters():
            gradient = uncut.get_parameter(name).grad
            assert gradient is not None
            own = gradient if name not in cuts else cuts[name].own(gradient)
            torch.testing.assert_close(parameter.grad, own, **EXACT, msg=name)
        for name, tensor in parallel.state_dict(cut).items():
            assert (tensor == uncut.state_dict()[name]).all(), name


def check_clipping_of_complex_gradients() -> None:
    module = parallel.ParallelMLP(4, 2 * all_ranks().size, communicator=all_ranks()).to(
        torch.complex64
    )
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3 + 4j)
    count = sum(each.numel() for each in parallel.state_dict(module).values())
    norm = parallel.clip_grad_norm_(module, 1.0)
    torch.testing.assert_close(float(norm), 5 * count**0.5)


@needs(ranks=2)
def check_parametrized_parts() -> None:
    """Nobody knows how what has taken a cut parameter's place is cut."""
    layer = parallel.ColumnParallelLinear(4, 4, communicator=all_ranks())
    torch.nn.utils.parametrizations.weight_norm(layer)
    for call in (parallel.state_dict, lambda its: parallel.clip_grad_norm_(its, 1.0)):
        with expect(ringdl.UsageError, "'0.weight' is cut over ranks, and is not a parameter"):
            call(torch.nn.Sequential(layer))


def check_ranks_without_rows() -> None:
    """Of a vocabulary smaller than the ranks are many."""
    its = all_ranks()
    rows = max(1, its.size - 1)
    torch.manual_seed(11)
    uncut = torch.nn.Embedding(rows, 3, dtype=torch.float64)
    torch.manual_seed(11)
    cut = parallel.VocabularyParallelEmbedding(
        rows, 3, communicator=its, sequence_dim=1, dtype=torch.float64
    )
    ids = torch.arange(4 * its.size).reshape(2, -1) % rows
    weight = random(2, 2 * its.size, 3)
    (uncut(ids) * weight).sum().backward()
    (cut(ids) * parallel.scatter(weight, its, 1)).sum().backward()
    assert uncut.weight.grad is not None
    begin, count = parallel.span(rows, its)
    torch.testing.assert_close(cut.weight.grad, uncut.weight.grad[begin : begin + count], **EXACT)


def check_rows_that_are_not_numbers() -> None:
    """They are those of their own ids alone."""
    its = all_ranks()
    cut = parallel.VocabularyParallelEmbedding(2 * its.size, 3, communicator=its)
    with torch.no_grad():
        cut.weight[0] = torch.nan
    found = cut(torch.arange(2 * its.size)).isnan().any(-1)
    assert found.tolist() == [True, False] * its.size


@needs(ranks=2)
def check_data_and_model() -> None:
    """The wrapper averages along the data axis; as one process with the whole batch."""
    size = hvd.size()
    if size % 2 != 0:
        return
    grid = Grid(model=2)
    heads = 4
    uncut, cut = Transformer(alone(), False, heads), Transformer(grid.model, True, heads)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(cut.parameters(), 0.1, momentum=0.9),
        cut.named_parameters(),
        process_set=grid.data,
    )
    batches = [batch(seed, 4 * grid.data.size) for seed in range(3)]
    for _, targets in batches:
        targets[targets == -100] = 0  # else parts of a batch count unlike
    mine = [tuple(each.chunk(grid.data.size)[grid.data.rank] for each in both) for both in batches]
    train(uncut, torch.optim.SGD(uncut.parameters(), 0.1, momentum=0.9), batches)
    train(cut, optimizer, mine)
    state = parallel.state_dict(cut)
    for name, tensor in uncut.state_dict().items():
        torch.testing.assert_close(state[name], tensor, **EXACT, msg=name)


def check_cross_entropy() -> None:
    its = all_ranks()
    for vocabulary in (its.size - 1, its.size, 17, 32):
        if vocabulary == 0:
            continue
        logits = 30 * random(2, 5, vocabulary)
        targets = torch.arange(10).reshape(2, 5) % vocabulary
        targets[1, 2] = -100
        for reduction in ("mean", "sum", "none"):
            whole = logits.clone().requires_grad_()
            own = logits.narrow(-1, *parallel.span(vocabulary, its)).clone().requires_grad_()
            expected = functional.cross_entropy(whole.movedim(-1, 1), targets, reduction=reduction)
            loss = parallel.cross_entropy(
                own,
                targets,
                its,
                vocabulary=vocabulary,
                reduction=reduction,  # type: ignore[arg-type]
            )
            torch.testing.assert_close(loss, expected, **EXACT)
            weight = random(*expected.shape)
            (loss * weight).sum().backward()
            (expected * weight).sum().backward()
            assert whole.grad is not None
            mine = whole.grad.narrow(-1, *parallel.span(vocabulary, its))
            torch.testing.assert_close(own.grad, mine, **EXACT)


def check_locally_connected() -> None:
    its = all_ranks()
    for image, kernel, stride in (
        ((9, 7), 3, 1),
        ((16, 5), 5, 2),
        ((3, 8), 2, 1),
        ((11, 11), 1, 3),
    ):
        torch.manual_seed(5)
        layer, words = parallel.LocallyConnected2d, (2, 3, image, kernel, stride)
        uncut = layer(*words, communicator=alone(), dtype=torch.float64)
        torch.manual_seed(5)
        cut = layer(*words, communicator=its, dtype=torch.float64)
        x = random(4, 2, *image)
        whole = x.clone().requires_grad_()
        own = x.narrow(2, *parallel.span(image[0], its)).clone().requires_grad_()
        expected, y = uncut(whole), cut(own)
        mine = parallel.span(uncut.output_size[0], its)
        torch.testing.assert_close(y, expected.narrow(2, *mine), **EXACT)
        weight = random(*expected.shape)
        (expected * weight).sum().backward()
        (y * weight.narrow(2, *mine)).sum().backward()
        assert whole.grad is not None
        mine_in = parallel.span(image[0], its)
        torch.testing.assert_close(own.grad, whole.grad.narrow(2, *mine_in), **EXACT)
        for name, parameter in uncut.named_parameters():
            assert parameter.grad is not None
            gradient = cut.get_parameter(name).grad
            torch.testing.assert_close(gradient, parameter.grad.narrow(1, *mine), **EXACT)
        state = parallel.state_dict(cut)
        for name, tensor in uncut.state_dict().items():
            assert (state[name] == tensor).all(), name


def check_wrong_use() -> None:
    its = all_ranks()
    with expect(ringdl.UsageError, f"is not one of {its.size} ranks"):
        Grid(data=its.size + 1)
    for heads in (3, 0):
        with expect(ringdl.UsageError, "heads have to divide features"):
            parallel.ParallelAttention(10, heads, communicator=its)
    with expect(ringdl.UsageError, "an activation with parameters"):
        parallel.ParallelMLP(4, 8, communicator=its, activation=torch.nn.PReLU())
    with expect(ringdl.UsageError, "stride is 0"):
        parallel.LocallyConnected2d(1, 1, (9, 9), 3, 0, communicator=its)
    none = parallel.LocallyConnected2d(1, 1, (9, 9), 3, communicator=its)
    assert none(torch.zeros(0, 1, parallel.span(9, its)[1], 9)).shape[0] == 0
    with expect(IndexError, "ids are from 0 to 4, and the vocabulary has 4"):
        parallel.VocabularyParallelEmbedding(4, 2, communicator=its)(torch.tensor([0, 4]))
    with expect(ringdl.UsageError, "is smaller than its kernel"):
        parallel.LocallyConnected2d(1, 1, (2, 2), 3, communicator=its)
    linear = parallel.ColumnParallelLinear(2, 3 * its.size, communicator=its)
    with expect(ringdl.UsageError, "has no 'weight'"):
        parallel.load_state_dict(linear, {})
    more = {**torch.nn.Linear(2, 3 * its.size).state_dict(), "strange": torch.zeros(1)}
    with expect(ringdl.UsageError, "the state that is loaded has 'strange'"):
        parallel.load_state_dict(linear, more)
    in_numpy = {name: each.numpy() for name, each in more.items() if name != "strange"}
    parallel.load_state_dict(linear, in_numpy)  # type: ignore[arg-type]
    wrong = torch.nn.Linear(2, 3 * its.size + 1).state_dict()
    with expect(ringdl.UsageError, "'weight' has the shape"):
        parallel.load_state_dict(linear, wrong)
    with expect(ringdl.UsageError, "leave out gathers"):
        parallel.ColumnParallelLinear(2, 6, communicator=its, sections=3, gathers=True)
    with expect(ringdl.UsageError, "7 outputs in 2 sections"):
        parallel.ColumnParallelLinear(2, 7, communicator=its, sections=2)
    with expect(ringdl.UsageError, "padding_idx is not there"):
        parallel.VocabularyParallelEmbedding(4, 2, communicator=its, padding_idx=1)
    if its.size > 1:
        whole = parallel.LocallyConnected2d(1, 1, (9, 9), 3, communicator=its)
        with expect(ringdl.UsageError, "of the image's rows, and the input 9"):
            whole(torch.zeros(1, 1, 9, 9))
        tied = layers(2 * its.size)
        tied[-1] = tied[1]
        with expect(ringdl.UsageError, "layers share a parameter"):
            parallel.Pipeline(tied, functional.mse_loss, its, microbatches=its.size)
    made = layers(2 * its.size + 1)
    for options, text in (
        ({"microbatches": 0}, "microbatches and chunks are at least 1"),
        ({"microbatches": 2, "chunks": 9}, "layers cannot be cut into"),
        ({"microbatches": 2, "cuts": [0] * (its.size - 1) + [1]}, "cuts is"),
    ):
        with expect(ringdl.UsageError, text):
            parallel.Pipeline(made, functional.mse_loss, its, **options)  # type: ignore[arg-type]
    pipeline = parallel.Pipeline(made, functional.mse_loss, its, microbatches=2)
    inputs, targets = rows_of(4, 2, 0)
    with expect(ringdl.UsageError, "the first rank of the pipeline has no inputs"):
        pipeline.step(None, targets)
    for nothing in (None, {"a": targets}):
        with expect(ringdl.UsageError, "the last rank of the pipeline has no targets"):
            pipeline.step(inputs, nothing)
    with expect(ringdl.UsageError, "the first rank of the pipeline has no inputs"):
        pipeline()
    state = {
        f"{number}.{name}": each
        for number, layer in enumerate(layers(2 * its.size + 2))
        for name, each in layer.state_dict().items()
    }
    with expect(ringdl.UsageError, f"the state that is loaded has '{2 * its.size + 1}."):
        parallel.load_state_dict(pipeline, state)
    with expect(ringdl.UsageError, "there are 1 inputs and 4 targets, for 2 microbatches"):
        pipeline.step(inputs[:1], targets)


@needs(ranks=2)
def check_messages_whose_gradients_come_in_another_order() -> None:
    """Never another one's gradient."""
    its = all_ranks()
    if its.rank == 0:
        x = [torch.ones(2, requires_grad=True) for _ in range(2)]
        total = sum(parallel.send(each, 1, its) for each in x)
        total.backward()  # type: ignore[union-attr]
        assert [each.grad.tolist() for each in x] == [[10, 10], [20, 20]]  # type: ignore[union-attr]
    elif its.rank == 1:
        first, second = (parallel.receive(torch.empty(2), 0, its) for _ in range(2))
        (10 * first + 20 * second).sum().backward()
    with expect(ringdl.MismatchError, "ranks wait for one another"):
        if its.rank == 0:
            y = torch.ones(2, requires_grad=True)
            parallel.send(y, 1, its)  # its gradient is awaited by none
            (parallel.send(y, 1, its) + 0).backward()
        elif its.rank == 1:
            first, _ = (parallel.receive(torch.empty(2), 0, its) for _ in range(2))
            first.sum().backward()
        else:
            raise ringdl.MismatchError("ranks wait for one another")


@needs(ranks=2)
def check_errors_reach_the_others() -> None:
    """Of a call that one rank alone cannot make."""
    its = all_ranks()
    count = parallel.span(10, its)[1]
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (
            lambda: parallel.cross_entropy(
                torch.zeros(3, count), torch.zeros(3, dtype=torch.long), its, vocabulary=10
            ),
            lambda: parallel.cross_entropy(
                torch.zeros(3, count + 1), torch.zeros(3, dtype=torch.long), its, vocabulary=10
            ),
        ),
        (
            lambda: parallel.alltoall(torch.zeros(its.size, 2), its, 0, 1),
            lambda: parallel.alltoall(torch.zeros(its.size, 2), its, 0, -2),
        ),
    ]
    for right, wrong in calls:
        is_wrong = its.rank == 1
        with expect(ringdl.UsageError if is_wrong else ringdl.MismatchError):
            (wrong if is_wrong else right)()
        right()
    x = torch.zeros(3)
    assert parallel.scatter(x, its, 0).data_ptr() != x.data_ptr()
    rows = 1 if its.rank == its.size - 1 else 3
    is_span = parallel.span(3 * its.size - 2, its)[1] == rows
    with nullcontext() if is_span else expect(ringdl.UsageError, "as parallel.span says"):
        parallel.gather(torch.zeros(rows), its, 0)


@needs(ranks=2)
def check_different_grids() -> None:
    size = hvd.size()
    with expect(ringdl.MismatchError, "ranks make different grids"):
        Grid(data=size if hvd.rank() else 1, model=1 if hvd.rank() else size)
