"""Kernels that are compiled where ringdl is used; this needs no device."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdl import Error, _nvrtc


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ringdl"


def test_kernels_are_compiled_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = _nvrtc.kernels(90, 13000)
    assert image.startswith(b"\x7fELF")
    for name in ("sum_float32", "average_bfloat16", "bitxor_bool", "widen_float16"):
        assert f"ringdl_{name}\0".encode() in image, name
    assert [path.read_bytes() for path in own_cache.iterdir()] == [image]
    monkeypatch.setattr(_nvrtc, "_compiled", None)
    assert _nvrtc.kernels(90, 13010) == image


def test_a_cache_that_cannot_be_written_is_no_error(own_cache: Path) -> None:
    own_cache.write_text("a file where the folder would be")
    assert _nvrtc.kernels(80, 13000).startswith(b"\x7fELF")


def test_a_driver_older_than_nvrtc() -> None:
    with pytest.raises(Error, match=r"no NVRTC of CUDA 12 .*pip install nvidia-cuda-nvrtc-cu12"):
        _nvrtc.kernels(90, 12080)


def test_a_device_that_nvrtc_does_not_know() -> None:
    with pytest.raises(Error, match=r"NVRTC .* fails .*gpu-architecture"):
        _nvrtc.kernels(10, 13000)
