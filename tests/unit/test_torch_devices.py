"""What ringdl.torch makes of tensors on devices, as far as that shows without one."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import ringdl  # noqa: E402
import ringdl.torch  # noqa: E402
from ringdl import _arrays  # noqa: E402
from ringdl.torch import _batch_norm, _gradients, _sparse  # noqa: E402


class SentError(Exception):
    """Ends what would go on with the answers of other ranks."""


class Communicator:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def allgather_async(self, x: Any, name: str) -> None:
        self.sent.append(x)

    def allgather(self, x: Any, name: str) -> None:
        self.sent.append(x)
        raise SentError


@pytest.fixture
def fake() -> Any:
    """Tensors without memory, whose operations check where they lie."""
    subclasses = pytest.importorskip("torch._subclasses")
    with subclasses.FakeTensorMode():
        yield


@pytest.mark.parametrize("has_gradient", [True, False])
@pytest.mark.usefixtures("fake")
def test_sparse_gradients_stay_on_their_device(has_gradient: bool) -> None:
    like = torch.empty(10, 4, device="meta")
    indices = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    values = torch.ones(3, 4, device="meta")
    sizes = {"size": (10, 4), "is_coalesced": True, "check_invariants": False}
    gradient = torch.sparse_coo_tensor(indices, values, **sizes)
    communicator: Any = Communicator()
    mine = gradient if has_gradient else None
    _sparse.begin_sparse(mine, like, 1, ringdl.Sum, communicator, "x")
    assert [x.device.type for x in communicator.sent] == ["meta", "meta"]


@pytest.mark.usefixtures("fake")
def test_batches_are_normalized_on_their_device() -> None:
    communicator: Any = Communicator()
    with pytest.raises(SentError):
        _batch_norm._statistics(torch.ones(4, 3, 2, 2, device="meta"), communicator)
    assert [x.device.type for x in communicator.sent] == ["meta"]


def test_rows_are_added_rank_by_rank() -> None:
    """Each rank's at once, as they are different ones."""
    blocks = [torch.tensor([[3], [1]]), torch.tensor([[1], [3]]), torch.empty(0, 1).long()]
    values = torch.tensor([[1.0], [2.0], [10.0], [20.0]])
    sums = _sparse._sum_rows(blocks, values, (5, 1), 1)
    assert sums.to_dense().flatten().tolist() == [0, 12, 0, 21, 0]


def test_gradients_are_packed_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied flat into a view has its strides: no other order, and no copy before."""
    found: list[Any] = []
    monkeypatch.setattr(_arrays, "as_it_lies", lambda gradient: found.append(gradient) or "it")
    layer = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    store = _gradients.ParameterGradients([("weight", layer.weight)])
    view = torch.empty_like(layer.weight)
    gradient = torch.ones_like(layer.weight)
    assert store.source(gradient, view) == "it"
    assert found[0].data_ptr() == gradient.data_ptr()
    assert store.source(gradient.contiguous(), view) is None
    assert store.source(gradient.double(), view) is None
