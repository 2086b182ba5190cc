"""What is printed and saved: nccl-tests' table, the comparison beside it, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ringdl.bench._arrays import CACHE_MULTIPLE
from ringdl.bench._collectives import Case, bandwidths
from ringdl.bench._machine import Machine
from ringdl.bench._peers import COPIES
from ringdl.bench._plan import Plan
from ringdl.bench._timing import Measured, Times, summarize

_THREE = ("time", "p10", "p90")


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        case: which.
        out_of_place: ringdl, into a new array.
        in_place: ringdl, in place; None where it has no such form.
        others: what took turns with them: algorithms, peers, copies.
    """

    case: Case
    out_of_place: Measured
    in_place: Measured | None
    others: list[Measured] = field(default_factory=list)

    @property
    def compared(self) -> Measured:
        """What the others are compared with: in place if there is that form."""
        return self.in_place or self.out_of_place

    @property
    def all(self) -> list[Measured]:
        """Everything that was asked for."""
        return [self.out_of_place, *filter(None, [self.in_place]), *self.others]


@dataclass(frozen=True)
class Summary:
    """The whole run.

    Attributes:
        wrong: elements, of all checked runs of everything on all ranks.
        busbw: GB/s, the mean over sizes and both forms of ringdl's collective, as in nccl-tests.
    """

    wrong: int
    busbw: float


def summary_of(rows: Sequence[Row]) -> Summary:
    """Add up."""
    wrong = sum(measured.wrong or 0 for row in rows for measured in row.all)
    busbws = [
        bandwidths(row.case, summarize(measured.seconds).median)[1]
        for row in rows
        for measured in filter(None, [row.out_of_place, row.in_place])
    ]
    return Summary(wrong, sum(busbws) / len(busbws))


def head(plan: Plan, machine: Machine, cache_bytes: int) -> list[str]:
    """The comment above the table."""
    cores = f"{machine.cores_usable} core" + "s" * (machine.cores_usable != 1)
    if machine.cores_of_rank_0 < machine.cores_usable:
        cores += f" ({machine.cores_of_rank_0} for each rank)"
    known = "last-level cache" if machine.cache_bytes else "last-level cache (assumed)"
    crowd = ["# More ranks than cores: the figures say how the system schedules."]
    return [
        f"# ringdl {machine.ringdl} {plan.collective}: {place(machine)}",
        f"# {machine.cpu}, {cores}, {known} {binary(cache_bytes)}, {machine.simd}; "
        f"Linux {machine.kernel}, Python {machine.python}, NumPy {machine.numpy}; "
        f"load before: {machine.load}",
        f"# minBytes {plan.sizes[0]} maxBytes {plan.sizes[-1]} step: {plan.step} warmup iters: "
        f"{plan.warmups} iters: {plan.iterations} validation: {plan.checks} memory: {plan.memory}"
        + (f" of {machine.device}" if machine.device else ""),
        "# time is the median of the iterations, p10 and p90 are their spread; each iteration is "
        "timed by itself, on its slowest rank.",
        f"# Arrays are written anew before each, and take turns over "
        f"{binary(CACHE_MULTIPLE * cache_bytes)}.",
        *crowd * machine.crowded,
        "#",
    ]


def place(machine: Machine) -> str:
    """Where it was measured, in few words."""
    hosts = f"{machine.hosts} host" + "s" * (machine.hosts != 1)
    ranks = f"{machine.ranks} rank" + "s" * (machine.ranks != 1)
    return f"{ranks} on {hosts}, {machine.mpi or 'without MPI'}"


def table_head() -> list[str]:
    """The names of the columns, in three lines."""
    left = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
    group = "  {:>7}  {:>6}  {:>6}  {:>6}  {:>7}  {:>7}"
    names = group.format("time", "algbw", "busbw", "#wrong", "p10", "p90")
    units = group.format("(us)", "(GB/s)", "(GB/s)", "", "(us)", "(us)")
    titles = "".join(f"{title:^{len(names)}}" for title in ("out-of-place", "in-place"))
    return [
        (left.format(*[""] * 5) + titles).rstrip(),
        left.format("size", "count", "type", "redop", "root") + 2 * names,
        left.format("(B)", "(elements)", "", "", "") + 2 * units,
    ]


def table_line(row: Row) -> str:
    """One line of the table."""
    case = row.case
    dtype, op, root = _kind(case)
    line = f"{case.shape.size:12}  {case.shape.count:12}  {dtype:>8}  {op:>6}  {root:>6}"
    return line + _group(case, row.out_of_place) + _group(case, row.in_place)


def comparison(rows: Sequence[Row]) -> list[str]:
    """A table of what took turns with ringdl: its time, and how it compares; none if nothing did.

    Of the copies, the faster one.
    """
    names = comparison_names(rows)
    if not names:
        return []
    form = "in place" if rows[0].in_place else "out of place"
    kinds = _kinds(rows)
    lines = [
        "#",
        f"# Compared with ringdl {form}, in turns: time (us), and that over ringdl's: "
        "above 1, ringdl is faster.",
        f"# {'size':>10}{kinds[0]}  {'ringdl':>8}" + "".join(f"  {name:>16}" for name in names),
        f"# {'(B)':>10}{' ' * len(kinds[0])}  {'(us)':>8}"
        + f"  {'(us)':>8} {'ratio':>7}" * len(names),
    ]
    for row, kind in zip(rows, kinds[1:], strict=True):
        base = summarize(row.compared.seconds).median
        line = f"{row.case.shape.size:12}{kind}  {fixed(1e6 * base, 8)}"
        for name in names:
            other = _named(row, name)
            if other is None or other.refusal:
                line += f"  {'N/A':>8} {'N/A':>7}"
            else:
                median = summarize(other.seconds).median
                line += f"  {fixed(1e6 * median, 8)} {fixed(median / base, 7)}"
        lines.append(line)
    refusals: dict[tuple[str, str], str] = {}  # the first of each: it may name a size
    for row in rows:
        for other in row.others:
            if other.refusal:
                refusals.setdefault((other.name, row.case.dtype.name), other.refusal)
    return lines + [
        f"# N/A for {name} ({dtype}): {refusal}" for (name, dtype), refusal in refusals.items()
    ]


def comparison_names(rows: Sequence[Row]) -> list[str]:
    """The columns of the comparison; the copies are one of them, the last."""
    names = dict.fromkeys(measured.name for row in rows for measured in row.others)
    shown = [name for name in names if name not in COPIES]
    return shown + ["memcpy"] * (len(shown) < len(names))


def foot(summary: Summary, rows: Sequence[Row]) -> list[str]:
    """The lines below the table."""
    wrong = {measured.name: 0 for row in rows for measured in row.all if measured.wrong}
    for row in rows:
        for measured in row.all:
            if measured.wrong:
                wrong[measured.name] += measured.wrong
    who = f" ({', '.join(f'{name}: {count}' for name, count in wrong.items())})" if wrong else ""
    return [
        "#",
        f"# Out of bounds values : {summary.wrong} {'FAILED' if summary.wrong else 'OK'}{who}",
        f"# Avg bus bandwidth    : {summary.busbw:g}",
        "#",
    ]


def as_json(plan: Plan, machine: Machine, rows: Sequence[Row]) -> dict[str, Any]:
    """Everything that was measured; names as in nccl-tests' JSON where it has them."""
    summary = summary_of(rows)
    return {
        "command": plan.command,
        "machine": machine.as_dict(),
        "collective": plan.collective,
        "warmup_iters": plan.warmups,
        "iters": plan.iterations,
        "check": plan.checks,
        "memory": plan.memory,
        "device": plan.device,
        "results": [_row_json(row) for row in rows],
        "out_of_bounds": {"count": summary.wrong, "okay": summary.wrong == 0},
        "average_bus_bandwidth": {"bandwidth": summary.busbw},
    }


def fixed(value: float, width: int) -> str:
    """A number right-aligned, with as many decimals as fit, at most two."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.1e}"


def binary(count: int) -> str:
    """Bytes for people: ``"32 MiB"``."""
    for unit, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << unit:
            return f"{count / (1 << unit):.4g} {name}"
    return f"{count} B"


def copied(row: Row) -> Measured | None:
    """The faster copy."""
    copies = [measured for measured in row.others if measured.name in COPIES]
    return min(copies, key=lambda copy: summarize(copy.seconds).median, default=None)


def _named(row: Row, name: str) -> Measured | None:
    if name == "memcpy":
        return copied(row)
    return next((measured for measured in row.others if measured.name == name), None)


def _kinds(rows: Sequence[Row]) -> list[str]:
    """Columns of type, redop and root, with their head; empty if these are the same throughout."""
    columns = [("type", "redop", "root")]
    columns += [_kind(row.case) for row in rows]
    if len(set(columns)) == 2:
        return [""] * len(columns)
    return [f"  {dtype:>8}  {op:>6}  {root:>6}" for dtype, op, root in columns]


def _kind(case: Case) -> tuple[str, str, str]:
    return case.dtype.name, case.op or "none", str(-1 if case.root is None else case.root)


def _group(case: Case, measured: Measured | None) -> str:
    if measured is None:
        return "  {:>7}  {:>6}  {:>6}  {:>6}  {:>7}  {:>7}".format(*["N/A"] * 6)
    times = summarize(measured.seconds)
    algbw, busbw = bandwidths(case, times.median)
    wrong = "N/A" if measured.wrong is None else str(measured.wrong)
    return (
        f"  {fixed(1e6 * times.median, 7)}  {fixed(algbw, 6)}  {fixed(busbw, 6)}  {wrong:>6}"
        f"  {fixed(1e6 * times.p10, 7)}  {fixed(1e6 * times.p90, 7)}"
    )


def _row_json(row: Row) -> dict[str, Any]:
    case = row.case
    return {
        "size": case.shape.size,
        "count": case.shape.count,
        "type": case.dtype.name,
        "redop": case.op or "none",
        "root": -1 if case.root is None else case.root,
        "out_of_place": _measured_json(case, row.out_of_place),
        "in_place": None if row.in_place is None else _measured_json(case, row.in_place),
        "others": {measured.name: _measured_json(case, measured) for measured in row.others},
    }


def _measured_json(case: Case, measured: Measured) -> dict[str, Any]:
    """Times in microseconds, bandwidths in GB/s."""
    if measured.refusal:
        return {"refusal": measured.refusal}
    times: Times = summarize(measured.seconds)
    algbw, busbw = bandwidths(case, times.median)
    return {
        "time": round(1e6 * times.median, 3),
        "p10": round(1e6 * times.p10, 3),
        "p90": round(1e6 * times.p90, 3),
        "alg_bw": round(algbw, 4),
        "bus_bw": round(busbw, 4),
        "nwrong": measured.wrong,
        "times_us": [round(1e6 * seconds, 3) for seconds in measured.seconds],
    }
