"""States, their commits, and these in files; ranks that fail are in tests/test_elastic.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringdl
from ringdl import elastic
from ringdl._safetensors import map_file
from ringdl.elastic._shards import ring


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


def train_to(steps: int, folder: Path, **values: Any) -> elastic.State:
    """A state that has been committed so often, every second time to the folder."""
    state = elastic.State(
        step=0, **values, own={"m": np.arange(3.0)}, checkpoint=folder, checkpoint_every=2
    )

    def train(state: elastic.State) -> None:
        while state.step < steps:
            state.step += 1
            state.own["m"] = state.own["m"] + 1
            state.commit()

    elastic.run(train, state)
    return state


def test_a_job_begins_at_the_newest_checkpoint(tmp_path: Path) -> None:
    train_to(5, tmp_path, w=np.ones(2, np.float16))  # commits 2 to 6: the first is of the beginning
    again = train_to(0, tmp_path, w=np.zeros(2, np.float16))
    assert again.step == 5
    assert again.w.tolist() == [1, 1]
    assert again.own["m"].tolist() == [5, 6, 7]
    assert len(list(tmp_path.iterdir())) == 4, "two commits stay, with values and parts each"


@pytest.mark.parametrize("harm", ["cut", "changed", "emptied", "foreign", "removed"])
@pytest.mark.parametrize("which", ["", ".own-0-of-1"])
def test_a_file_that_is_harmed_is_left_out(tmp_path: Path, harm: str, which: str) -> None:
    train_to(5, tmp_path, w=np.ones(200))
    file = tmp_path / f"000000006{which}.safetensors"
    content = file.read_bytes()
    if harm == "removed":
        file.unlink()
    else:
        harmed = {
            "cut": content[:-3],
            "changed": content[:-3] + b"\1\1\1",
            "emptied": b"",
            "foreign": (10).to_bytes(8, "little") + b'{"a": [1]}',
        }
        file.write_bytes(harmed[harm])
    with pytest.warns(RuntimeWarning, match="checkpoint 6 is left out"):
        assert train_to(0, tmp_path, w=np.zeros(200)).step == 3


def test_a_checkpoint_of_other_values_is_left_out(tmp_path: Path) -> None:
    train_to(2, tmp_path, w=np.ones(2))
    with pytest.warns(RuntimeWarning, match=r"it has the values \['step', 'w'\]"):
        assert train_to(0, tmp_path, v=np.ones(2)).step == 0


def test_training_goes_on_where_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="was not written"):
        assert train_to(5, tmp_path / "file" / "folder").step == 5
    with pytest.warns(RuntimeWarning, match="a checkpoint cannot hold"):
        assert train_to(5, tmp_path, what={1, 2}).step == 5


def test_checkpoints_hold_what_frameworks_have(tmp_path: Path) -> None:
    torch, jax, optax = map(pytest.importorskip, ("torch", "jax", "optax"))

    def make(scale: float) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=scale)
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        if scale:
            optimizer.step()
        parameters = {"w": jax.numpy.full(4, scale)}
        moments = optax.adam(1e-3).init(parameters)
        if scale:
            _, moments = optax.adam(1e-3).update(parameters, moments, parameters)
        return {"model": model, "optimizer": optimizer, "parameters": parameters, "adam": moments}

    was = make(0.5)
    train_to(4, tmp_path, **was)
    state = train_to(0, tmp_path, **make(0.0))
    for name in ("weight", "bias"):
        assert torch.equal(getattr(state.model, name), getattr(was["model"], name))
    assert state.optimizer.param_groups[0]["lr"] == 0.5
    for mine, its in zip(
        state.optimizer.state.values(), was["optimizer"].state.values(), strict=True
    ):
        assert torch.equal(mine["exp_avg"], its["exp_avg"])
    is_same = jax.tree.map(
        lambda a, b: bool((a == b).all()),
        (state.parameters, state.adam),
        (was["parameters"], was["adam"]),
    )
    assert jax.tree.all(is_same)
    assert type(state.adam[0]) is type(was["adam"][0])


def test_other_programs_read_them(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    train_to(1, tmp_path, w=np.arange(6, dtype=np.int32).reshape(2, 3))
    file = tmp_path / "000000002.safetensors"
    assert safetensors.load_file(file)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    safetensors.save_file({"x": np.arange(3.0)}, tmp_path / "x")
    assert map_file(tmp_path / "x")[0]["x"].tolist() == [0, 1, 2]


def test_the_sampler_counts_what_all_ranks_had() -> None:
    sampler = elastic.ElasticSampler(10, shuffle=False)
    state = elastic.State(sampler=sampler)
    sampler.record_batch(0, 4)
    state.commit()
    sampler.record_batch(1, 4)
    assert list(sampler) == [8, 9]
    state.restore()
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    sampler.set_epoch(1)
    assert (len(sampler), sampler.processed_num) == (10, 0)
