"""Which UCX is told to forget memory that was unmapped: older ones would warn of the variable."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from ringdl import _ucx

VARIABLE = "UCX_RCACHE_MAX_UNRELEASED"


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        (None, None, None),
        ((1, 16, 0), None, None),
        ((1, 17, 0), None, "256M"),
        ((2, 0, 0), None, "256M"),
        ((1, 20, 1), "inf", "inf"),
    ],
)
def test_those_that_grow_are(
    version: tuple[int, ...] | None,
    before: str | None,
    after: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(name: str, mode: int) -> Any:
        assert (name, mode) == ("libucp.so.0", os.RTLD_NOLOAD)
        if version is None:
            raise OSError

        def get_version(*places: Any) -> None:
            for place, number in zip(places, version, strict=True):
                place._obj.value = number

        return SimpleNamespace(ucp_get_version=get_version)

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(os, "environ", {} if before is None else {VARIABLE: before})
    _ucx.limit_notes()
    assert os.environ.get(VARIABLE) == after
