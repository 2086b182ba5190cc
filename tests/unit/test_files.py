"""Files are there whole, or as they were."""

import os
from pathlib import Path

import pytest

from ringdl import UsageError, _files, _tune


def test_written_through_links(tmp_path: Path) -> None:
    target, link, beside = (tmp_path / name for name in ("target.json", "l.json", "l.part"))
    target.write_text("{}")
    link.symlink_to(target)
    beside.write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    for path in (link, tmp_path / "new.json"):
        assert _tune._lack(path) == ""
        _files.write_text(path, "table")
        assert path.read_text() == "table"
    assert link.is_symlink()
    assert target.read_text() == "table"
    assert beside.read_text() == "precious"
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    _files.write_text(tmp_path / "pipe", "table")
    assert os.read(reader, 10) == b"table"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    assert len([*tmp_path.iterdir()]) == 5


def test_a_file_that_cannot_be_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "figures.json"
    file.write_text("earlier ones")
    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(UsageError, match=r"figures\.json cannot be written: No space left"):
        _files.write_text(file, "new ones")
    assert file.read_text() == "earlier ones"
    assert len([*tmp_path.iterdir()]) == 1
    with pytest.raises(UsageError, match="/dev/full cannot be written: No space left"):
        _files.write_text(Path("/dev/full"), "new ones")
