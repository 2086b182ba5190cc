"""How a rank is started again; jobs in which ranks are replaced are in tests/test_elastic.py."""

from pathlib import Path

import pytest

import ringdl
from ringdl._newcomers import Script, own_script


@pytest.mark.parametrize(
    ("command", "is_module", "name", "words"),
    [
        ("python train.py", False, "train.py", []),
        ("python train.py --lr 0.1 -m x", False, "train.py", ["--lr", "0.1", "-m", "x"]),
        ("python -u -W ignore -X dev dir/train.py a", False, "dir/train.py", ["a"]),
        ("python -Wignore --check-hash-based-pycs never train.py", False, "train.py", []),
        ("python -m package.train -c", True, "package.train", ["-c"]),
        ("python -um package a b", True, "package", ["a", "b"]),
        ("python -m cProfile -o out train.py a", True, "cProfile", ["-o", "out", "train.py", "a"]),
    ],
)
def test_scripts_are_started_as_they_were(
    command: str,
    is_module: bool,
    name: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the folder where they were, wherever they have gone since."""
    monkeypatch.setenv("PWD", str(tmp_path))
    name = name if is_module else str(tmp_path / name)
    assert own_script(command.split()) == Script(is_module, name, words, str(tmp_path))


@pytest.mark.parametrize("command", ["python", "python -", "python -u", "python -c pass x"])
def test_what_is_no_file_is_not_started_again(command: str) -> None:
    with pytest.raises(ringdl.UsageError, match="no file and no module"):
        own_script(command.split())
