"""Commits in files: which are taken, which stay, and what they can hold."""

import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ringdl
from ringdl import elastic
from ringdl._safetensors import map_file
from ringdl.elastic._checkpoints import Checkpoints, Job


@pytest.fixture(autouse=True)
def alone() -> Any:
    ringdl.init()
    yield
    ringdl.shutdown()


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


def test_a_checkpoint_of_other_parts_is_left_out(tmp_path: Path) -> None:
    train_to(2, tmp_path)
    for own in ({}, {"m": np.zeros(3), "v": np.zeros(3)}):
        state = elastic.State(step=0, own=own, checkpoint=tmp_path)
        with pytest.warns(RuntimeWarning, match=r"it has own parts of \['m'\]"):
            elastic.run(lambda state: None, state)
        assert state.step == 0
        assert state.own.keys() == own.keys()


def test_what_was_left_out_stays(tmp_path: Path) -> None:
    """It is another state's; what is damaged does not count as one of the last two."""
    train_to(5, tmp_path, w=np.ones(2))
    with pytest.warns(RuntimeWarning, match="left out"):
        train_to(9, tmp_path, w=np.ones(2), more=1)
    with pytest.warns(RuntimeWarning, match="left out"):
        assert train_to(0, tmp_path, w=np.zeros(2)).step == 5
    for each in tmp_path.iterdir():
        each.unlink()
    train_to(5, tmp_path)  # commits 4 and 6
    (tmp_path / "000000006.safetensors").write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="checkpoint 6 is left out"):
        assert train_to(4, tmp_path).step == 4
    names = names_in(tmp_path)
    assert "000000004.safetensors" in names, names


def test_parts_are_removed_where_values_cannot_be_written(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="a checkpoint cannot hold"):
        train_to(9, tmp_path, what={1, 2})
    assert names_in(tmp_path) == []


def test_headers_that_have_changed_are_left_out(tmp_path: Path) -> None:
    train_to(2, tmp_path, w=np.ones((2, 3), np.float32))
    (file,) = (each for each in tmp_path.iterdir() if "own" not in each.name)
    content = file.read_bytes()
    for before, after in ((b'"F32"', b'"I32"'), (b"[2, 3]", b"[3, 2]"), (b"[2,3]", b"[3,2]")):
        if before in content:
            file.write_bytes(content.replace(before, after))
            with pytest.warns(RuntimeWarning, match="its checksum is wrong"):
                assert train_to(0, tmp_path, w=np.zeros((2, 3), np.float32)).step == 0


def test_training_goes_on_where_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="was not written"):
        assert train_to(5, tmp_path / "file" / "folder").step == 5
    with pytest.warns(RuntimeWarning, match="a checkpoint cannot hold"):
        assert train_to(5, tmp_path, what={1, 2}).step == 5


def test_checkpoints_hold_every_dtype(tmp_path: Path) -> None:
    torch, jax = map(pytest.importorskip, ("torch", "jax"))
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensors = {
        name: torch.arange(3).to(getattr(torch, name))
        for name in (
            *("complex64", "complex128", "bfloat16", "float16", "bool", "uint16", "uint64"),
            *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
        )
    }
    tensors["of no dimension"] = torch.tensor(2.0).to(torch.float8_e5m2)
    tensors["empty"] = torch.ones(0, 3, dtype=torch.complex128)
    arrays = {
        "wide": np.arange(4).reshape(2, 2).T * 1j,
        "narrow": np.arange(3).astype(ml_dtypes.float8_e3m4),
        "dates": np.array(["2024-02-29"], "datetime64[D]"),
        "big-endian": np.array([1j, 2.0], ">c16"),
        "texts": np.array(["one", "three"]),
    }
    keys = {"key": jax.random.key(7), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3)}
    train_to(3, tmp_path, tensors=tensors, arrays=arrays, keys=keys)
    others = jax.tree.map(lambda _: jax.random.key(0, impl="rbg"), keys) | {
        "key": jax.random.key(0)
    }
    state = train_to(0, tmp_path, tensors={}, arrays={}, keys=others)
    for name, tensor in tensors.items():
        found = state.tensors[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
        bytes_of = [each.reshape(-1, 1).view(torch.uint8) for each in (found, tensor)]
        assert torch.equal(*bytes_of), name
    for name, array in arrays.items():
        assert state.arrays[name].dtype == array.dtype.newbyteorder("="), name
        assert (state.arrays[name] == array).all(), name
    for name, key in keys.items():
        assert state.keys[name].dtype == key.dtype, name
        assert (jax.random.key_data(state.keys[name]) == jax.random.key_data(key)).all(), name


@pytest.mark.parametrize("array", [np.array([{}]), np.zeros(2, [("a", int)])])
def test_what_arrays_checkpoints_cannot_hold(array: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="'array' is an array of .* a checkpoint cannot hold"):
        train_to(3, tmp_path, array=array)
    assert not [*tmp_path.glob("?????????.safetensors")]


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


def again(folder: Path, **values: Any) -> elastic.State:
    """A state that begins with what the folder has, and is written to it."""
    state = elastic.State(**values, checkpoint=folder, checkpoint_every=1)
    elastic.run(lambda state: None, state)
    return state


class Frozen(Mapping[str, Any]):
    """As a FrozenDict of flax."""

    def __init__(self, its: dict[str, Any]) -> None:
        self._its = dict(its)

    def __getitem__(self, key: str) -> Any:
        return self._its[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._its)

    def __len__(self) -> int:
        return len(self._its)

    def __repr__(self) -> str:
        return f"Frozen({self._its})"


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": np.ones(2), "a": {"b": np.zeros(2)}},
        {1: np.ones(2), "1": np.zeros(2)},
        {1: np.ones(2), "1 (2)": np.full(2, 2.0), "1": np.zeros(2)},
        Frozen({"w": np.ones(2)}),
        dict.fromkeys(np.unique([1, 2]), 1),
        np.int64(3),
        np.ones(3, ">f4"),
        np.array(2.0),
        np.ones((4, 4))[:, ::2],
        Counter("aab"),
        OrderedDict(b=1, a=2),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    again(tmp_path, value=value)
    with warnings.catch_warnings(action="error"):
        found = again(tmp_path, value=type(value)() if isinstance(value, dict) else value).value
    is_mapping = isinstance(value, Mapping)
    np.testing.assert_equal(
        dict(found) if is_mapping else found, dict(value) if is_mapping else value
    )
    assert type(found) is type(value)


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    again(tmp_path, w=torch.ones(2, requires_grad=True))
    assert again(tmp_path, w=torch.zeros(2, requires_grad=True)).w.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        {(1, 2): 3},
        {"object": lambda: 0, "other": object()},
        np.ma.array([1.0, 2.0], mask=[False, True]),
    ],
)
def test_what_no_file_can_hold_is_told_of(value: Any, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="was not written"):
        again(tmp_path, value=value)


def test_references_and_sparse_tensors_are_told_of(tmp_path: Path) -> None:
    torch, jax = map(pytest.importorskip, ("torch", "jax"))
    for value in (jax.new_ref(jax.numpy.zeros(2)), torch.eye(2).to_sparse()):
        with pytest.warns(RuntimeWarning, match="which a checkpoint cannot hold"):
            again(tmp_path, value={"its": value})


def test_trees_of_other_sizes_are_left_out(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    again(tmp_path, value=optax.adam(0.1).init({"w": np.ones(2)}))
    with pytest.warns(RuntimeWarning, match="left out: it has a tree of"):
        again(tmp_path, value=optax.adam(0.1).init({"w": np.ones(2), "v": np.ones(2)}))


def test_objects_that_can_be_called_have_values(tmp_path: Path) -> None:
    class Schedule:
        def __call__(self) -> None: ...

    with pytest.warns(RuntimeWarning, match="is a Schedule, which a checkpoint cannot hold"):
        again(tmp_path, value=Schedule())
    again(tmp_path, value=np.sin)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """With the values as they are, not as the file has them."""
    state = elastic.State(step=0, checkpoint=tmp_path, checkpoint_every=10)
    elastic.run(lambda state: [state.commit() for state.step in range(1, 16)], state)
    steps: list[int] = []
    elastic.run(lambda state: steps.append(state.step), state)
    assert steps == [15]


def test_new_files_come_after_those_that_do_not_fit(tmp_path: Path) -> None:
    train_to(10, tmp_path)
    before = [file for file in names_in(tmp_path) if "own" not in file]
    state = elastic.State(step=0, more=1, checkpoint=tmp_path, checkpoint_every=2)
    with pytest.warns(RuntimeWarning, match="left out: it has the values"):
        elastic.run(lambda state: [state.commit() for _ in range(2)], state)
    assert before[-1] in names_in(tmp_path)
    assert max(names_in(tmp_path)) > max(before)


def test_others_files_stay(tmp_path: Path) -> None:
    (tmp_path / "000000001.safetensors").write_bytes(b"somebody's")
    left = tmp_path / ".000000002.safetensors.99999"
    left.write_bytes(b"a killed writer's")
    os.utime(left, (1, 1))
    beside = tmp_path / ".000000003.safetensors.99998"
    beside.write_bytes(b"another job's, which is written now")
    with pytest.warns(RuntimeWarning, match="checkpoint 1 is left out"):
        state = again(tmp_path, step=0)
    elastic.run(lambda state: [state.commit() for _ in range(5)], state)
    assert names_in(tmp_path)[:2] == [beside.name, "000000001.safetensors"]
    assert len(names_in(tmp_path)) == 4


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("precious")
    folder.mkdir()
    state = elastic.State(step=0, checkpoint=folder, checkpoint_every=1)

    def train(state: elastic.State) -> None:
        (folder / f".000000002.safetensors.{os.getpid()}").symlink_to(victim)
        state.commit()

    elastic.run(train, state)
    assert victim.read_text() == "precious"


def test_the_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = elastic.State(step=0, checkpoint="checkpoints", checkpoint_every=1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    state.commit()
    state._finish()
    assert names_in(tmp_path) == ["checkpoints", "elsewhere"]


def write(
    folder: Path, run: str, number: int, ranks: list[int], value: object = 1.0, size: int = 2
) -> None:
    """The files of two ranks, as far as they have written theirs."""
    for rank in ranks:
        checkpoints = Checkpoints(folder, 1)
        checkpoints.job = Job(run)
        its: Any = SimpleNamespace(rank=rank, size=size)
        checkpoints.offer(number, {"w": value}, {"m": np.ones(2)}, its)
        checkpoints.finish()


def test_parts_of_others_are_removed_where_values_cannot_be_written(tmp_path: Path) -> None:
    for number in range(1, 6):
        write(tmp_path, "a", number, [1])
        with pytest.warns(RuntimeWarning, match="a checkpoint cannot hold"):
            write(tmp_path, "a", number, [0], value={1, 2})
    assert len(names_in(tmp_path)) <= 4, names_in(tmp_path)


def test_parts_of_two_sizes_are_no_whole(tmp_path: Path) -> None:
    """A commit's number was made again, by fewer ranks."""
    write(tmp_path, "a", 1, [2, 1, 0], size=3)
    write(tmp_path, "a", 2, [2, 1, 0], size=3)
    write(tmp_path, "a", 3, [3], size=4)
    write(tmp_path, "a", 3, [1, 0], size=3)
    assert names_in(tmp_path)[0].startswith("000000001")


def test_files_of_two_jobs_are_not_taken_together(tmp_path: Path) -> None:
    write(tmp_path, "a", 100, [1, 0])
    write(tmp_path, "a", 200, [0])
    write(tmp_path, "b", 200, [1])
    with pytest.warns(RuntimeWarning, match="written by another job"):
        assert Checkpoints(tmp_path, 1).newest({"w": 0.0}, ["m"]).number == 100


def test_commits_stay_until_two_newer_ones_are_whole(tmp_path: Path) -> None:
    """Rank 1 cannot write, or is slow."""
    for number in (1, 2):
        write(tmp_path, "a", number, [1, 0])
    for number in (3, 4):
        write(tmp_path, "a", number, [0])
    with pytest.warns(RuntimeWarning, match="left out"):
        assert Checkpoints(tmp_path, 1).newest({"w": 0.0}, ["m"]).number == 2
    for number in (3, 4):
        write(tmp_path, "a", number, [1, 0])
    assert names_in(tmp_path)[0].startswith("000000003")


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"__metadata__": [1]}',
        b'{"__metadata__": {"a": 1}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-8, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
        b' "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
        b' "a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}',
    ],
    ids=lambda header: header[:60].decode(),
)
def test_damaged_headers_are_refused(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "000000009.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ringdl.UsageError, match="is no safetensors file, or was cut"):
        map_file(file)
    with pytest.warns(RuntimeWarning, match="left out"):
        again(tmp_path, step=0)
