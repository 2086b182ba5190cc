"""Networks that are cut into stages, against the same networks in one process, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator, Grid
from ringdl.torch import parallel
from tests.ranks.support import expect, needs

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def alone() -> Communicator:
    """This rank by itself."""
    made = ringdl.get_communicator().group([hvd.rank()])
    assert made is not None
    return made


def all_ranks() -> Communicator:
    return ringdl.get_communicator()


def layers(count: int) -> list[torch.nn.Module]:
    torch.manual_seed(7)
    made: list[torch.nn.Module] = [torch.nn.Embedding(10, 6, dtype=torch.float64)]
    for number in range(count - 2):
        made.append(torch.nn.Linear(6, 6, dtype=torch.float64))
        if number % 2 == 0:
            made[-1] = torch.nn.Sequential(torch.nn.ReLU(inplace=True), made[-1])
    return [*made, torch.nn.Linear(6, 3, dtype=torch.float64)]


def rows_of(count: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, (count, length), generator=generator)
    return ids, random(count, length, 3, seed=seed)


def check_pipeline() -> None:
    """All ranks, one or two chunks each, batches that microbatches do not divide."""
    its = all_ranks()
    for chunks in (1, 2):
        for microbatches in (its.size, 2 * its.size):
            count = chunks * its.size + 1
            uncut = torch.nn.Sequential(*layers(max(count, 2)))
            pipeline = parallel.Pipeline(
                layers(max(count, 2)),
                functional.mse_loss,
                its,
                microbatches=microbatches,
                chunks=chunks,
            )
            optimizer = torch.optim.SGD(uncut.parameters(), 0.1)
            own = torch.optim.SGD(pipeline.parameters(), 0.1)
            for step, length in enumerate((4, 4, 5, 4)):
                inputs, targets = rows_of(2 * microbatches + 1, length, step)
                optimizer.zero_grad()
                expected = functional.mse_loss(uncut(inputs), targets)
                expected.backward()
                optimizer.step()
                own.zero_grad()
                loss = pipeline.step(
                    inputs if pipeline.is_first else None, targets if pipeline.is_last else None
                )
                own.step()
                torch.testing.assert_close(loss, expected.detach(), **EXACT)
            for name, parameter in pipeline.named_parameters():
                theirs = uncut.get_parameter(name)
                torch.testing.assert_close(parameter, theirs, **EXACT, msg=name)
                torch.testing.assert_close(parameter.grad, theirs.grad, **EXACT, msg=name)
            state = parallel.state_dict(pipeline, its)
            assert sorted(state) == sorted(uncut.state_dict())
            for name, tensor in uncut.state_dict().items():
                torch.testing.assert_close(state[name], tensor, **EXACT, msg=name)
            outputs = pipeline(inputs if pipeline.is_first else None)
            if pipeline.is_last:
                torch.testing.assert_close(outputs, uncut(inputs).detach(), **EXACT)
            else:
                assert outputs is None


class Rotated(torch.nn.Linear):
    """With a complex buffer, as rotary embeddings have, and a state that is no tensor."""

    def __init__(self, number: int) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.register_buffer("turns", torch.full((3,), number + 1j, dtype=torch.complex64))
        self.register_buffer("table", torch.full((3,), number).to(torch.uint32))
        self.number = number

    def get_extra_state(self) -> dict[str, int]:
        return {"number": self.number}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.number = state["number"]


def check_stages_that_keep_their_results() -> None:
    """What a stage gives to the next one of the same rank is not changed by that."""
    its = alone()
    torch.manual_seed(3)
    made = [torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(2 * its.size)]
    uncut = torch.nn.Sequential(*(torch.nn.Sequential(each, torch.nn.Tanh()) for each in made))
    pipeline = parallel.Pipeline(
        [*uncut], functional.mse_loss, its, microbatches=2 * its.size, chunks=2
    )
    inputs, targets = random(4 * its.size, 6, seed=1), random(4 * its.size, 6, seed=2)
    loss = pipeline.step(inputs, targets)
    found = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    uncut.zero_grad()
    expected = functional.mse_loss(uncut(inputs), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, uncut.get_parameter(name).grad, **EXACT, msg=name)


def check_a_loss_with_a_state() -> None:
    """It is none of the network's."""
    its = all_ranks()
    loss = torch.nn.CrossEntropyLoss(weight=torch.ones(6, dtype=torch.float64))
    made = [torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(its.size)]
    pipeline = parallel.Pipeline(made, loss, its, microbatches=2)
    pipeline.step(random(4, 6), torch.arange(4))
    torch.nn.Sequential(*made).load_state_dict(parallel.state_dict(pipeline, its))
    parallel.load_state_dict(pipeline, torch.nn.Sequential(*made).state_dict())


@needs(ranks=2)
def check_chunks_that_are_frozen() -> None:
    """A step has as many passes as stages that are trained, so gradients are averaged in it."""
    if hvd.size() % 2 != 0:
        return
    grid = Grid(pipeline=2)
    made = [torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)]
    made[grid.pipeline.rank].requires_grad_(False)
    pipeline = parallel.Pipeline(made, functional.mse_loss, grid.pipeline, microbatches=2, chunks=2)
    assert pipeline.passes == 2
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(pipeline.parameters(), 0.1),
        pipeline.named_parameters(),
        backward_passes_per_step=pipeline.passes,
        process_set=grid.data,
    )
    pipeline.step(random(4, 6, seed=grid.data.rank), random(4, 6, seed=9))
    own = [each.grad for each in optimizer.param_groups[0]["params"] if each.requires_grad]
    assert [each.shape for each in own] == [(6, 6), (6,)]
    for gradient in own:
        gradients = grid.data.allgather(gradient[None])
        assert (gradients == gradients[0]).all()


@needs(ranks=2)
def check_states_of_other_kinds() -> None:
    its = all_ranks()
    pipeline = parallel.Pipeline(
        [Rotated(number) for number in range(its.size)], functional.mse_loss, its, microbatches=2
    )
    nothing = torch.zeros(())  # what is not looked at may be anything
    pipeline.step(
        random(4, 6, seed=1) if pipeline.is_first else 0,
        random(4, 6, seed=2) if pipeline.is_last else nothing,
    )
    state = parallel.state_dict(pipeline, its)
    for number in range(its.size):
        assert (state[f"{number}.turns"] == number + 1j).all()
        assert state[f"{number}.table"].tolist() == [number] * 3
        assert state[f"{number}._extra_state"] == {"number": number}
    parallel.load_state_dict(pipeline, state)


@needs(ranks=2)
def check_data_and_pipeline() -> None:
    if hvd.size() % 2 != 0:
        return
    grid = Grid(pipeline=2)
    its, data = grid.pipeline, grid.data
    uncut = torch.nn.Sequential(*layers(5))
    makers = [lambda layer=layer: layer for layer in layers(5)]
    pipeline = parallel.Pipeline(makers, functional.mse_loss, its, microbatches=3, cuts=[2])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(pipeline.parameters(), 0.1),
        pipeline.named_parameters(),
        backward_passes_per_step=pipeline.passes,
        process_set=data,
    )
    plain = torch.optim.SGD(uncut.parameters(), 0.1)
    for step in range(3):
        inputs, targets = rows_of(4 * data.size, 4, step)
        plain.zero_grad()
        functional.mse_loss(uncut(inputs), targets).backward()
        plain.step()
        optimizer.zero_grad()
        rows = slice(4 * data.rank, 4 * data.rank + 4)
        pipeline.step(inputs[rows], targets[rows])
        optimizer.step()
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter, uncut.get_parameter(name), **EXACT, msg=name)
    parallel.load_state_dict(pipeline, torch.nn.Sequential(*layers(5)).state_dict())
    for name, parameter in pipeline.named_parameters():
        assert (parameter == torch.nn.Sequential(*layers(5)).get_parameter(name)).all()


@needs(ranks=2)
def check_ranks_with_other_stages() -> None:
    its = all_ranks()
    made = layers(2 * its.size)
    first = its.rank != 1
    bounds = [number + first for number in range(1, its.size)]
    pipeline = parallel.Pipeline(made, functional.mse_loss, its, microbatches=2, cuts=bounds)
    inputs, targets = rows_of(4, 4, 0)
    for call in (lambda: pipeline.step(inputs, targets), lambda: pipeline(inputs)):
        with expect(ringdl.MismatchError, "its stages begin with layers", "the same Pipeline"):
            call()


@needs(ranks=2)
def check_a_step_that_has_failed() -> None:
    """No later one takes its messages for its own."""
    its = all_ranks()
    calls = 0

    def loss(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ZeroDivisionError("a bad target")
        return functional.mse_loss(y, x)

    made = [torch.nn.Linear(6, 6, dtype=torch.float64) for _ in range(its.size)]
    pipeline = parallel.Pipeline(made, loss, its, microbatches=2)
    pipeline.step(random(4, 6), random(4, 6))
    with expect(ZeroDivisionError if pipeline.is_last else ringdl.MismatchError):
        pipeline.step(random(4, 6), random(4, 6))
    if pipeline.is_last:
        with expect(ringdl.MismatchError):
            its.broadcast(torch.zeros(()), 0, "another")
    with expect(ringdl.MismatchError, "a step of this pipeline has failed on rank"):
        pipeline.step(random(4, 6), random(4, 6))


def check_complex_stages_of_one_rank() -> None:
    its = alone()
    torch.manual_seed(1)
    made = [torch.nn.Linear(4, 4, dtype=torch.complex128) for _ in range(2 * its.size)]

    def loss(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (y - x).abs().square().mean()

    uncut = torch.nn.Sequential(*made)
    pipeline = parallel.Pipeline(made, loss, its, microbatches=1, chunks=2)
    inputs = torch.randn(3, 4, dtype=torch.complex128)
    pipeline.step(inputs, inputs)
    found = made[0].weight.grad
    uncut.zero_grad()
    loss(uncut(inputs), inputs).backward()
    torch.testing.assert_close(found, made[0].weight.grad)
