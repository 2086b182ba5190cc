"""Which samples each rank takes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

import ringdl
from ringdl.data import ShardedSampler


def samplers(count: int, size: int, **options: Any) -> list[ShardedSampler]:
    return [
        ShardedSampler(count, communicator=SimpleNamespace(rank=rank, size=size), **options)
        for rank in range(size)
    ]


def in_turn(each: list[ShardedSampler]) -> list[int]:
    """The samples in the order in which global batches have them."""
    lists = [list(sampler) for sampler in each]
    return [
        indices[i] for i in range(max(map(len, lists))) for indices in lists if i < len(indices)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [1, 6, 20, 42])
@pytest.mark.parametrize("remainder", ["pad", "drop", "keep"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_samples_are_dealt(size: int, count: int, remainder: str, shuffle: bool) -> None:
    each = samplers(count, size, remainder=remainder, shuffle=shuffle)
    dealt = in_turn(each)
    times = Counter(dealt)
    assert [len(list(sampler)) for sampler in each] == [len(sampler) for sampler in each]
    if remainder == "keep":
        assert sorted(dealt) == list(range(count))
    elif remainder == "drop":
        assert len({len(sampler) for sampler in each}) == 1
        assert len(dealt) == len(times) == count // size * size
    else:
        assert len({len(sampler) for sampler in each}) == 1
        assert set(times) == set(range(count))
        assert len(dealt) == -(-count // size) * size
        assert max(times.values()) - min(times.values()) <= 1
    if not shuffle:
        assert dealt[: min(count, len(dealt))] == list(range(count))[: len(dealt)]


def test_each_epoch_has_an_order_of_its_own_that_any_number_of_ranks_shares() -> None:
    orders = []
    for epoch in range(3):
        of_sizes = []
        for size in (1, 2, 5):
            each = samplers(40, size, seed=3)
            for sampler in each:
                sampler.set_epoch(epoch)
            of_sizes.append(in_turn(each))
        assert of_sizes[0] == of_sizes[1] == of_sizes[2]
        orders.append(of_sizes[0])
    assert len({tuple(order) for order in orders}) == 3
    assert in_turn(samplers(40, 1, seed=4)) != orders[0]


@pytest.mark.parametrize("remainder", ["pad", "drop", "keep"])
def test_an_epoch_goes_on_with_another_number_of_ranks(remainder: str) -> None:
    whole = in_turn(samplers(41, 1, remainder=remainder))
    begun = in_turn(samplers(41, 2, remainder=remainder))[:12]
    rest = samplers(41, 3, remainder=remainder)
    for sampler in rest:
        sampler.resume(0, 12)
        sampler.set_epoch(0)  # as at the beginning of each epoch: goes on where it was
    again = begun + in_turn(rest)
    assert again[: len(whole) - 3] == whole[: len(whole) - 3]
    if remainder == "keep":
        assert again == whole
    for sampler in rest:
        sampler.set_epoch(1)
    assert len(in_turn(rest)) == {"pad": 42, "drop": 39, "keep": 41}[remainder]


def test_wrong_arguments() -> None:
    alone: Any = SimpleNamespace(rank=0, size=1)
    with pytest.raises(ringdl.UsageError, match="0 samples is empty"):
        ShardedSampler([], communicator=alone)
    with pytest.raises(ringdl.UsageError, match="remainder is 'cut'"):
        ShardedSampler(3, remainder="cut", communicator=alone)  # type: ignore[arg-type]
    with pytest.raises(ringdl.UsageError, match="4 of 3 samples"):
        ShardedSampler(3, communicator=alone).resume(0, 4)
    with pytest.raises(ringdl.UsageError, match="call ringdl"):
        ShardedSampler(3)


def test_loaders_take_it() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10))
    sampler = ShardedSampler(data, communicator=SimpleNamespace(rank=1, size=2), shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    assert len(loader) == 3
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [5, 7], [9]]
