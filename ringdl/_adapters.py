"""Optimizers of any framework: what ringdl has to know of one, and how it is found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ringdl._errors import UsageError

if TYPE_CHECKING:
    import numpy as np


class Adapter(Protocol):
    """How the gradients of a framework's optimizers are seen and written; see `register_adapter`.

    For a framework whose parameters keep their gradients until the optimizer steps. Derive from it
    and say four things: which parameters there are, what one of them holds, what its gradient is,
    and how another one takes its place. For policies other than ``AllReduce()`` say `set_value`,
    too. Arrays are NumPy's: float64, float32 or float16.
    """

    step: str = "step"
    """The optimizer's method that changes parameters by their gradients. Each call averages."""

    def parameters(self, optimizer: Any) -> Mapping[str, Any]:
        """The parameters that it trains, by name: the same names and order on all ranks."""
        ...

    def value(self, parameter: Any) -> np.ndarray:
        """The elements of a parameter. Its gradients have the same shape and dtype."""
        ...

    def gradient(self, parameter: Any) -> np.ndarray | None:
        """This rank's gradient of a parameter; None if nothing has produced one."""
        ...

    def set_gradient(self, parameter: Any, average: np.ndarray) -> None:
        """Make the average the parameter's gradient.

        It is ringdl's memory, which the next step overwrites: keep it until then, or copy it.
        """
        ...

    def set_value(self, parameter: Any, array: np.ndarray) -> None:
        """Give a parameter other elements: those of an array that `value` has returned."""
        raise UsageError(f"{type(self).__name__} has no set_value(), which policies need")

    def state(self, optimizer: Any) -> Mapping[str, np.ndarray]:
        """The arrays of the optimizer's state, as momentum, which are changed in place."""
        raise UsageError(
            f"{type(self).__name__} has no state(), which the policy exchanges; write it, or pass "
            "optimizer_state='keep'"
        )

    def reset_state(self, optimizer: Any) -> None:
        """Make the optimizer begin as a new one."""
        raise UsageError(f"{type(self).__name__} has no reset_state(), which the policy calls")

    def watch(self, optimizer: Any, ready: Callable[[str], None]) -> None:
        """Have ``ready(name)`` called when a gradient will not change before the step.

        It travels from then on, while others are computed. Without that, or if nothing is done
        here, gradients travel when the optimizer steps.
        """
        return


Wrap: TypeAlias = Callable[..., Any]
"""Takes an optimizer and options; returns one that averages."""

_ADAPTERS: dict[str, Adapter | Wrap | str] = {
    "torch.optim": "ringdl.torch:DistributedOptimizer",
    "optax": "ringdl.jax:DistributedOptimizer",
    "keras": "ringdl.keras:DistributedOptimizer",
    "tf_keras": "ringdl.keras:DistributedOptimizer",
}
"""By the beginning of a class's full name; a string says where to import it from at first use."""

_PLAIN = "ringdl._training.plain:DistributedOptimizer"
_ADAPTED = "ringdl._training.adapted:wrap"


def register_adapter(kind: str, adapter: Adapter | Wrap | str) -> None:
    """Say how `DistributedOptimizer` is to wrap the optimizers of a framework.

    Args:
        kind: a module or a class, as ``"tinygrad.nn.optim"``: all optimizers whose class, or one
            that it derives from, is or lies in it. The longest kind that fits counts. Nothing is
            imported.
        adapter: an `Adapter`; or a function that takes an optimizer and options, and returns one
            that averages; or, as ``"module:name"``, where either is imported from when the first
            such optimizer is wrapped.

    Raises:
        UsageError: the adapter is none of these.
    """
    if not isinstance(kind, str) or not all(part.isidentifier() for part in kind.split(".")):
        raise UsageError(f"kind is {kind!r}; pass the name of a module or a class as a string")
    if isinstance(adapter, str):
        if not all(adapter.partition(":")):
            raise UsageError(f"the adapter is {adapter!r}; name it as 'module:name'")
    elif not callable(adapter):
        _refuse_unfit(adapter)
    _ADAPTERS[kind] = adapter


def DistributedOptimizer(optimizer: Any, **options: Any) -> Any:  # noqa: N802
    """Make an optimizer of any framework average its gradients over all ranks. Collective.

    What it returns is used as the optimizer was: see `ringdl.torch.DistributedOptimizer`,
    `ringdl.keras.DistributedOptimizer`, `ringdl.jax.DistributedOptimizer`, and for an object with
    ``step(parameters, gradients)`` those of `ringdl.numpy` and `ringdl.cupy`. For frameworks that
    have an `Adapter` it is the same object, whose steps average.

    Args:
        optimizer: of PyTorch, Keras or optax, of a framework that `register_adapter` was told of,
            or any object with ``step(parameters, gradients)``.
        options: those of the function that wraps it; for an `Adapter` they are ``op`` (Average or
            Sum), ``compression`` (as `Buckets` takes it), ``communicator`` and ``policy`` (one of
            `ringdl.policies`).

    Raises:
        UsageError: nobody has said how to wrap it.
        MismatchError: on every rank, if names, shapes, dtypes or order differ.
    """
    found = _find(type(optimizer))
    if found is None and callable(getattr(optimizer, "step", None)):
        found = _PLAIN
    if found is None:
        raise UsageError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} is no optimizer that "
            f"ringdl knows: those of {', '.join(sorted(_ADAPTERS))}, and objects with "
            "step(parameters, gradients); tell it of others by ringdl.register_adapter()"
        )
    adapter: Any = _import(found) if isinstance(found, str) else found
    if callable(adapter) and not hasattr(adapter, "set_gradient"):
        return adapter(optimizer, **options)
    return _import(_ADAPTED)(
        optimizer, adapter() if isinstance(adapter, type) else adapter, **options
    )


def _find(kind: type) -> Adapter | Wrap | str | None:
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        fitting = [each for each in _ADAPTERS if f"{name}.".startswith(f"{each}.")]
        if fitting:
            return _ADAPTERS[max(fitting, key=len)]
    return None


def _import(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _refuse_unfit(adapter: Any) -> None:
    needed = ("parameters", "value", "gradient", "set_gradient")
    missing = [name for name in needed if not callable(getattr(adapter, name, None))]
    if missing:
        raise UsageError(
            f"the adapter {adapter!r} has no {', '.join(missing)}; derive it from ringdl.Adapter"
        )
