"""A file of events is complete JSON after each append, and loses nothing that cannot be written."""

import errno
import json
import os
from pathlib import Path

import pytest

from ringdl._trace_file import TraceFile


def names_in(path: Path) -> list[str]:
    return [event["name"] for event in json.loads(path.read_text())["traceEvents"]]


def test_complete_after_each_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = TraceFile("timeline.json")
    monkeypatch.chdir("/")
    path = tmp_path / "timeline.json"
    file.append(b'{"name": "a"}')
    assert names_in(path) == ["a"]
    file.append(b"")
    file.append(b'{"name": "b"},\n{"name": "c"}')
    assert names_in(path) == ["a", "b", "c"]
    assert json.loads(b"[" + file.events() + b"]") == [{"name": name} for name in "abc"]
    file.remove()
    assert not path.exists()


def test_what_was_there_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text("x" * 1000)
    file = TraceFile(str(path))
    file.append(b'{"name": "a"}')
    file.close()
    assert names_in(path) == ["a"]


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    file = TraceFile(str(path))
    file.append(b'{"name": "a"}')
    write, room = os.pwrite, 5

    def full(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal room
        if len(data) <= room or data == b"\n]}\n":
            return write(descriptor, data, offset)
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        part, room = data[:room], 0
        return write(descriptor, part, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        file.append(b'{"name": "b"}')
    assert names_in(path) == ["a"]
    assert json.loads(b"[" + file.events() + b"]") == [{"name": "a"}, {"name": "b"}]
    file.append(b'{"name": "c"}')
    assert names_in(path) == ["a", "b", "c"]
    file.close()


def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TraceFile(str(tmp_path / "timeline.json"))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    file.append(b'{"name": "a"}')
    with pytest.raises(OSError, match="No space left"):
        file.close()


def test_no_such_folder(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "timeline.json"
    with pytest.raises(FileNotFoundError):
        TraceFile(str(path))
    file = TraceFile(str(path), elsewhere=True)
    file.append(b'{"name": "a"}')
    assert file.events() == b'{"name": "a"}'
    file.remove()
