"""Mixed precision: which steps are skipped, all ranks decide alike."""

from __future__ import annotations

import torch

import ringdl.torch as hvd
from tests.ranks.torch_helpers import assert_same_bits, loss_of, make_mlp, part, whole_batch, wrap


def check_an_overflow_on_one_rank() -> None:
    """All skip that step, and have the same scale afterwards; the next one is made."""
    model = make_mlp().float()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        inputs, targets = (part(tensor).float() for tensor in whole_batch(step))
        overflows = step == 1
        if overflows and hvd.rank() == hvd.size() - 1:
            inputs[0, 0] = float("inf")
        optimizer.zero_grad()
        scaler.scale(loss_of(model, inputs, targets)).backward()
        if step % 2 == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        is_same = all(map(torch.equal, before, model.parameters()))
        assert is_same == overflows, step
        assert scaler.get_scale() == (512.0 if step >= 1 else 1024.0)
        assert_same_bits(model.parameters())


def check_autocast() -> None:
    """bfloat16 inside, float32 parameters and gradients, near what float32 learns."""
    losses = []
    for is_mixed in (False, True):
        model = make_mlp().float()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
        for step in range(20):
            inputs, targets = (part(tensor).float() for tensor in whole_batch(step % 4))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
                output = model(inputs)
            loss = torch.nn.functional.mse_loss(output.float(), targets)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach()).item())
        assert_same_bits(model.parameters())
    assert abs(losses[1] - losses[0]) < 0.01 * losses[0], losses
