"""The layers of docs/architecture.md: includes and imports point down only."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What each folder of csrc/ may include, besides itself.
CSRC = {
    "base": set(),
    "reduce": {"base"},
    "transport": {"base"},
    "bucket": {"base"},
    "collective": {"base", "reduce", "transport"},
    "engine": {"base", "reduce", "transport", "bucket", "collective"},
    "binding": {"base", "reduce", "transport", "bucket", "engine"},
}

# What each group of collective/ may include, besides itself and what lies in collective/ itself.
COLLECTIVES = {
    "messages": set(),
    "shared": {"messages"},
    "two_level": {"messages", "shared"},
    "planner": {"messages", "shared", "two_level"},
}


@pytest.mark.parametrize("folder", CSRC)
def test_includes_point_down(folder: str) -> None:
    files = [path for path in (ROOT / "csrc" / folder).rglob("*") if path.is_file()]
    assert files
    for path in files:
        included = re.findall(r'#include "(\w+)/', path.read_text())
        assert set(included) <= CSRC[folder] | {folder}, path


def test_groups_of_collectives_point_down() -> None:
    folder = ROOT / "csrc" / "collective"
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(COLLECTIVES)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        group = path.parent.name
        allowed = COLLECTIVES[group] | {group} if group in COLLECTIVES else set()
        included = re.findall(r'#include "collective/(\w+)/', path.read_text())
        assert set(included) <= allowed, path


def test_collectives_leave_payload_to_the_executor() -> None:
    """It may be a device's, and answer later: see csrc/reduce/executor.h."""
    operations = r"copy_bytes\(|stream_\w+\(|codec_?\.(un)?pack\(|reducer_?\.(combine|finish)\("
    for path in (ROOT / "csrc" / "collective").rglob("*.*"):
        assert not re.search(operations, path.read_text()), path


def test_engine_waits_for_nothing() -> None:
    """It is polled: the lock, the threads and the clock that waits go by belong to the driver."""
    around = {"driver", "waits", "background", "backoff"}
    for path in (ROOT / "csrc" / "engine").glob("*.*"):
        if path.stem in around | {"gradient_buckets"}:
            continue
        text = path.read_text()
        assert not re.search(r"std::(mutex|thread|condition_variable)\b", text), path
        assert not re.search(r"(?<![.\w])now_ns\(\)", text), path


def test_every_folder_is_a_layer() -> None:
    assert {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} == set(CSRC)


def test_only_the_mpi_transport_knows_mpi() -> None:
    for path in (ROOT / "csrc").rglob("*.cc"):
        calls = re.search(r"\bMPI_[A-Z][a-z]+_?\w*\(", path.read_text())
        assert calls is None or "transport/mpi" in path.as_posix(), path


@pytest.mark.parametrize("path", sorted((ROOT / "ringdl").glob("*.py")), ids=lambda path: path.name)
def test_the_core_imports_no_framework(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            framework = name.split(".")[0]
            assert framework not in {"torch", "jax", "keras", "cupy"} or (
                (framework, path.name) == ("torch", "_rendezvous.py")  # for torchrun's ranks alone
            ), path
            assert not name.startswith(("ringdl.torch", "ringdl.bench")), path
            assert not name.startswith("mpi4py") or path.name in {"_mpi.py", "_mpirun.py"}, path


def test_adapters_import_only_their_own_framework() -> None:
    for path in (ROOT / "ringdl" / "torch").glob("*.py"):
        text = path.read_text()
        assert not re.search(r"^\s*(import|from) (jax|keras|cupy|mpi4py)", text, re.MULTILINE), path
