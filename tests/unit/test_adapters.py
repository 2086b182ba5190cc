"""How an optimizer's adapter is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringdl
from ringdl import UsageError, _adapters


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_adapters, "_ADAPTERS", dict(_adapters._ADAPTERS))
    ringdl.init()
    yield
    ringdl.shutdown()


class Foreign:
    """An optimizer."""


class Special(Foreign):
    """One that derives from it."""


def named(name: str) -> Any:
    return lambda optimizer, **options: (name, optimizer, options)


def test_the_most_special_one_counts() -> None:
    here = Foreign.__module__
    ringdl.register_adapter(here, named("module"))
    ringdl.register_adapter(f"{here}.Foreign", named("class"))
    given = Foreign()
    assert ringdl.DistributedOptimizer(given, op=1) == ("class", given, {"op": 1})
    assert ringdl.DistributedOptimizer(Special())[0] == "module"  # it is in there itself
    ringdl.register_adapter(f"{here}.Special", named("special"))
    assert ringdl.DistributedOptimizer(Special())[0] == "special"


def test_a_beginning_ends_with_a_name() -> None:
    ringdl.register_adapter(Foreign.__module__[:-1], named("no"))
    with pytest.raises(UsageError, match=r"test_adapters\.Foreign is no optimizer that ringdl kno"):
        ringdl.DistributedOptimizer(Foreign())


def test_is_imported_at_first_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_adapter.py").write_text("def wrap(optimizer): return 'wrapped'\n")
    monkeypatch.syspath_prepend(tmp_path)
    ringdl.register_adapter(Foreign.__module__, "late_adapter:wrap")
    assert "late_adapter" not in sys.modules
    assert ringdl.DistributedOptimizer(Foreign()) == "wrapped"
    del sys.modules["late_adapter"]


def test_refuses() -> None:
    with pytest.raises(UsageError, match="kind is 'a b'"):
        ringdl.register_adapter("a b", named(""))
    with pytest.raises(UsageError, match="name it as 'module:name'"):
        ringdl.register_adapter("a", "module")

    class Half(ringdl.Adapter):
        value = gradient = None

    half: Any = Half()
    with pytest.raises(UsageError, match=r"has no value, gradient; derive it from ringdl\.Adapter"):
        ringdl.register_adapter("a", half)


def test_frameworks_are_loaded_by_their_optimizers_alone() -> None:
    program = """
import sys, ringdl
ringdl.init()
class Plain:
    def step(self, parameters, gradients): ...
ringdl.register_adapter("tinygrad", "somewhere:Adapter")
ringdl.DistributedOptimizer(Plain())
print(*{"torch", "jax", "keras", "tensorflow", "sklearn", "somewhere"} & set(sys.modules))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.stdout.strip(), ended.returncode) == ("", 0), ended.stderr


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    assert ringdl.DistributedOptimizer(optimizer) is optimizer
    weight.sum().backward()
    optimizer.step()
    assert hasattr(optimizer, "no_sync")


@pytest.mark.parametrize("package", ["keras", "optax"])
def test_places_exist(package: str) -> None:
    pytest.importorskip(package)
    assert callable(_adapters._import(str(_adapters._ADAPTERS[package])))
