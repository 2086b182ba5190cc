"""The table of what is promised: what the files of results hold, and what they lack."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import rows

STEP = next(row for row in rows.ROWS if row.source == "step")


def line_of(folder: Path, text: str) -> str:
    (folder / "step.json").write_text(text)
    lines = rows.table(folder)
    assert len(lines) == 1 + len(rows.ROWS)
    return next(line for line in lines if line.startswith(STEP.case))


def test_a_row_that_is_reached(tmp_path: Path) -> None:
    line = line_of(tmp_path, json.dumps({"ratios": {"gloo": 1.5, "alone": 0.9}}))
    assert line.split()[-2:] == ["1.35", "1.50"]


def test_a_row_that_falls_short(tmp_path: Path) -> None:
    line = line_of(tmp_path, json.dumps({"ratios": {"gloo": 1.08, "alone": 0.9}}))
    assert line.endswith("1.08   80% of what is asked")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ratios": {}}', '{"ratios": null}'])
def test_results_of_another_kind_count_as_not_run(tmp_path: Path, text: str) -> None:
    assert line_of(tmp_path, text).split()[-2:] == ["not", "run"]


def test_each_row_is_of_a_measurement() -> None:
    assert {row.source for row in rows.ROWS} == {each.name for each in rows.MEASUREMENTS}
