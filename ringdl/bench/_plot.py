"""The plot: bus bandwidth over size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringdl.bench._collectives import bandwidths
from ringdl.bench._machine import Machine
from ringdl.bench._peers import COPIES
from ringdl.bench._report import Row, binary, place
from ringdl.bench._timing import Measured, summarize


def draw(path: str, rows: Sequence[Row], machine: Machine) -> None:
    """Draw ringdl's collective and what took turns with it, but no copies. Needs matplotlib.

    Lines are medians; the band around a line is from the tenth to the ninetieth percentile.

    Args:
        path: the file; its suffix says which kind.
        rows: what was measured.
        machine: where.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for label, points in lines_of(rows):
        sizes, low, middle, high = zip(*points, strict=True)
        axes.plot(sizes, middle, marker="o", markersize=3, label=label)
        axes.fill_between(sizes, low, high, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda size, _: binary(int(size)))
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(f"{rows[0].case.collective}: {place(machine)}\n{machine.cpu}", fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def lines_of(
    rows: Sequence[Row],
) -> Iterator[tuple[str, list[tuple[int, float, float, float]]]]:
    """The lines: a label, and points of size and bus bandwidth (p10, median and p90 of the time).

    What has no bandwidth, as one rank alone or an empty array, has no point.
    """
    by_kind: dict[tuple[str, str | None, int | None], list[Row]] = {}
    for row in rows:
        by_kind.setdefault((row.case.dtype.name, row.case.op, row.case.root), []).append(row)
    for (dtype, op, root), of_kind in by_kind.items():
        suffix = f" {dtype} {op or ''}{'' if root is None else root}".rstrip() * (len(by_kind) > 1)
        names = dict.fromkeys(m.name for row in of_kind for m in row.all if m.name not in COPIES)
        for name in names:
            points = [
                point
                for row in of_kind
                for measured in row.all
                if measured.name == name and not measured.refusal
                for point in _points(row, measured)
            ]
            if points:
                yield name + suffix, points


def _points(row: Row, measured: Measured) -> Iterator[tuple[int, float, float, float]]:
    times = summarize(measured.seconds)
    slow, middle, fast = (
        bandwidths(row.case, seconds)[1] for seconds in (times.p90, times.median, times.p10)
    )
    if slow > 0:
        yield row.case.shape.size, slow, middle, fast
