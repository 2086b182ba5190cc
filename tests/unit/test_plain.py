"""Optimizers of loops without a framework, against PyTorch's."""

from typing import Any

import numpy as np
import pytest

import ringdl
import ringdl.numpy as rn

torch = pytest.importorskip("torch")

CASES: list[tuple[Any, Any]] = [
    (rn.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (rn.SGD(0.1, 0.9, 0.01), lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01)),
    (rn.SGD(0.1, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    (rn.Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    (rn.Adam(weight_decay=0.1), lambda p: torch.optim.Adam(p, weight_decay=0.1)),
    (rn.AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    (
        rn.AdamW(0.01, (0.8, 0.95), 1e-5, 0.2),
        lambda p: torch.optim.AdamW(p, 0.01, (0.8, 0.95), 1e-5, 0.2),
    ),
]


@pytest.mark.parametrize(("own", "make"), CASES)
def test_steps_are_those_of_pytorch(own: Any, make: Any) -> None:
    random = np.random.default_rng(0)
    arrays = [np.array(random.normal(size=shape)) for shape in ((3, 4), (5,), ())]
    tensors = [torch.tensor(each, requires_grad=True) for each in arrays]
    theirs = make(tensors)
    for turn in range(10):
        for index, tensor in enumerate(tensors):
            gradient = torch.tensor(random.normal(size=tuple(tensor.shape)))
            tensor.grad = None if (turn + index) % 4 == 3 else gradient
        own.step(arrays, [None if t.grad is None else t.grad.numpy().copy() for t in tensors])
        theirs.step()
    for array, tensor in zip(arrays, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.detach().numpy(), rtol=1e-10, atol=1e-13)


def test_the_optimizers_own_attributes() -> None:
    """They are read and set through the wrapper, which has none of such names."""
    ringdl.init()
    optimizer: Any = rn.DistributedOptimizer(rn.SGD(1.0))
    assert optimizer.lr == 1.0
    optimizer.lr = 0.1
    weight = np.zeros(1)
    optimizer.step([weight], [np.ones(1)])
    assert weight[0] == -0.1
    with pytest.raises(AttributeError, match="SGD has no 'rate'"):
        optimizer.rate = 0.1
    ringdl.shutdown()
