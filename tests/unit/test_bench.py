"""The benchmark's pure parts: sizes, shapes, bandwidths, expectations, times, lines."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest

from ringdl import Communicator, UsageError, cli
from ringdl.bench import _arguments, _arrays, _machine, _plan, _report, _timing, _values
from ringdl.bench._arrays import Slot
from ringdl.bench._collectives import Case, bandwidths, bus_factor, numpy_dtype, shape_of
from ringdl.bench._timing import Measured, meeting_of
from tests.conftest import RunRanks

KIB = 1 << 10
DTYPES = _plan.dtype_names("all")


def case_of(
    collective: str = "allreduce",
    size: int = 4096,
    dtype: str = "float32",
    op: str | None = "sum",
    ranks: int = 2,
    root: int | None = None,
) -> Case:
    kind = numpy_dtype(dtype)
    return Case(collective, kind, op, root, ranks, shape_of(collective, size, kind.itemsize, ranks))


def plan_of(*words: str, ranks: int = 2) -> _plan.Plan:
    return _plan.parse(words, ranks)


@pytest.mark.parametrize(
    ("text", "count"), [("8", 8), ("1K", KIB), ("1.5m", 1536 * KIB), ("2G", 2 << 30)]
)
def test_sizes_have_suffixes(text: str, count: int) -> None:
    assert _arguments.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "K", "64X", "0", "-1M", "nan", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no size"):
        _arguments.parse_bytes(text)


def test_sizes_grow_up_to_the_largest() -> None:
    assert _plan.size_list(1, 100, factor=4) == (1, 4, 16, 64)
    assert _plan.size_list(4, 16, factor=2) == (4, 8, 16)
    assert _plan.size_list(10, 40, step=15) == (10, 25, 40)
    assert _plan.size_list(7, 7, factor=2) == (7,)


def test_the_plan_without_flags() -> None:
    plan = plan_of("allreduce")
    assert plan.sizes == tuple(KIB << 2 * power for power in range(9))
    assert (plan.dtypes, plan.ops, plan.roots) == (("float32",), ("sum",), (None,))
    assert (plan.iterations, plan.checks, plan.memory) == (20, 1, "ordinary")
    assert plan.command == "python -m ringdl bench allreduce"


def test_the_plan_with_many() -> None:
    plan = plan_of("reducescatter", "-d", "half", "-o", "all", "-i", "1K", "-e", "3K")
    assert (plan.dtypes, plan.ops) == (("float16",), ("sum", "prod", "max", "min", "avg"))
    assert plan.sizes == (1 * KIB, 2 * KIB, 3 * KIB)
    plan = plan_of("broadcast", "-r", "all", "-o", "max", "-d", "all", ranks=3)
    assert (plan.ops, plan.roots) == ((None,), (0, 1, 2))
    assert "bfloat16" in plan.dtypes
    algorithms = plan_of("allreduce", "--algorithm", "all").algorithms
    assert {"ring", "doubling", "mpi"} <= set(algorithms)
    assert plan_of("allreduce", "--algorithm", "ring,mpi").algorithms == ("ring", "mpi")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["allreduce", "-d", "float8"], "-d float8: there is no such dtype; take one of float64"),
        (["allreduce", "-b", "2M", "-e", "1M"], "-b 2097152 is larger than -e 1048576"),
        (["allreduce", "-f", "1"], "-f 1: sizes only grow by a factor of at least 2"),
        (["allreduce", "-f", "2", "-i", "1K"], "not allowed with argument"),
        (["allreduce", "-b", "4Q"], "'4Q' is no size"),
        (["allreduce", "-n", "0"], "-n 0: at least 1"),
        (["allreduce", "-c", "-1"], "-c -1: at least 0"),
        (["allreduce", "--peers", "mpi,ncl"], "--peers: there is no 'ncl'; take some of mpi, gloo"),
        (
            ["allreduce", "--peers", "nccl"],
            "nccl: it reduces no arrays in the memory of --device c",
        ),
        (["allreduce", "--algorithm", "tree"], "--algorithm: there is no 'tree'"),
        (["broadcast", "--algorithm", "ring"], "only allreduce has several, not broadcast"),
        (["broadcast", "-r", "2"], "-r 2 is not a rank; ranks are 0 to 1"),
        (["allreduce", "-o", "xor"], "invalid choice: 'xor'"),
        (["reduce"], "invalid choice: 'reduce'"),
        ([], "arguments are required"),
        (["allreduce", "-J", "/no/such/folder/x.json"], "-J /no/such/folder/x.json cannot be wri"),
        (["allreduce", "--plot", "x.json"], "--plot x.json: end it with .png"),
    ],
)
def test_plans_that_cannot_be_carried_out(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as raised:
        plan_of(*words)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_peers_need_several_ranks() -> None:
    with pytest.raises(UsageError, match="one rank alone"):
        plan_of("allreduce", "--peers", "mpi", ranks=1)


def test_a_plot_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'ringdl\[bench\]'"):
        plan_of("allreduce", "--plot", str(tmp_path / "x.png"))


def test_files_are_tried_and_not_left_behind(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    plan = plan_of("allreduce", "-J", str(file), "-n", "3")
    assert not file.exists()
    assert plan.command == "python -m ringdl bench allreduce -J x.json -n 3"
    assert plan_of("allreduce", f"--output_file={file}").command.endswith(" --output_file=x.json")
    file.write_text("earlier")
    plan_of("allreduce", "-J", str(file))
    assert file.read_text() == "earlier"
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        plan_of("allreduce", "-J", str(tmp_path))


def test_shapes_are_those_of_nccl_tests() -> None:
    def shape(collective: str, size: int, ranks: int) -> tuple[int, int, int, int]:
        found = shape_of(collective, size, 4, ranks)
        return found.size, found.count, found.send, found.receive

    assert shape("allreduce", 1030, 3) == (1028, 257, 257, 257)
    assert shape("broadcast", 1024, 3) == (1024, 256, 256, 256)
    assert shape("allgather", 1024, 3) == (1008, 84, 84, 252)  # parts of whole 16 bytes
    assert shape("reducescatter", 1024, 3) == (1008, 84, 252, 84)
    assert shape("alltoall", 1024, 3) == (1008, 84, 252, 252)
    assert shape("alltoall", 16, 2) == (0, 0, 0, 0)


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("allreduce", 4) == 1.5
    assert bus_factor("broadcast", 4) == 1.0
    for collective in ("reducescatter", "allgather", "alltoall"):
        assert bus_factor(collective, 4) == 0.75


def test_bandwidths_are_in_gigabytes() -> None:
    assert bandwidths(case_of(size=4096, ranks=4), 4096e-9) == pytest.approx((1.0, 1.5))
    assert bandwidths(case_of("alltoall", size=4096, op=None), 1e-6) == pytest.approx(
        (4.096, 2.048)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 300])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", _arguments.OPS)
def test_reductions_are_expected_exactly(op: str, dtype: str, ranks: int) -> None:
    """Adding in another order, and in the dtype itself, makes no difference."""
    case = case_of(dtype=dtype, op=op, ranks=ranks, size=64 * numpy_dtype(dtype).itemsize)
    base = _values.base_values(case.dtype, op, ranks)
    [(count, period)] = _values.expected(case, base, rank=0, run=5)
    assert count == 64
    assert period.dtype == case.dtype
    inputs = [np.roll(base, -(rank + 5)) for rank in range(ranks)]
    total = inputs[-1]
    for values in inputs[-2::-1]:
        if dtype == "bool":
            total = total | values if op in ("sum", "max") else total & values
        elif op in ("sum", "avg"):
            total = (total + values).astype(case.dtype)
        else:
            combine = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
            total = combine(total, values).astype(case.dtype)
    if op == "avg" and dtype != "bool":
        total = (total.astype(np.float64) / ranks).astype(case.dtype)
    assert np.array_equal(period, total)


@pytest.mark.parametrize("op", _arguments.OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_rank_and_a_late_result_would_be_noticed(op: str, dtype: str) -> None:
    case = case_of(dtype=dtype, op=op, ranks=4)
    base = _values.base_values(case.dtype, op, 4)
    values = [np.roll(base, -rank) for rank in range(4)]
    right = _values.reduced(values, op)
    for rank in range(4):
        others = [value for other, value in enumerate(values) if other != rank]
        if op != "avg":
            assert not np.array_equal(_values.reduced(others, op), right)
    [(_, next_run)] = _values.expected(case, base, rank=0, run=1)
    assert not np.array_equal(next_run, right)


@pytest.mark.parametrize("dtype", ["float32", "bool", "int8", "bfloat16"])
@pytest.mark.parametrize(
    "collective", ["allreduce", "reducescatter", "allgather", "broadcast", "alltoall"]
)
def test_expectations_follow_the_arrays(collective: str, dtype: str) -> None:
    """What one rank is to get, from what all ranks write, by NumPy."""
    ranks, run, size = 3, 7, 3000 * numpy_dtype(dtype).itemsize
    op = "max" if collective in ("allreduce", "reducescatter") else None
    root = 1 if collective == "broadcast" else None
    case = case_of(collective, size, dtype, op, ranks, root)
    inputs = [np.empty(case.shape.send, case.dtype) for _ in range(ranks)]
    for rank, array in enumerate(inputs):
        _values.Values(case, rank).write(array, run)
    for rank in range(ranks):
        part = case.shape.count
        if op is not None:
            result = np.max(inputs, axis=0)
            result = result if collective == "allreduce" else result[rank * part :][:part]
        elif collective == "broadcast":
            result = inputs[1].copy()
        elif collective == "allgather":
            result = np.concatenate(inputs)
        else:
            result = np.concatenate([array[rank * part :][:part] for array in inputs])
        values = _values.Values(case, rank)
        assert values.count_wrong(result, run) == 0
        assert values.count_wrong(result, run + 1) > 0
        result[[0, -1]] = result[[0, -1]] == 0
        assert values.count_wrong(result, run) == 2
        assert values.count_wrong(result[:-1], run) == case.shape.receive


def test_long_results_are_compared_to_the_end() -> None:
    case = case_of(size=4 << 20)
    values = _values.Values(case, 0)
    [(count, period)] = _values.expected(case, _values.base_values(case.dtype, "sum", 2), 0, 3)
    result = np.resize(period, count)
    assert values.count_wrong(result, 3) == 0
    result[::1000] += 1
    assert values.count_wrong(result, 3) == len(result[::1000])


def test_times_are_summed_up() -> None:
    times = _timing.summarize([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0])
    assert (times.median, times.p10, times.p90) == pytest.approx((6.0, 2.0, 10.0))
    assert _timing.summarize([2.5]) == _timing.Times(2.5, 2.5, 2.5)


def test_arrays_take_turns_over_the_cache() -> None:
    count = _arrays.slot_count
    assert count(32 * KIB, runs=1000, cache_bytes=1 << 20, memory_bytes=1 << 30) == 33
    assert count(32 * KIB, runs=10, cache_bytes=1 << 20, memory_bytes=1 << 30) == 10
    assert count(8 << 20, runs=10, cache_bytes=1 << 20, memory_bytes=1 << 30) == 2
    assert count(1 << 20, runs=99, cache_bytes=1 << 30, memory_bytes=16 << 20) == 12
    assert count(1 << 20, runs=99, cache_bytes=1 << 30, memory_bytes=5 << 20) == 0
    assert count(0, runs=99, cache_bytes=1 << 20, memory_bytes=1 << 20) == 2


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_everybody_has_every_place_and_follows_everybody(count: int) -> None:
    orders = [_timing.order_of(turn, count) for turn in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    for position in range(count):
        assert sorted(order[position] for order in orders) == sorted([*range(count)] * 2)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert dict(pairs) == dict.fromkeys(permutations(range(count), 2), 2)


def test_the_slowest_rank_is_what_counts() -> None:
    """One rank, whose meeting adds what another would have taken."""
    ran = []

    def run(slot: Slot) -> None:
        ran.append(slot.source[0])

    slots = _arrays.make_slots(case_of(), 2, "ordinary", with_targets=False)
    rotation = _arrays.Rotation(slots, lambda array, run: array.fill(run))
    meeting = _timing.Meeting(lambda: None, lambda array: array + 1.0, lambda number: number)
    ticks: list[int] = []
    contenders = [_timing.Contender("a", run), _timing.Contender("b", run)]
    seconds = _timing.timed(contenders, rotation, meeting, 3, 2, ticks.append)
    assert seconds.shape == (2, 3)
    assert ((seconds > 1.0) & (seconds < 2.0)).all()
    assert ran == list(range(18)), "two settling runs before each"
    assert ticks == [0, 1, 2]


def test_targets_have_room_for_a_copy_of_the_whole_size() -> None:
    case = case_of("allgather", 4096, op=None)
    [slot] = _arrays.make_slots(case, 1, "ordinary", with_targets=True)
    assert (len(slot.source), len(slot.target)) == (512, 1024)
    assert slot.source_bytes.shape == slot.target_bytes.shape == (4096,)
    assert np.shares_memory(slot.source, slot.source_bytes)


def test_caches_are_read(tmp_path: Path) -> None:
    caches = [("1", "Data", "32K"), ("1", "Instruction", "64K"), ("2", "Unified", "1024K")]
    caches += [("3", "Unified", "32M"), ("4", "Unified", "?")]
    for number, (level, kind, size) in enumerate(caches):
        folder = tmp_path / f"sys/devices/system/cpu/cpu0/cache/index{number}"
        folder.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(text + "\n")
    expected = {"L1": 32 * KIB, "L2": 1024 * KIB, "L3": 32 << 20}
    assert _machine.read_caches(tmp_path) == expected
    assert _machine.read_caches(tmp_path / "nothing") == {}


def test_memory_is_what_the_cgroup_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:    2048 kB\n")
    assert _machine.available_memory(tmp_path) == 2048 * KIB
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000\n")
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert _machine.available_memory(tmp_path) == 2048 * KIB
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("5000\n")
    assert _machine.available_memory(tmp_path) == 4000
    job = tmp_path / "sys/fs/cgroup/slurm/job_7"
    job.mkdir(parents=True)
    (job / "memory.max").write_text("3000\n")
    (job / "memory.current").write_text("500\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/slurm/job_7/step_0\n")
    assert _machine.available_memory(tmp_path) == 2500


def test_ranks_without_mpi_meet(run_ranks: RunRanks) -> None:
    def meet(communicator: Communicator) -> tuple[list[list[float]], int]:
        meeting = meeting_of(None, communicator)
        meeting.barrier()
        slowest = meeting.slowest(np.array([[float(communicator.rank)]]))
        return slowest.tolist(), meeting.total(communicator.rank)

    assert run_ranks(3, meet) == [([[2.0]], 3)] * 3


def test_what_a_machine_is_called() -> None:
    assert _machine.cpu_model("processor : 0\nmodel name\t: AMD  EPYC 1\nflags : x") == "AMD EPYC 1"
    assert _machine.cpu_model("nothing") == os.uname().machine
    assert _machine.kernel_version("6.1.0-18-cloud-amd64") == "6.1.0"


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (1.234, 7, "   1.23"),
        (12345.67, 7, "12345.7"),
        (1234567.8, 7, "1234568"),
        (0.0, 6, "  0.00"),
        (12345678.0, 7, "1.2e+07"),
    ],
)
def test_numbers_keep_their_width(value: float, width: int, text: str) -> None:
    assert _report.fixed(value, width) == text


def row_of(case: Case, *others: Measured, wrong: int = 0) -> _report.Row:
    out = Measured("ringdl out of place", [4e-6, 5e-6, 6e-6], wrong)
    within = Measured("ringdl in place", [2e-6, 2e-6, 4e-6], 0)
    return _report.Row(case, out, within, list(others))


def test_the_table_has_nccl_tests_columns() -> None:
    titles, names, units = _report.table_head()
    line = _report.table_line(row_of(case_of()))
    assert names.split()[1:8] == ["size", "count", "type", "redop", "root", "time", "algbw"]
    assert names.split()[8:12] == ["busbw", "#wrong", "p10", "p90"]
    assert len(names) == len(units) == len(line)
    assert line.split()[:9] == ["4096", "1024", "float32", "sum", "-1", "5.00", "0.82", "0.82", "0"]
    assert line.split()[11:] == ["2.00", "2.05", "2.05", "0", "2.00", "3.60"]
    assert titles.split() == ["#", "out-of-place", "in-place"]
    for name in ("size", "count", "type", "redop", "root"):  # right-aligned above their numbers
        end = names.index(name) + len(name)
        assert line[end - 1] != " "
        assert line[end] == " "


def test_a_collective_without_an_in_place_form() -> None:
    row = replace(row_of(case_of("alltoall", op=None)), in_place=None)
    assert _report.table_line(row).split()[3:5] == ["none", "-1"]
    assert _report.table_line(row).split()[11:] == ["N/A"] * 6
    assert row.compared is row.out_of_place


def test_ratios_are_above_one_where_ringdl_is_faster() -> None:
    row = row_of(
        case_of(),
        Measured("mpi", [3e-6] * 3, 0),
        Measured("gloo", refusal="no such thing"),
        Measured("copyto", [1e-6] * 3),
        Measured("stream_copy", [0.5e-6] * 3),
    )
    lines = _report.comparison([row, row])[:4] + _report.comparison([row, row])[5:]
    assert lines[2].split() == ["#", "size", "ringdl", "mpi", "gloo", "memcpy"]
    expected = ["4096", "2.00", "3.00", "1.50", "N/A", "N/A", "0.50", "0.25"]
    assert lines[4].split() == expected
    assert lines[5:] == ["# N/A for gloo (float32): no such thing"]
    assert len(lines[2]) == len(lines[3]) == len(lines[4])
    assert _report.comparison([row_of(case_of())]) == []


def test_kinds_are_named_where_they_differ() -> None:
    rows = [row_of(case_of(op=op), Measured("mpi", [3e-6] * 3, 0)) for op in ("sum", "max")]
    lines = _report.comparison(rows)
    assert lines[2].split() == ["#", "size", "type", "redop", "root", "ringdl", "mpi"]
    assert lines[5].split()[:5] == ["4096", "float32", "max", "-1", "2.00"]
    assert len(lines[2]) == len(lines[3]) == len(lines[4]) == len(lines[5])


def test_wrong_elements_are_summed_up() -> None:
    rows = [row_of(case_of(), Measured("mpi", [1e-6], 2), wrong=3), row_of(case_of())]
    summary = _report.summary_of(rows)
    assert summary.wrong == 5
    assert summary.busbw == pytest.approx((4.096 / 5 + 4.096 / 2) / 2)
    text = "\n".join(_report.foot(summary, rows))
    assert "# Out of bounds values : 5 FAILED (ringdl out of place: 3, mpi: 2)" in text
    good = _report.foot(_report.summary_of([row_of(case_of())]), [row_of(case_of())])
    assert "# Out of bounds values : 0 OK" in good


def test_the_plot_has_a_line_for_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from ringdl.bench import _plot

    rows = [
        row_of(case_of(size=size), Measured("mpi", [3e-6] * 3, 0), Measured("copyto", [1e-6] * 3))
        for size in (4096, 8192)
    ]
    lines = dict(_plot.lines_of(rows))
    assert list(lines) == ["ringdl out of place", "ringdl in place", "mpi"]
    assert [point[0] for point in lines["mpi"]] == [4096, 8192]
    machine = _machine.Machine(
        2, 1, "a CPU", "avx2", 2, 1, False, 0.1, {}, "", "6.1", None, "0", "2", "3"
    )
    _plot.draw(str(tmp_path / "x.png"), rows, machine)
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_alone_from_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import ringdl

    file = tmp_path / "x.json"
    words = ["bench", "allgather", "-b", "64", "-e", "4K", "-n", "2", "-w", "0", "-J", str(file)]
    try:
        assert cli.main(words) == 0
        assert cli.main(["bench", "allgather", "-d", "float7"]) == 2
    finally:
        ringdl.shutdown()
    out, errors = capsys.readouterr()
    assert "# Out of bounds values : 0 OK" in out
    assert errors.startswith("ringdl: -d float7: there is no such dtype")
    found = json.loads(file.read_text())
    assert [row["size"] for row in found["results"]] == [64, 256, 1024, 4096]
    assert str(tmp_path) not in file.read_text()


def test_the_other_commands_do_without_numpy() -> None:
    program = "import sys, ringdl.cli; print('numpy' in sys.modules, 'ringdl.bench' in sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["False", "False"]
