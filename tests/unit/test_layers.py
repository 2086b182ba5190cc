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
    "server": {"base", "reduce", "transport", "collective", "engine"},
    "simulation": {"base", "reduce", "transport", "collective", "engine"},
    "cuda": {"base", "reduce"},
    "binding": {
        *("base", "reduce", "transport", "bucket", "collective", "engine", "server", "cuda"),
        "simulation",
    },
}

# What each group of collective/ may include, besides itself and what lies in collective/ itself.
COLLECTIVES = {
    "messages": set(),
    "shared": {"messages"},
    "two_level": {"messages", "shared"},
    "planner": {"messages", "shared", "two_level", "device"},
    "device": {"messages", "shared"},
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


# What each part of ringdl/ may import of the others. Its own modules make no circle.
PYTHON = {
    "core": set(),
    "_frameworks": {"core"},
    "policies": {"core"},
    "_training": {"core", "policies"},
    "elastic": {"core", "_training"},
    "torch": {"core", "_training", "policies", "elastic"},
    "cupy": {"core", "_training"},
    "jax": {"core", "_training", "policies"},
    "keras": {"core", "_training", "policies", "torch", "jax", "tensorflow"},  # its backends
    "sklearn": {"core", "_training"},
    "tensorflow": {"core", "_frameworks", "_training", "keras"},
    "numpy": {"core", "_training"},
    "bench": {"core", "torch"},  # for what is compared
    "compare": {"core", "torch", "policies", "bench"},  # for its check of files
    "simulate": {"core", "bench"},  # for its units
    "cli": {"core", "bench", "compare", "simulate"},
}
FRAMEWORKS = {"torch", "jax", "tensorflow", "keras", "cupy", "sklearn"}
# Which framework a part or a module imports; no other does any.
OWN_FRAMEWORK = {"torch": {"torch"}, "_frameworks.torch": {"torch"}, "bench": {"torch"}}
OWN_FRAMEWORK["compare"] = {"torch", "sklearn"}
OWN_FRAMEWORK |= {"cupy": {"cupy"}, "_frameworks.cupy": {"cupy"}}
OWN_FRAMEWORK |= {"jax": {"jax"}, "_frameworks.jax": {"jax"}}
OWN_FRAMEWORK |= {"tensorflow": {"tensorflow"}, "_frameworks.tensorflow": {"tensorflow"}}
OWN_FRAMEWORK |= {"keras": {"keras"}, "sklearn": {"sklearn"}}
OWN_FRAMEWORK |= {f"keras._on_{name}": {name} for name in ("torch", "tensorflow")}
OWN_FRAMEWORK["elastic._trees"] = {"torch", "jax"}  # to make arrays again that were theirs
OWN_FRAMEWORK["_rendezvous"] = {"torch"}  # for torchrun's ranks alone


def modules() -> dict[str, Path]:
    """By name without ``ringdl.``; the package itself is the empty name."""
    folder = ROOT / "ringdl"
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        .removesuffix("__init__")
        .strip("."): path
        for path in folder.rglob("*.py")
    }


def part_of(module: str) -> str:
    top = module.partition(".")[0]
    if top in {"__main__", "_doctor", "_doctor_ranks", "_diagnose", "_flight_records", "_tune"}:
        return "cli"
    return top if top in PYTHON else "core"


def imported_by(path: Path) -> set[str]:
    """Full names of what is imported when or after a module is; not what annotations alone need."""
    tree = ast.parse(path.read_text())
    for_annotations = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_annotations:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def graph() -> dict[str, set[str]]:
    """Of each module, the others that it imports."""
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        edges[module] = set()
        for name in imported_by(path):
            inner = name.removeprefix("ringdl.") if name.startswith("ringdl.") else None
            if name == "ringdl":
                edges[module].add("")
            elif inner is not None and not inner.startswith("_engine"):
                longest = next((m for m in (inner, inner.rpartition(".")[0]) if m in known), "")
                edges[module].add(longest)
        edges[module].discard(module)
    return edges


def test_python_points_down() -> None:
    for module, imported in graph().items():
        if module == "":  # re-exports
            continue
        part = part_of(module)
        allowed = PYTHON[part] | {part}
        assert {part_of(each) for each in imported} <= allowed, (module, imported)
        if part == "core":
            assert "" not in imported, module  # what the core needs it imports from where it is


def test_python_has_no_circles() -> None:
    edges = graph()
    for module, path in modules().items():
        if path.name == "__init__.py" and module not in {"numpy", "cupy"}:
            del edges[module]  # it re-exports
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module in done or module not in edges:
            return
        for each in edges[module]:
            visit(each, (*above, module))
        done.add(module)

    for module in list(edges):
        visit(module, ())


def test_only_adapters_import_frameworks() -> None:
    for module, path in modules().items():
        own = OWN_FRAMEWORK.get(module, OWN_FRAMEWORK.get(part_of(module), set()))
        imported = {name.partition(".")[0] for name in imported_by(path)}
        assert imported & FRAMEWORKS <= own, module
        if "mpi4py" in imported:
            assert (
                module in {"_mpi", "_mpirun", "_cuda_mpi", "_ulfm", "_newcomers", "_meeting"}
                or part_of(module) == "bench"
            ), module
