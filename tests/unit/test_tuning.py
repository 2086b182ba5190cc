"""What algorithms are chosen by: the table, where it comes from, how it is fitted."""

import json
from pathlib import Path
from typing import get_args

import pytest

import ringdl
from ringdl import _engine, _tune, _tuning
from ringdl._communicator import Communicator
from ringdl._engine import Algorithm
from ringdl._reductions import AlgorithmName
from ringdl._settings import read_settings
from ringdl._tuning import Tuning, default_tuning, find_tuning, parse_tuning, summary, topology

ONE_HOST, TWO_HOSTS, FOUR_HOSTS = [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3]


def table(**between: tuple[float, float]) -> Tuning:
    inside = default_tuning(1).costs["inside"]
    return Tuning({"inside": inside, "between": between}, 32 << 10)


def test_defaults_take_few_steps_for_small_arrays_and_few_bytes_for_large_ones() -> None:
    tuning = default_tuning(4)
    for hosts, small, large in (
        (ONE_HOST, "direct", "direct"),
        (TWO_HOSTS, "doubling", "hierarchical"),
        (FOUR_HOSTS, "doubling", "ring"),
    ):
        assert tuning.choose(256, hosts) == small
        assert tuning.choose(64 << 20, hosts) == large


def test_the_cheapest_by_the_lines_is_chosen() -> None:
    # Four hosts: doubling takes 2 steps and 2 bytes for each, the ring 6 steps and 1.5 bytes.
    tuning = table(ring=(10e-6, 1e-9), doubling=(10e-6, 8e-9))  # 60 us + 1.5 n; 20 us + 16 n
    assert tuning.choose(2700, FOUR_HOSTS) == "doubling"
    assert tuning.choose(2800, FOUR_HOSTS) == "ring"


@pytest.mark.parametrize(
    ("step", "byte", "size"),
    [  # four hosts: 6 steps, and 1.5 times the bytes; 50 * 6 / 1.5 = 200 times step / byte
        (30e-6, 8e-9, 1 << 20),  # 1 Gbit/s: 750 kB
        (30e-6, 40e-9, 256 << 10),  # 150 kB
        (5e-6, 0.08e-9, 16 << 20),  # 100 Gbit/s: 12.5 MB
        (30e-6, 0.08e-9, 25 << 20),  # 75 MB
        (0.0, 8e-9, 256 << 10),
        (30e-6, 0.0, 25 << 20),
    ],
)
def test_buckets_are_small_as_far_as_steps_allow(step: float, byte: float, size: int) -> None:
    tuning = table(ring=(step, byte), hierarchical=(step, byte))
    assert tuning.bucket_bytes(FOUR_HOSTS) == size
    assert tuning.bucket_bytes(ONE_HOST) == 25 << 20
    assert 256 << 10 <= tuning.bucket_bytes(TWO_HOSTS) <= size


def test_what_cannot_be_is_not_chosen() -> None:
    tuning = table(ring=(1.0, 1.0), doubling=(1e-9, 0.0), hierarchical=(1e-9, 0.0))
    assert tuning.choose(32 << 10, FOUR_HOSTS) == "doubling"
    assert tuning.choose((32 << 10) + 4, FOUR_HOSTS) == "ring"  # one message takes no more
    assert tuning.choose((32 << 10) + 4, TWO_HOSTS) == "hierarchical"


def test_what_a_table_leaves_out_is_not_chosen() -> None:
    assert table(ring=(1.0, 1.0)).choose(256, FOUR_HOSTS) == "ring"


@pytest.mark.parametrize(
    ("nccl_us", "least"),
    [((9, 9, 9), 1), ((11, 9, 9), 2), ((9, 11, 9), 4), ((9, 9, 10), None), ((11, 11, 11), None)],
)
def test_nccl_is_chosen_from_where_it_is_always_faster(
    nccl_us: tuple[float, ...], least: int | None
) -> None:
    samples = [(size, 10.0, us) for size, us in zip((1, 2, 4), nccl_us, strict=True)]
    assert _tune.nccl_bytes(samples) == least


@pytest.mark.parametrize("nccl_bytes", [None, 1 << 20])
def test_a_table_survives_being_written(nccl_bytes: int | None) -> None:
    tuning = table(ring=(1 / 3, 0.1), doubling=(1e-9, 0.0)).with_nccl(nccl_bytes)
    again = parse_tuning(tuning.to_json(), "here")
    assert again == tuning
    assert again.hash == tuning.hash
    assert again.nccl_bytes == nccl_bytes
    assert again.hash != default_tuning(4).hash


@pytest.mark.parametrize(
    "text",
    [
        "no JSON",
        "[]",
        '{"version": 1}',
        default_tuning(1).to_json().replace('"version": 1', '"version": 2'),
        default_tuning(1).to_json().replace("segment_bytes", "segments"),
        default_tuning(1).to_json().replace("262144", "Infinity"),
        default_tuning(1).to_json().replace("262144", "1.9"),
        default_tuning(1).to_json().replace('"ring"', '"rink"'),
        default_tuning(1).to_json().replace("3e-05", "-3e-05").replace("2.99", "-2.99"),
    ],
)
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(ringdl.UsageError, match=r"this file is no tuning table.*ringdl tune"):
        parse_tuning(text, "this file")


def test_where_a_table_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tuning = table(ring=(1.0, 1.0), doubling=(1.0, 1.0))
    assert find_tuning(None, "Open MPI", FOUR_HOSTS) == default_tuning(4)
    path = _tuning.cache_path("Open MPI", FOUR_HOSTS, 4)
    path.parent.mkdir()
    path.write_text(tuning.to_json())
    assert find_tuning(None, "Open MPI", FOUR_HOSTS) == tuning
    assert find_tuning(None, "Open MPI", TWO_HOSTS) == default_tuning(2)
    assert find_tuning(None, "Open MPI", FOUR_HOSTS, 1) == default_tuning(1), "no shared memory"
    assert find_tuning(None, "MPICH", FOUR_HOSTS) == default_tuning(4)
    assert find_tuning("default", "Open MPI", FOUR_HOSTS) == default_tuning(4)
    assert find_tuning(tuning.to_json(), "MPICH", ONE_HOST) == tuning
    assert find_tuning(str(path), "MPICH", ONE_HOST) == tuning
    path.write_bytes(b"\xff\xfe\x00garbage")
    with pytest.warns(RuntimeWarning, match="is no tuning table"):
        assert find_tuning(None, "Open MPI", FOUR_HOSTS) == default_tuning(4)
    path.write_text(tuning.to_json()[:-1])
    with pytest.warns(RuntimeWarning, match="is no tuning table"):
        assert find_tuning(None, "Open MPI", FOUR_HOSTS) == default_tuning(4)
    with pytest.raises(ringdl.UsageError, match="RINGDL_TUNING='/nowhere'"):
        find_tuning("/nowhere", "MPICH", ONE_HOST)


def test_a_table_is_not_written_where_a_folder_is(tmp_path: Path) -> None:
    assert _tune._lack(tmp_path / "new" / "table.json") == ""
    assert "it is a folder" in _tune._lack(tmp_path)
    assert "it is a folder" in _tune._lack(Path())


def test_topologies_have_names() -> None:
    assert topology(ONE_HOST) == "4"
    assert topology([0, 0, 0, 7]) == "3+1"
    assert topology([i // 8 for i in range(512)]) == "64x8"


def test_the_summary_names_what_is_chosen() -> None:
    assert summary(default_tuning(1), ONE_HOST) == "direct"
    for step, size in ((1e-6, "256 B"), (10e-6, "2 KiB")):
        tuning = table(ring=(step, 1e-9), doubling=(step, 8e-9))
        assert summary(tuning, FOUR_HOSTS) == f"doubling up to {size}, ring above"
    assert [_tuning._size(1 << bits) for bits in (9, 10, 19, 21)] == [
        *("512 B", "1 KiB", "512 KiB", "2 MiB")
    ]


@pytest.mark.parametrize("algorithm", [Algorithm.ring, Algorithm.doubling, Algorithm.direct])
def test_a_line_is_found_again(algorithm: Algorithm) -> None:
    samples = []
    for size in _tune.SIZES:
        steps, moved = _engine.effort_of_allreduce(algorithm, size, ONE_HOST)
        samples.append((size, steps * 7e-6 + moved * 3e-10))
    assert _tune.fit(algorithm, samples, ONE_HOST) == pytest.approx((7e-6, 3e-10))


def test_no_cost_is_negative() -> None:
    falling = [(256, 30e-6), (1 << 20, 10e-6)]
    step, byte = _tune.fit(Algorithm.direct, falling, ONE_HOST)
    assert step > 0
    assert byte == 0


def test_ranks_measure_and_agree(run_ranks, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(_tune, "SECONDS_EACH", 0.001)
    monkeypatch.setattr(_tune, "SIZES", (256, 4096, 65536))

    def function(communicator: Communicator) -> tuple[Tuning, Tuning]:
        measured, samples = _tune.measure(communicator)
        if communicator.rank == 0:
            text = _tune.describe(measured, samples, communicator.memory_hosts())
            assert "65,536" in text
        return measured, communicator.tuning

    tables = run_ranks(3, function)
    assert len({table.hash for pair in tables for table in pair}) == 1
    assert set(json.loads(tables[0][0].to_json())["costs"]["between"]) >= {"ring", "doubling"}


def test_settings_name_an_algorithm() -> None:
    assert read_settings({"RINGDL_ALGORITHM": "ring"}).algorithm == "ring"
    with pytest.raises(ringdl.UsageError, match="RINGDL_ALGORITHM='mpi' is not one of ring"):
        read_settings({"RINGDL_ALGORITHM": "mpi"})


def test_type_checkers_know_every_algorithm() -> None:
    assert set(get_args(AlgorithmName)) == set(Algorithm.__members__)
