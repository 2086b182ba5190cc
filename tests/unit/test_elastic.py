"""States and their commits; ranks that fail are in tests/test_elastic.py."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ringdl
import ringdl.numpy
from ringdl import elastic
from ringdl.elastic._shards import ring
from ringdl.numpy import SGD, AdamW


@pytest.fixture(autouse=True)
def alone() -> Any:
    ringdl.init()
    yield
    ringdl.shutdown()


def test_values_are_attributes() -> None:
    state = elastic.State(step=0, w=np.zeros(2))
    state.step += 1
    assert state.step == 1
    with pytest.raises(AttributeError, match="has no value 'stop'"):
        state.stop = 2
    with pytest.raises(ringdl.UsageError, match="cannot be called 'commit'"):
        elastic.State(commit=1)


def test_restore_goes_back_to_the_commit() -> None:
    w, losses = np.zeros(2), [1.0]
    state = elastic.State(step=0, w=w, losses=losses, own={"m": np.ones(3)})
    state.commit()
    state.step = 7
    state.w += 1
    state.losses.append(2.0)
    state.own["m"] = np.zeros(3)
    state.restore()
    assert (state.step, state.losses, state.own["m"].tolist()) == (0, [1.0], [1, 1, 1])
    assert state.w is w, "NumPy's arrays stay the same objects"
    assert not w.any()
    state.w += 1
    state.restore()
    assert not w.any(), "a commit is restored as often as it is needed"


def test_arrays_in_shared_memory_stay_there() -> None:
    w = ringdl.empty((2, 3), "float32")
    w[...] = 1
    state = elastic.State(w=w, part=w[1])
    state.commit()
    w[...] = 2
    state.restore()
    assert state.w is w
    assert (w == 1).all()
    assert state.part is not w[1]


def test_commits_hold_no_more_than_is_restored() -> None:
    state = elastic.State(tree={"w": np.zeros(3)}, w=np.zeros(3))
    state.commit()
    assert [*state._commits[-1].objects] == ["w"]
    torch = pytest.importorskip("torch")
    state = elastic.State(part=torch.zeros(1000)[:10].requires_grad_())
    state.commit()
    assert state._commits[-1].values["part"].untyped_storage().nbytes() == 40
    with torch.no_grad():
        state.part += 1
    state.restore()
    assert state.part.tolist() == [0] * 10
    assert state.part.requires_grad


def test_states_of_optimizers_keep_their_dtypes() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], 0.1)
    optimizer.state[weight] = {"moment": torch.full((2,), 0.1), "count": torch.tensor(3)}
    state = elastic.State(optimizer=optimizer)
    state.commit()
    state.restore()
    restored = optimizer.state[weight]
    assert restored["moment"].tolist() == torch.full((2,), 0.1).tolist()
    assert restored["count"].dtype == torch.int64


@pytest.mark.parametrize("part", [np.ones(()), [1.0, 2.0], 3.0])
def test_own_parts_have_rows(part: Any) -> None:
    with pytest.raises(ringdl.UsageError, match=r"own\['m'\] is .*; keep rows"):
        elastic.State(own={"m": part}).commit()


def test_restore_writes_into_nothing_but_what_was_committed() -> None:
    data = np.arange(6.0).reshape(2, 3)
    state = elastic.State(now=np.zeros(2), best=np.ones(2), sample=data[0])
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    other = elastic.State(masked=masked)
    for each in (state, other):
        each.commit()
    state.now, state.best, state.sample = state.best, state.now, data[1]
    other.masked.mask = [True, False]
    for each in (state, other):
        each.restore()
    assert (state.now.tolist(), state.best.tolist()) == ([0, 0], [1, 1])
    assert state.sample.tolist() == [0, 1, 2]
    assert data[1].tolist() == [3, 4, 5], "an array that the state has referred to meanwhile"
    assert other.masked.mask.tolist() == [False, True]


def test_a_commit_that_fails_does_not_count() -> None:
    """Else this rank's would have other numbers than the same ones of the others."""
    state = elastic.State(value=1)
    state.commit()
    key = state._commits[-1].key
    state.value = threading.Lock()
    with pytest.raises(ringdl.UsageError, match="the value 'value' of a state cannot be copied"):
        state.commit()
    state.value = 2
    state.commit()
    assert state._commits[-1].key == (key[0], key[1] + 1)


def test_restore_without_a_commit_is_refused() -> None:
    with pytest.raises(ringdl.UsageError, match=r"before the first commit\(\)"):
        elastic.State(step=0).restore()


def test_run_returns_what_train_returns() -> None:
    state = elastic.State(step=3)
    assert elastic.run(lambda state, more: state.step + more, state, 4) == 7
    assert elastic.run(lambda state, more: state.step + more)(state, more=5) == 8
    with pytest.raises(ringdl.UsageError, match="the state is a dict"):
        elastic.run(lambda state: None, {})  # type: ignore[arg-type]


def test_neighbours_in_the_ring_are_on_other_hosts() -> None:
    assert ring([0, 0, 0, 0]) == [0, 1, 2, 3]
    assert ring([0, 0, 1, 1]) == [0, 2, 1, 3]
    assert ring([0, 1, 1, 1]) == [0, 1, 2, 3]


def test_copies_are_not_negative() -> None:
    with pytest.raises(ringdl.UsageError, match="copies is -1"):
        elastic.State(own={"m": np.ones(2)}, copies=-1)


def test_the_sampler_counts_what_all_ranks_had() -> None:
    sampler = elastic.ElasticSampler(10, shuffle=False)
    state = elastic.State(sampler=sampler)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_indices(sampler.get_indices(1, 4))
    assert (len(sampler), sampler.processed_num) == (10, 8), "its length stays, within an epoch"
    assert sampler.processed_indices == set(range(8))
    sampler.set_epoch(0)
    sampler.reset()
    assert list(sampler) == [8, 9]
    state.restore()
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    sampler.set_epoch(1)
    assert (len(sampler), sampler.processed_num) == (10, 0)


def test_what_has_a_state_may_be_in_a_list_or_a_dictionary() -> None:
    """It stays the same object there, too."""
    torch = pytest.importorskip("torch")
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    by_name = {"a": torch.optim.SGD(models[0].parameters(), 0.5, momentum=0.9)}
    state = elastic.State(models=models, optimizers=by_name, other=[1, {"b": (2,)}])
    state.commit()
    before = [model.weight.detach().clone() for model in models]
    with torch.no_grad():
        models[1].weight += 1
    by_name["a"].param_groups[0]["lr"] = 7.0
    state.other[1]["b"] = 3
    state.restore()
    assert state.models[0] is models[0]
    assert state.models[1] is models[1]
    assert [each.weight.item() for each in models] == [each.item() for each in before]
    assert state.optimizers["a"] is by_name["a"]
    assert by_name["a"].param_groups[0]["lr"] == 0.5
    assert state.other == [1, {"b": (2,)}]


@pytest.mark.parametrize("make", [lambda: SGD(0.1, momentum=0.9), lambda: AdamW(0.1)])
def test_optimizers_of_numpy_go_back(make: Callable[[], Any]) -> None:
    """Wrapped ones, too."""
    optimizer = ringdl.numpy.DistributedOptimizer(make())
    w = np.zeros(2)
    state = elastic.State(w=w, optimizer=optimizer)
    optimizer.step([w], [np.ones(2)])
    state.commit()
    for _ in range(2):
        optimizer.step([w], [np.array([1.0, 3.0])])
        state.restore()
        assert state.optimizer is optimizer
    optimizer.step([w], [np.array([1.0, 3.0])])
    twice = make()
    expected = np.zeros(2)
    for gradient in (np.ones(2), np.array([1.0, 3.0])):
        twice.step([expected], [gradient])
    assert w.tolist() == expected.tolist()
    with pytest.raises(ringdl.UsageError, match="and the state"):
        optimizer.load_state_dict({"lr": 1.0})


def test_arguments_are_looked_at() -> None:
    for options, text in (
        ({"checkpoint_every": 2.5}, "checkpoint_every is 2.5"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"copies": 1.5}, "copies is 1.5"),
        ({"own": [1]}, "own takes arrays by name"),
    ):
        with pytest.raises(ringdl.UsageError, match=text):
            elastic.State(**options)  # type: ignore[arg-type]
    with pytest.raises(ringdl.UsageError, match="not all functions"):
        elastic.State().register_reset_callbacks([3])  # type: ignore[list-item]
    with pytest.raises(ringdl.UsageError, match="batch_size is -5"):
        elastic.ElasticSampler(9).record_batch(0, -5)
