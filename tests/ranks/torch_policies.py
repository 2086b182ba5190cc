"""ringdl.policies with ringdl.torch, against the same policies over NumPy."""

from __future__ import annotations

import copy
import time
from typing import Any

import numpy as np
import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator, policies
from ringdl.policies import (
    EASGD,
    AllReduce,
    AsyncGossip,
    DiLoCo,
    Gossip,
    ParameterAveraging,
    ParameterServer,
    PostLocalSGD,
)
from tests.ranks.numpy_optimizers import Arrays, batches, parameters
from tests.ranks.policies import MAKERS, all_policies, part_of
from tests.ranks.policies import train as train_in_numpy
from tests.ranks.support import assert_same_bits, expect, needs

TORCH = {
    "SGD": lambda its: torch.optim.SGD(its, 0.1),
    "momentum": lambda its: torch.optim.SGD(its, 0.1, momentum=0.9),
    "Adam": lambda its: torch.optim.Adam(its, 0.01),
}


def loss_of(its: dict[str, torch.Tensor], inputs: Any, targets: Any) -> torch.Tensor:
    hidden = torch.tanh(torch.from_numpy(inputs) @ its["w"] + its["b"])
    error = hidden @ its["v"] - torch.from_numpy(targets)
    return (error**2).sum() / (2 * len(inputs))


def tensors_of(arrays: Arrays) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(torch.from_numpy(each)) for name, each in arrays.items()}


def train(comm: Communicator, policy: Any, make: Any, **options: Any) -> Any:
    its = tensors_of(parameters())
    optimizer = make(its.values())
    if policy != "bare":
        optimizer = hvd.DistributedOptimizer(optimizer, its.items(), policy=policy, **options)
    for batch in batches(2):
        optimizer.zero_grad()
        loss_of(its, *part_of(batch, comm.rank, comm.size)).backward()
        optimizer.step()
    return optimizer, its


def check_policies_are_those_of_numpy(comm: Communicator) -> None:
    for own, other in zip(all_policies(comm.size), all_policies(comm.size), strict=True):
        for name, make in TORCH.items():
            if comm.size == 1 and isinstance(own, AllReduce):
                continue
            optimizer, its = train(comm, own, make)
            expected = train_in_numpy(comm, other, MAKERS[name])[1]
            for key, array in expected.items():
                np.testing.assert_allclose(
                    its[key].detach().numpy(), array, 1e-9, 1e-11, err_msg=f"{own!r}, {name}, {key}"
                )
            policies.synchronize(optimizer)
            assert_same_bits(comm, *(each.detach().numpy() for each in its.values()))


def check_one_rank_is_the_bare_optimizer(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    for name, make in TORCH.items():
        bare = train(alone, "bare", make)[1]
        for policy in all_policies(1):
            its = train(alone, policy, make, process_set=alone)[1]
            for key in bare:
                assert torch.equal(its[key], bare[key]), f"{name}, {policy!r}"


@needs(ranks=2)
def check_scripts_that_clip(comm: Communicator) -> None:
    """Calls that average gradients do nothing where gradients are each rank's own."""
    for policy in (AllReduce(), ParameterAveraging(2), PostLocalSGD(2, 2)):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1.0), [("w", weight)], policy=policy
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(1, 5):
            optimizer.zero_grad()
            (weight.sum() * (comm.rank + 1)).backward()
            optimizer.synchronize()
            is_averaged = policy.averages_gradients(step - 1)
            assert weight.grad is not None
            expected = (comm.size + 1) / 2 if is_averaged else comm.rank + 1
            assert (weight.grad == expected).all(), f"{policy!r}, {step}"
            torch.nn.utils.clip_grad_norm_([weight], 1e9)
            with optimizer.skip_synchronize():
                optimizer.step()
            schedule.step()
        assert_same_bits(comm, weight.detach().numpy())
        np.testing.assert_allclose(weight.detach().numpy(), -3 * (comm.size + 1) / 2, rtol=1e-6)


@needs(ranks=2)
def check_state(comm: Communicator) -> None:
    """What is reset begins as a new optimizer; what only some ranks have is kept."""

    class OwnAdagrad(torch.optim.Adagrad):
        """With an option of its own."""

        def __init__(self, its: Any, lr: float) -> None:
            super().__init__(its, lr)
            self.defaults["more"] = 3

    makers: list[Any] = [
        lambda its: OwnAdagrad(its, 0.1),
        lambda its: torch.optim.Adagrad(its, 0.1, initial_accumulator_value=0.5),
        lambda its: torch.optim.RMSprop(its, 0.01, momentum=0.9),
        lambda its: torch.optim.Adam(its, 0.01, amsgrad=True),
    ]
    for make in makers:
        weight, unused = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))
        for rule in ("reset", "average"):
            optimizer = hvd.DistributedOptimizer(
                make([weight, unused]), policy=ParameterAveraging(2, rule)
            )
            for _ in range(2):
                optimizer.zero_grad()
                loss = (weight * (comm.rank + 1)).sum()
                (loss + unused.sum() if comm.rank == 0 else loss).backward()
                optimizer.step()
            its = optimizer.state.get(weight, {})
            if rule == "reset":
                assert all(float(value) == 0 for key, value in its.items() if key == "step")
            else:
                arrays = [value.numpy() for value in its.values() if value is not None]
                assert len(arrays) >= 2
                assert_same_bits(comm, *arrays)
                assert bool(optimizer.state.get(unused, {})) == (
                    comm.rank == 0 or isinstance(optimizer, torch.optim.Adagrad)
                )
            assert_same_bits(comm, weight.detach().numpy(), unused.detach().numpy())


@needs(ranks=2)
def check_kinds_of_parameters(comm: Communicator) -> None:
    """16-bit and complex ones, transposed ones, and some that are frozen."""
    for policy in all_policies(comm.size):
        its = [
            torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
            torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64)),
            torch.nn.Parameter(torch.ones(4, 2).T),
            torch.nn.Parameter(torch.ones(2), requires_grad=False),
        ]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(its, 0.125, 0.5), policy=policy)
        for step in range(6):
            optimizer.zero_grad()
            sum(each.abs().sum() * (comm.rank + step) for each in its).backward()  # type: ignore[union-attr]
            optimizer.step()
        policies.synchronize(optimizer)
        assert_same_bits(
            comm, *(each.detach().view(-1).view(torch.uint8).numpy() for each in (its[0], its[1]))
        )
        assert_same_bits(comm, its[2].detach().numpy())
        assert not its[2].is_contiguous()
        assert its[3].tolist() == [1, 1]


@needs(ranks=2)
def check_unfrozen_later(comm: Communicator) -> None:
    """Else it would be trained on each rank by itself."""
    for policy in (ParameterAveraging(1), PostLocalSGD(1, 1), ParameterServer()):
        its = {"one": torch.nn.Parameter(torch.ones(2)), "two": torch.nn.Parameter(torch.ones(2))}
        its["one"].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(its.values(), 0.1), its.items(), policy=policy
        )
        its["two"].grad = torch.ones(2)
        optimizer.step()
        its["one"].requires_grad_(True).grad = torch.full((2,), float(comm.rank))
        with expect(ringdl.UsageError, "'one' has a gradient, but did not", "wrap the optimizer"):
            optimizer.step()


def check_wrapping_again(comm: Communicator) -> None:
    """Another policy for the same optimizer, copies, and pickles of it."""
    policy = Gossip()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer: Any = torch.optim.SGD([weight], 0.1)
    plain = type(optimizer)
    for each in (policy, DiLoCo(2), policy, None, PostLocalSGD(1, 1), policy):
        optimizer = hvd.DistributedOptimizer(optimizer, policy=each)
        weight.grad = torch.ones(3)
        optimizer.step()
    assert type(copy.deepcopy(optimizer)) is plain
    assert_same_bits(comm, weight.detach().numpy())


@needs(ranks=2)
def check_closures(comm: Communicator) -> None:
    """A line search is each rank's own."""
    weight = torch.nn.Parameter(torch.full((2,), float(3)))
    bare = torch.optim.LBFGS([weight], max_iter=3)
    optimizer = hvd.DistributedOptimizer(bare, policy=ParameterAveraging(1, "keep"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((weight - comm.rank) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    np.testing.assert_allclose(weight.detach().numpy(), (comm.size - 1) / 2, atol=1e-4)
    assert_same_bits(comm, weight.detach().numpy())


@needs(ranks=2)
def check_ranks_of_their_own_pace(comm: Communicator) -> None:
    """Those that push and fetch: near to what one rank learns, and by the optimizer's own rate."""
    for policy, rate in (
        (ParameterServer(staleness=1), 0.1 / comm.size),
        (ParameterServer(rule="adagrad"), 0.05),
        (ParameterServer(rule="adam", push_every=2), 0.01),
        (EASGD(2), 0.1),
        (AsyncGossip(), 0.1),
    ):
        optimizer, its = train(comm, policy, lambda own, lr=rate: torch.optim.SGD(own, lr))
        policies.synchronize(optimizer)
        losses = [
            loss_of(of_it, *batches(2)[0]).item() for of_it in (its, tensors_of(parameters()))
        ]
        assert losses[0] < 0.9 * losses[1], f"{policy!r}: {losses}"
        assert_same_bits(comm, *(each.detach().numpy() for each in its.values()))
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": [each], "lr": rate} for each, rate in zip(weights, (1, 2), strict=True)]
    with expect(ringdl.UsageError, "learning rates [1.0, 2.0]", "pass it its lr"):
        hvd.DistributedOptimizer(torch.optim.SGD(groups), policy=ParameterServer(rule="adam"))


@needs(ranks=2)
def check_a_rank_without_batches(comm: Communicator) -> None:
    for policy in (
        ParameterAveraging(1),
        DiLoCo(1),
        ParameterServer(),
        EASGD(1),
        AsyncGossip(),
    ):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), policy=policy)
        if comm.rank != comm.size - 1:
            for _ in range(2):
                weight.grad = torch.ones(3)
                optimizer.step()
        hvd.join()
        policies.synchronize(optimizer)
        assert_same_bits(comm, weight.detach().numpy())
        expected = 2 * (comm.size - 1) if isinstance(policy, ParameterServer) else 2
        if isinstance(policy, (ParameterAveraging, ParameterServer)):
            assert (weight == -expected).all(), f"{policy!r}: {weight}"


@needs(ranks=2)
def check_joining_before_the_first_step(comm: Communicator) -> None:
    """Others train for longer than a rank would be waited for."""
    for policy in (ParameterServer(), EASGD(1), AsyncGossip()):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), policy=policy)
        before, comm._timeout = comm._timeout, 0.5 if comm.rank == 0 else comm._timeout
        for _ in range(4 if comm.rank > 0 else 0):
            weight.grad = torch.ones(3)
            optimizer.step()
            time.sleep(0.3)
        hvd.join()
        comm._timeout = before


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    def wrap(policy: Any, rows: int = 2, **options: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(rows))
        return hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), policy=policy, **options)

    for policy, options, text in (
        ("gossip", {}, "pass one of ringdl.policies"),
        (Gossip(), {"op": hvd.Sum}, "is for AllReduce()"),
        (Gossip(), {"op": hvd.Adasum}, "is for AllReduce()"),
        (PostLocalSGD(2, 2), {"op": hvd.Sum}, "is for AllReduce()"),
        (DiLoCo(2), {"compression": hvd.Compression.bf16}, "none travel"),
        (DiLoCo(2), {"gradient_predivide_factor": 2.0}, "none are averaged"),
    ):
        with expect(ringdl.UsageError, text):
            wrap(policy, **options)
    bad: Any = ParameterAveraging(2 if comm.rank else 3)
    with expect(ringdl.MismatchError, "policy is", "every=2", "every=3"):
        wrap(bad)
    with expect(ringdl.MismatchError, "policy is", "nothing on rank"):
        wrap(Gossip() if comm.rank else None)
    with expect(ringdl.MismatchError, "shape of gradient"):
        wrap(Gossip(), rows=2 + comm.rank % 2)
    first_error = ringdl.UsageError if comm.rank == 0 else ringdl.MismatchError
    with expect(first_error, "pass one of ringdl.policies"):
        wrap(1 if comm.rank == 0 else Gossip())
    optimizer = wrap(Gossip())
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0].fill_(comm.rank)
    with expect(ringdl.MismatchError, "the replicas differ", "broadcast_parameters"):
        optimizer.step()
    optimizer = wrap(ParameterServer(rule="adam"))
    with expect(ringdl.UsageError, "step(closure) computes gradients inside of the step"):
        optimizer.step(lambda: torch.ones(1))
    with expect(ringdl.UsageError, "add them before wrapping"):
        optimizer.add_param_group({"params": []})
    its = [torch.nn.Parameter(torch.ones(2))]
    for option in ({"maximize": True}, {"weight_decay": 0.5}):
        with expect(ringdl.UsageError, f"{next(iter(option))}=", "is not done"):
            hvd.DistributedOptimizer(
                torch.optim.SGD(its, 0.1, **option),  # type: ignore[arg-type]
                policy=ParameterServer(rule="adagrad"),
            )


@needs(ranks=2)
def check_scalers_of_fused_optimizers(comm: Communicator) -> None:
    """They leave steps with infinite gradients out by themselves."""
    for unscales in (False, True):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam([weight], 0.1, fused=True), policy=ParameterServer(rule="adam")
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)  # type: ignore[attr-defined]
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(factor * weight.sum()).backward()
            if not unscales:
                with expect(ringdl.UsageError, "call scaler.unscale_(optimizer) before"):
                    scaler.step(optimizer)
                break
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    policies.synchronize(optimizer)
    assert torch.isfinite(weight).all()
    assert (weight < 1).all()


@needs(ranks=2)
def check_averages_after_starting_over(comm: Communicator) -> None:
    """When ``backward()`` returns, as in the first step: scripts clip them then."""
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 0.1), [("w", weight)], policy=PostLocalSGD(2, 4)
    )
    mean = (comm.size - 1) / 2
    for _ in range(2):
        for expected in (mean, mean, comm.rank, comm.rank):
            optimizer.zero_grad()
            (weight * comm.rank).sum().backward()
            assert weight.grad is not None
            assert weight.grad.tolist() == [expected] * 2
            optimizer.step()
        policies.synchronize(optimizer)
        policies.start_over(optimizer)
