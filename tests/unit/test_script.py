"""How a rank is started again; jobs in which ranks are replaced are in tests/test_elastic.py."""

from pathlib import Path

import pytest

import ringdl
from ringdl._script import Script, own_script


@pytest.mark.parametrize(
    ("command", "is_module", "name", "words", "options"),
    [
        ("python train.py", False, "train.py", "", ""),
        ("python train.py --lr 0.1 -m x", False, "train.py", "--lr 0.1 -m x", ""),
        (
            "python -u -W ignore -X dev dir/train.py a",
            False,
            "dir/train.py",
            "a",
            "-u -W ignore -X dev",
        ),
        (
            "python -Wonce::m --check-hash-based-pycs never train.py",
            False,
            "train.py",
            "",
            "-Wonce::m --check-hash-based-pycs never",
        ),
        ("python -m package.train -c", True, "package.train", "-c", ""),
        ("python -um package a b", True, "package", "a b", "-u"),
        ("python -m cProfile -o out train.py a", True, "cProfile", "-o out train.py a", ""),
    ],
)
def test_scripts_are_started_as_they_were(
    command: str,
    is_module: bool,
    name: str,
    words: str,
    options: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the folder where they were, wherever they have gone since."""
    monkeypatch.setenv("PWD", str(tmp_path))
    name = name if is_module else str(tmp_path / name)
    expected = Script(is_module, name, words.split(), options.split(), str(tmp_path))
    assert own_script(command.split()) == expected


def test_modules_are_looked_for_where_python_does(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "train.py").touch()
    (tmp_path / "link.py").symlink_to(tmp_path / "train.py")

    def path_of(name: str, is_module: bool = False) -> str:
        return Script(is_module, name, [], [], "/somewhere").path

    assert path_of("package.train", is_module=True) == "/somewhere"
    assert path_of(str(tmp_path / "program")) == str(tmp_path / "program")
    assert path_of(str(tmp_path / "link.py")) == str(tmp_path.resolve())


@pytest.mark.parametrize("command", ["python", "python -", "python -u", "python -c pass x"])
def test_what_is_no_file_is_not_started_again(command: str) -> None:
    with pytest.raises(ringdl.UsageError, match="no file and no module"):
        own_script(command.split())
