"""DistributedOptimizer(op=Adasum)."""

from __future__ import annotations

import copy
import pickle

import torch

import ringdl
import ringdl.torch as hvd
from tests.ranks.reductions import adasum
from tests.ranks.support import expect
from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    assert_same_bits,
    loss_of,
    make_mlp,
    part,
    take_step,
    whole_batch,
    wrap,
)


def check_steps() -> None:
    """Each rank's own step from common parameters, combined per parameter."""
    for make in OPTIMIZERS.values():
        model = make_mlp()
        optimizer = wrap(make(model.parameters()), model, op=hvd.Adasum)
        replicas = [make_mlp() for _ in range(hvd.size())]
        optimizers = [make(replica.parameters()) for replica in replicas]
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.9) for each in optimizers]
        for step in range(3):
            inputs, targets = whole_batch(step)
            take_step(model, optimizer, part(inputs), part(targets))
            scheduler.step()
            before = [parameter.detach().clone() for parameter in replicas[0].parameters()]
            for rank, (replica, plain) in enumerate(zip(replicas, optimizers, strict=True)):
                take_step(replica, plain, part(inputs, rank), part(targets, rank))
                schedulers[rank].step()
            for index, old in enumerate(before):
                each = [[*replica.parameters()][index] for replica in replicas]
                changes = [(new.detach() - old).cpu().numpy().ravel() for new in each]
                combined = old + torch.from_numpy(adasum(changes)).reshape(old.shape).to(old.device)
                with torch.no_grad():
                    for new in each:
                        new.copy_(combined)
            for own, other in zip(model.parameters(), replicas[0].parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-12)
            assert_same_bits(model.parameters())


def check_options() -> None:
    model = make_mlp().float()
    bare = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(bare, model, op=hvd.Adasum, compression=hvd.Compression.fp16)
    assert optimizer is bare
    inputs, targets = (part(x).float() for x in whole_batch(0))
    loss_of(model, inputs, targets).backward()
    optimizer.synchronize()
    with optimizer.no_sync():
        optimizer.step()
    assert_same_bits(model.parameters())
    optimizer.set_backward_passes_per_step(4)
    optimizer.replan()
    if hvd.size() > 1:
        with expect(ringdl.UsageError, "cannot be skipped"), optimizer.skip_synchronize():
            optimizer.step()
    else:
        with optimizer.skip_synchronize():
            optimizer.step()
    with expect(ringdl.UsageError, "add them before wrapping it"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD


def check_frozen_parameters() -> None:
    """They take no part, and may be of any dtype; but later they must not have gradients."""
    trained = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    late = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    its = {"trained": trained, "frozen": frozen, "late": late}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(its.values(), lr=0.1), its.items(), op=hvd.Adasum
    )
    trained.grad = torch.full((2,), 1.0 + ringdl.rank())
    optimizer.step()
    assert_same_bits([trained])
    assert frozen.tolist() == [1] * 3
    late.requires_grad_(True).grad = torch.ones(2)
    with expect(ringdl.UsageError, "'late' has a gradient", "not combined"):
        optimizer.step()
