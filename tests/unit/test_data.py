"""Which samples each rank takes, and how they are read."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ringdl
from ringdl.data import Files, Loader, ShardedSampler


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
    with pytest.raises(ringdl.UsageError, match="7 of 3 samples"):
        ShardedSampler(3, communicator=alone).resume(0, 7)
    with pytest.raises(ringdl.UsageError, match="call ringdl"):
        ShardedSampler(3)


def test_loaders_take_it() -> None:
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.arange(10))
    sampler = ShardedSampler(data, communicator=SimpleNamespace(rank=1, size=2), shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
    assert len(loader) == 3
    assert [batch.tolist() for (batch,) in loader] == [[1, 3], [5, 7], [9]]


def test_many_files_are_not_open_at_once(tmp_path: Path) -> None:
    for number in range(100):
        np.save(tmp_path / f"{number:03}.npy", np.full(2, number))
    before = len(os.listdir("/proc/self/fd"))
    files = Files(each for each in sorted(tmp_path.iterdir()))  # type: ignore[arg-type]
    assert files.gather([199, 0, 7]).tolist() == [99, 0, 3]
    assert len(os.listdir("/proc/self/fd")) < before + 10
    del files
    gc.collect()
    assert not [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "/099.npy" in line
    ]


def write(folder: Path, kind: str, counts: tuple[int, ...] = (3, 0, 5)) -> None:
    """Files of samples that say which one they are: x, and 10 times that."""
    begin = 0
    for number, count in enumerate(counts):
        x = np.arange(begin, begin + count, dtype=np.float32)[:, None].repeat(2, 1)
        y = np.arange(begin, begin + count) * 10
        if kind == "npy":
            np.save(folder / f"x-{number}.npy", x)
            np.save(folder / f"y-{number}.npy", y)
        else:
            save_file = pytest.importorskip("safetensors.numpy").save_file
            save_file({"x": x, "y": y}, folder / f"all-{number}.safetensors", {"made": "here"})
        begin += count


@pytest.mark.parametrize("kind", ["npy", "safetensors"])
def test_files(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    if kind == "npy":
        files = Files({name: str(tmp_path / f"{name}-*.npy") for name in "xy"})
    else:
        files = Files(str(tmp_path / "*.safetensors"))
    assert len(files) == 8
    got = files.gather([7, 0, 3, 3, 2])
    assert isinstance(got, dict)
    assert got["x"][:, 1].tolist() == [7, 0, 3, 3, 2]
    assert got["y"].tolist() == [70, 0, 30, 30, 20]
    assert got["x"].dtype == np.float32
    empty = files.gather([])
    assert isinstance(empty, dict)
    assert empty["x"].shape == (0, 2)
    for wrong in ([8], [2, -1]):
        with pytest.raises(IndexError, match=f"samples are 0 to 7, and {wrong[-1]} is wanted"):
            files.gather(wrong)
    with pytest.raises(TypeError, match="pass integers"):
        files.gather([0.5])  # type: ignore[list-item]
    if kind == "npy":
        rows = Files([tmp_path / "x-0.npy", tmp_path / "x-2.npy"]).gather([1])
        assert isinstance(rows, np.ndarray)
        assert rows.tolist() == [[1, 1]]


def test_bfloat16_in_files(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file({"x": torch.arange(6).bfloat16().reshape(3, 2)}, tmp_path / "its.safetensors")
    got = Files(tmp_path / "its.safetensors").gather([2])
    assert isinstance(got, dict)
    assert got["x"].dtype.name == "bfloat16"
    assert got["x"].astype(float).tolist() == [[4, 5]]


def test_files_that_do_not_fit(tmp_path: Path) -> None:
    for name, array in (("a", np.zeros((3, 2))), ("b", np.zeros((3, 3))), ("c", np.zeros(4))):
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "d.safetensors").write_bytes(b"\x20" + bytes(7) + b"{")
    (tmp_path / "e.txt").write_text("")
    (tmp_path / "f.safetensors").write_bytes(b"")
    (tmp_path / "g.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    (tmp_path / "h.npy").write_bytes(b"")
    np.save(tmp_path / "i.npy", np.array([{}]), allow_pickle=True)
    np.save(tmp_path / "k.npy", np.array(1.0))
    with (tmp_path / "l.npy").open("wb") as file:
        np.savez(file, np.zeros(3), np.zeros(3))
    (tmp_path / "j.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    for paths, text in (
        (str(tmp_path / "*.x"), "there are no files"),
        (["a.npy"], "there is no file a.npy"),
        (
            str(tmp_path / "[ab].npy"),
            r"b.npy has rows of float64\[3\], and .*a.npy has float64\[2\]",
        ),
        ({"x": tmp_path / "a.npy", "y": tmp_path / "c.npy"}, "different numbers of rows"),
        (tmp_path / "d.safetensors", "is no safetensors file, or was cut"),
        (tmp_path / "f.safetensors", "is no safetensors file, or was cut"),
        (tmp_path / "e.txt", "pass .npy files, or .safetensors files"),
        *((tmp_path / f"{name}.npy", rf"{name}.npy is no .npy file of numbers") for name in "ghi"),
        (tmp_path / "j.safetensors", "j.safetensors has no tensors"),
        (tmp_path / "k.npy", "k.npy has one number of float64, and no rows"),
        (tmp_path / "l.npy", r"no .npy file of numbers, .* \(it holds several arrays\)"),
        ({}, "there are no arrays"),
    ):
        with pytest.raises(ringdl.UsageError, match=text):
            Files(paths)  # type: ignore[arg-type]


def loaders(data: Any, size: int, batch_size: int = 2, **options: Any) -> list[Loader]:
    return [
        Loader(
            data,
            batch_size,
            communicator=SimpleNamespace(rank=rank, size=size),  # type: ignore[arg-type]
            **options,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("ahead", [1, 3, 100])
@pytest.mark.parametrize("threads", [1, 3])
def test_loaders_read_each_sample_once(ahead: int, threads: int) -> None:
    data = {"x": np.arange(23), "y": np.arange(23) * 2}
    each = loaders(data, 2, 3, remainder="keep", ahead=ahead, threads=threads)
    orders = []
    for epoch in range(3):
        assert [loader.epoch for loader in each] == [epoch] * 2
        assert [len(loader) for loader in each] == [4, 4]
        batches = [list(loader) for loader in each]
        assert all((batch["y"] == 2 * batch["x"]).all() for its in batches for batch in its)
        order = [x for its in batches for batch in its for x in batch["x"].tolist()]
        assert sorted(order) == list(range(23))
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("sizes", [(2, 2), (4, 1), (1, 2)])
def test_loaders_go_on_in_the_middle_of_an_epoch(sizes: tuple[int, int]) -> None:
    """On another number of ranks, which together get the same batches."""
    data = np.arange(32)

    def global_batches(each: list[Loader], count: int) -> list[list[int]]:
        found = []
        its = [iter(loader) for loader in each]
        for _ in range(count):
            parts = [next(one).tolist() for one in its]
            found.append([x for together in zip(*parts, strict=True) for x in together])
        return found

    before, after = sizes
    whole = global_batches(loaders(data, 1, 4), 8)
    first = loaders(data, before, 4 // before)
    assert global_batches(first, 3) == whole[:3]
    state = first[0].state_dict()
    assert state == {"epoch": 0, "consumed": 12, "samples": 32, "seed": 0, "shuffle": True}
    second = loaders(data, after, 4 // after)
    for loader in second:
        loader.load_state_dict(state)
        assert len(loader) == 5
    assert global_batches(second, 5) == whole[3:]


def test_steps_do_not_wait_for_reads() -> None:
    class Slow:
        """Takes as long as a step."""

        def __len__(self) -> int:
            return 20

        def gather(self, indices: Any) -> Any:
            time.sleep(0.02)
            return indices

    (loader,) = loaders(Slow(), 1, 1, ahead=4, threads=2)
    for _ in range(2):
        for _ in loader:
            time.sleep(0.02)
    assert loader.waiting_share < 0.15, "the second epoch's first batches were read in the first"
    (unread,) = loaders(Slow(), 1, 1, ahead=1)
    for _ in unread:
        assert unread.waiting_share <= 1
    assert unread.waiting_share > 0.7


def test_an_epoch_ends_with_its_last_batch() -> None:
    """Whether or not another one is asked for; but a state that is loaded then holds."""
    (loader,) = loaders(np.arange(8), 1)
    assert [len([*zip(range(4), loader, strict=False)]) for _ in range(3)] == [4, 4, 4]
    assert loader.state_dict() == {
        "epoch": 3,
        "consumed": 0,
        "samples": 8,
        "seed": 0,
        "shuffle": True,
    }
    for number, _ in enumerate(loader):
        if number == 3:
            assert loader.state_dict()["consumed"] == 8
            loader.load_state_dict({"epoch": 3, "consumed": 4})
            break
    assert len([*loader]) == 2


def test_errors_of_loaders() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def gather(self, indices: Any) -> Any:
            if 3 in indices:
                raise OSError("the disk is gone")
            return indices

    (loader,) = loaders(Broken(), 1, 1, shuffle=False)
    its = iter(loader)
    assert [next(its).tolist() for _ in range(3)] == [[0], [1], [2]]
    with pytest.raises(OSError, match="the disk is gone"):
        next(its)
    state = {"epoch": 0, "consumed": 3, "samples": 4, "seed": 0, "shuffle": False}
    assert loader.state_dict() == state
    for options, text in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"ahead": 0}, "ahead is 0"),
        ({"threads": True}, "threads is True"),
    ):
        with pytest.raises(ringdl.UsageError, match=text):
            loaders(np.arange(3), 1, **options)  # type: ignore[arg-type]
    for data, text in (
        ([1, 2, 3], r"\[1, 2, 3\] is no array of samples"),
        (np.ones(()), r"array\(1.\) is no array of samples"),
        ({}, "there are no arrays"),
        (np.arange(1), "of 1 samples 2 ranks cannot have the same number each"),
    ):
        with pytest.raises(ringdl.UsageError, match=text):
            loaders(data, 2)
    with pytest.raises(ringdl.UsageError, match="different numbers of rows"):
        loaders({"x": np.zeros(2), "y": np.zeros(3)}, 1)
    (loader,) = loaders(np.arange(3), 1)
    with pytest.raises(ringdl.UsageError, match="7 of 3 samples"):
        loader.load_state_dict({"epoch": 0, "consumed": 7})
    with pytest.raises(ringdl.UsageError, match="this is no state of a loader"):
        loader.load_state_dict({"epoch": 1})
    others: tuple[dict[str, Any], ...] = ({}, {"seed": 1}, {"shuffle": False})
    for count, options in zip((9, 3, 3), others, strict=True):
        (other,) = loaders(np.arange(count), 1, **options)
        loader.load_state_dict(other.state_dict())  # of an epoch's begin
        next(iter(other))
        with pytest.raises(ringdl.UsageError, match="so it does not say what is left of this one"):
            loader.load_state_dict(other.state_dict())


def test_a_state_is_loaded_in_a_loop() -> None:
    """That ends the loop; the next one begins there."""
    (loader,) = loaders(np.arange(10), 1, 2, shuffle=False)
    state = loader.state_dict()
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            loader.load_state_dict(state)
    assert seen == [[0, 1], [2, 3], [4, 5]]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert loader.epoch == 1


def test_counts_may_be_numpys() -> None:
    alone = SimpleNamespace(rank=0, size=1)
    assert len(ShardedSampler(np.int64(4), communicator=alone)) == 4  # type: ignore[arg-type]
    assert len(loaders(np.arange(4), 1, batch_size=np.int64(2))[0]) == 2  # type: ignore[arg-type]


def test_objects_that_gather_are_asked_to() -> None:
    """Also those that have `__getitem__`, as datasets of torch."""

    class Doubled:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            raise AssertionError("not asked for")

        def gather(self, indices: np.ndarray) -> np.ndarray:
            return 2 * indices

    alone = SimpleNamespace(rank=0, size=1)
    loader = Loader(Doubled(), 4, shuffle=False, communicator=alone)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6]]


def test_the_last_batch_may_be_counted_whole() -> None:
    alone = SimpleNamespace(rank=0, size=1)
    sampler = ShardedSampler(100, communicator=alone)  # type: ignore[arg-type]
    sampler.resume(0, 128)
    assert len(sampler.indices()) == 0


def test_loaders_follow_a_change_of_ranks() -> None:
    """What was read ahead for another number of them is not used."""
    ranks = SimpleNamespace(rank=0, size=4)
    loader = Loader(np.arange(16), 2, shuffle=False, communicator=ranks)  # type: ignore[arg-type]
    assert [x for batch in loader for x in batch.tolist()] == [0, 4, 8, 12]
    ranks.size = 2
    assert [x for batch in loader for x in batch.tolist()] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_tensors_are_arrays() -> None:
    torch = pytest.importorskip("torch")
    (loader,) = loaders(torch.arange(6.0), 1)
    batches = list(loader)
    assert sorted(torch.cat(batches).tolist()) == [0, 1, 2, 3, 4, 5]
    assert 0 <= loader.waiting_share <= 1


def test_transforms_run_in_threads() -> None:
    seen = set()

    def transform(batch: Any) -> Any:
        seen.add(threading.current_thread().name)
        return batch + 100

    (loader,) = loaders(np.arange(6), 1, transform=transform)
    assert sorted(x for batch in loader for x in batch.tolist()) == list(range(100, 106))
    assert all(name.startswith("ringdl.data") for name in seen)


def test_a_dropped_loader_keeps_nothing() -> None:
    gc.collect()
    gc.disable()
    try:
        (loader,) = loaders(np.arange(8), 1, ahead=3)
        next(iter(loader))
        assert len([*loader]) == 3
        dropped = weakref.ref(loader)
        del loader
        assert dropped() is None
        deadline = time.monotonic() + 10
        while any(each.name.startswith("ringdl.data") for each in threading.enumerate()):
            assert time.monotonic() < deadline, "its thread goes on"
            time.sleep(0.01)
    finally:
        gc.enable()


def test_python_ends_without_reading_what_is_ahead() -> None:
    script = """
import time, ringdl.data
class Slow:
    def __len__(self): return 40
    def gather(self, indices):
        time.sleep(0.05 if indices[0] < 30 else 2)
        return indices
ringdl.init()
for batch in ringdl.data.Loader(Slow(), 1, ahead=9, shuffle=False):
    if batch[0] == 29: break
"""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert time.monotonic() - began < 15, "nine batches of two seconds were read"


def test_a_loop_is_not_gone_on_with_in_a_forked_process() -> None:
    script = """
import os, numpy as np, ringdl.data
ringdl.init()
its = iter(ringdl.data.Loader(np.arange(8), 1, ahead=1))
next(its)
child = os.fork()
if child == 0:
    try:
        for _ in its:
            pass
    except ringdl.UsageError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert len([*its]) == 7
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_seeds_are_not_negative() -> None:
    with pytest.raises(ringdl.UsageError, match="seed is -1"):
        loaders(np.arange(8), 1, seed=-1)
