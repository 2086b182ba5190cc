"""Models that torch.compile has compiled."""

from __future__ import annotations

import torch

from tests.ranks.torch_helpers import (
    OPTIMIZERS,
    assert_close,
    assert_same_bits,
    make_mlp,
    part,
    take_step,
    whole_batch,
    wrap,
)


def check_compiled_models() -> None:
    """Forward and backward are traced (without generated code, which needs a compiler)."""
    model, reference = make_mlp(), make_mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = wrap(OPTIMIZERS["adamw"](compiled.parameters()), compiled)
    plain = OPTIMIZERS["adamw"](reference.parameters())
    for step in range(4):
        inputs, targets = whole_batch(step)
        take_step(compiled, optimizer, part(inputs), part(targets), step % 2 == 0)
        take_step(reference, plain, inputs, targets, step % 2 == 0)
    assert_close(model, reference)
    assert_same_bits(model.parameters())
