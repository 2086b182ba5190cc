"""What environment variables may say, and that docs/settings.md says so too."""

import re
import warnings
from dataclasses import fields
from pathlib import Path

import pytest

from ringdl import _settings
from ringdl._errors import UsageError
from ringdl._settings import Settings, read_settings

ROOT = Path(__file__).parents[2]


def test_nothing_set() -> None:
    assert read_settings({}) == Settings()
    empty = {setting.metadata["variable"]: "" for setting in fields(Settings)}
    assert read_settings(empty) == Settings()


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("RINGDL_TIMEOUT", "0.5", 0.5),
        ("RINGDL_WATCHDOG", "0", 0.0),
        ("RINGDL_SEGMENT_BYTES", "4096", 4096),
        ("RINGDL_ALGORITHM", "ring", "ring"),
        ("RINGDL_TUNING", "default", "default"),
        ("RINGDL_TIMELINE", "all.json", "all.json"),
        *(("RINGDL_SHARED_MEMORY", text, True) for text in ("1", "true", "Yes", "ON")),
        *(("RINGDL_SHARED_MEMORY", text, False) for text in ("0", "False", "no", "off")),
        ("RINGDL_DEBUG", "1", True),
    ],
)
def test_values(variable: str, text: str, value: object) -> None:
    (name,) = (s.name for s in fields(Settings) if s.metadata["variable"] == variable)
    assert read_settings({variable: text}) == Settings(**{name: value})


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("RINGDL_TIMEOUT", "ten", "a positive number"),
        ("RINGDL_TIMEOUT", "0", "a positive number"),
        ("RINGDL_TIMEOUT", "nan", "a positive number"),
        ("RINGDL_WATCHDOG", "-1", "a positive number or 0"),
        ("RINGDL_SEGMENT_BYTES", "0", r"a whole number from 1 to 2\^30"),
        ("RINGDL_SEGMENT_BYTES", "2e6", r"a whole number from 1 to 2\^30"),
        ("RINGDL_SEGMENT_BYTES", str((1 << 30) + 1), r"a whole number from 1 to 2\^30"),
        ("RINGDL_ALGORITHM", "tree", "one of ring, doubling, direct, hierarchical, nccl"),
        ("RINGDL_SHARED_MEMORY", "maybe", "0 or 1"),
        ("RINGDL_JOIN", "some", "one of all, allreduce"),
        ("RINGDL_DEBUG", "2", "0 or 1"),
    ],
)
def test_wrong_values(variable: str, text: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"{variable}='{text}' is not {expected}; correct or"):
        read_settings({variable: text})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RINGDL_ALGORITM", r" \(do you mean RINGDL_ALGORITHM\?\)"),
        ("RINGDL_SHAREDMEMORY", r" \(do you mean RINGDL_SHARED_MEMORY\?\)"),
        ("RINGDL_XYZZY", ""),
    ],
)
def test_unknown_names_are_warned_of(name: str, meant: str) -> None:
    expected = f"{name} is no setting of ringdl and changes nothing{meant}; docs"
    with pytest.warns(RuntimeWarning, match=expected):
        _settings.warn_of_unknown({name: "1", "RINGDL_TIMEOUT": "1"})


def test_known_names_are_not_warned_of() -> None:
    known = [setting.metadata["variable"] for setting in fields(Settings)]
    others = ["RINGDL_TEST_ALL", "RINGDL_RANK_PROCESS", "RINGDLE", "PATH"]
    with warnings.catch_warnings(action="error"):
        _settings.warn_of_unknown(dict.fromkeys([*known, *others], "1"))


def test_the_page_is_up_to_date() -> None:
    """Else put what `python -c "from ringdl._settings import *; print(reference())"` prints."""
    assert _settings.reference() in (ROOT / "docs/settings.md").read_text()


def test_the_page_has_every_name_that_the_sources_read() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    sources = [path.read_text() for path in (ROOT / "ringdl").rglob("*.py")]
    names = {
        name
        for source in sources
        if "environ" in source
        for name in re.findall(r'"([A-Z][A-Z0-9]*_[A-Za-z0-9_]*[A-Za-z0-9])"', source)
    }
    assert {"OMP_NUM_THREADS", "PMIX_RANK", "SLURM_NTASKS", "RINGDL_TIMEOUT"} <= names
    assert {name for name in names if f"`{name}`" not in page} == set()
