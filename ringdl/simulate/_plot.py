"""Plots of scaling. They need matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def draw_allreduce(path: str, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Time over ranks, simulated and by the cost model, per algorithm, and the links' bound."""
    with _axes(path, title, "ms") as axes:
        for name in dict.fromkeys(row["algorithms"][0] for row in rows):
            its = [row for row in rows if row["algorithms"][0] == name]
            ranks = [row["ranks"] for row in its]
            (line,) = axes.plot(ranks, [row["seconds"] * 1e3 for row in its], "o-", label=name)
            model = [row["model_seconds"] * 1e3 for row in its]
            axes.plot(ranks, model, "--", color=line.get_color(), label=f"{name}, cost model")
        bounds = {row["ranks"]: row["link_seconds"] * 1e3 for row in rows if row["hosts"] > 1}
        axes.plot(list(bounds), list(bounds.values()), ":", color="gray", label="links alone")
        axes.set_yscale("log")


def draw_train(path: str, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Scaling efficiency over ranks."""
    with _axes(path, title, "scaling efficiency") as axes:
        axes.plot([row["ranks"] for row in rows], [row["efficiency"] for row in rows], "o-")
        axes.set_ylim(0, 1.05)


@contextmanager
def _axes(path: str, title: str, unit: str) -> Iterator[Any]:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    yield axes
    axes.set_xscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel(unit)
    axes.set_title(f"{title}, simulated", fontsize="medium")
    axes.grid(visible=True, which="both", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
