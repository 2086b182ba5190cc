"""What is printed, written and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdl.compare._run import Curve
from ringdl.compare._summary import Row

_HEAD = (
    "policy",
    "rate",
    "loss",
    "accuracy",
    "(range)",
    "examples",
    "to loss",
    "step",
    "time",
    "time, slow",
    "KB/step",
    "distance",
    "guesses",
)


def table(rows: Sequence[Row]) -> str:
    """Columns of text."""
    lines: list[tuple[str, ...]] = [_HEAD]
    for row in rows:
        middle, low, high = row.accuracy
        lines.append(
            (
                row.policy,
                f"{row.rate:.4g}{'!' * row.rate_is_at_end}",
                f"{row.loss:.3f}",
                f"{middle:.3f}",
                f"{low:.3f}-{high:.3f}",
                *map(_share, (row.examples, row.to_loss, row.step, row.seconds, row.slow_seconds)),
                "-" if math.isnan(row.bytes) else f"{row.bytes / 1e3:.0f}",
                f"{row.distance:.2f}",
                f"{row.disagreement:.1%}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            word.ljust(width) if column == 0 else word.rjust(width)
            for column, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def for_json(its: Any) -> Any:
    """What is to be JSON: six digits of a number, and None for what JSON does not have."""
    if isinstance(its, dict):
        return {key: for_json(value) for key, value in its.items()}
    if isinstance(its, (list, tuple)):
        return [for_json(value) for value in its]
    if not isinstance(its, float):
        return its
    return float(f"{its:.6g}") if math.isfinite(its) else None


def draw(folder: Path, name: str, curves: Sequence[Curve], apart: Sequence[Curve]) -> None:
    """Loss over seconds, examples and bytes, of the first seed. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    bytes_per_example = {each.run.policy: each.bytes_per_example for each in apart}
    figure, axes = plt.subplots(1, 3, figsize=(15, 5), layout="constrained", sharey=True)
    for curve in curves:
        policy = curve.run.policy
        per_example = bytes_per_example.get(policy, math.nan)
        sent = [per_example * had / 1e6 for had in curve.examples]
        for axis, places in zip(axes, (curve.seconds, curve.examples, sent), strict=True):
            axis.plot(places, curve.loss, label=policy, linewidth=1)
    for axis, label in zip(axes, ("seconds", "examples", "MB sent by each rank"), strict=True):
        axis.set_xlabel(label)
        axis.grid(visible=True, alpha=0.3)
        axis.set_yscale("log")
    axes[0].set_ylabel("loss of the test's data")
    axes[2].legend(fontsize="small")
    figure.suptitle(name)
    figure.savefig(folder / f"{name.replace(' ', '-')}.png", dpi=120)
    plt.close(figure)


def _share(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.2f}"
