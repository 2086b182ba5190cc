"""How a state copies what it holds, and gives it back."""

from __future__ import annotations

import copy
import itertools
import sys
from typing import Any

import numpy as np

from ringdl._errors import UsageError


def save(name: str, value: Any) -> Any:
    """A copy that nothing else refers to.

    Raises:
        UsageError: it cannot be copied.
    """
    if _is_tensor(value):  # a deep copy is of all the memory that it is a view of
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) is dict and stays(value):
        return {key: save(f"{name}.{key}", each) for key, each in value.items()}
    if type(value) in (list, tuple) and stays(value):
        return type(value)(save(f"{name}.{index}", each) for index, each in enumerate(value))
    try:
        return copy.deepcopy(value.state_dict() if _has_state(value) else value)
    except TypeError as error:
        raise UsageError(
            f"the value {name!r} of a state cannot be copied ({error}); keep it outside, and only "
            "what it is made from in the state"
        ) from error


def stays(value: Any) -> bool:
    """Whether `restore` may write into it, or into what it holds."""
    if type(value) in (list, tuple, dict):
        return any(map(_holds_state, value.values() if type(value) is dict else value))
    return _has_state(value) or type(value) is np.ndarray


def _holds_state(value: Any) -> bool:
    return type(value) is not np.ndarray and stays(value)


def restore(value: Any, saved: Any) -> Any:
    """What `save` has made, in place where that is possible; the saved copy stays as it is.

    Args:
        value: of what it is a copy. Arrays of NumPy that are no views of others but those of
            `ringdl.empty`, and what has ``load_state_dict``, stay the same objects, so that other
            references remain good.
        saved: the copy.

    Returns:
        What takes the value's place.
    """
    if _has_state(value):
        value.load_state_dict(copy.deepcopy(saved))
        _undo_casts(value, saved)
        if hasattr(value, "zero_grad"):  # gradients of a step that has not ended
            value.zero_grad()
        return value
    if type(value) in (list, tuple, dict) and type(saved) is type(value) and stays(value):
        if type(value) is dict:
            return {key: restore(value.get(key), each) for key, each in saved.items()}
        its = itertools.chain(value, itertools.repeat(None))
        return type(value)(map(restore, its, saved))
    if _is_tensor(saved):
        return saved.detach().clone().requires_grad_(saved.requires_grad)
    is_array = type(value) is np.ndarray and type(saved) is np.ndarray
    if is_array and value.flags.writeable and _owns(value) and _form(value) == _form(saved):
        np.copyto(value, saved)
        return value
    return _placed(copy.deepcopy(saved), value)


def _placed(taken: Any, value: Any) -> Any:
    """Where JAX's arrays have come from another process or a file: spread over devices as before.

    Args:
        taken: a value, or a tree of JAX's.
        value: the one before.
    """
    jax = sys.modules.get("jax")
    if jax is None or type(taken) is not type(value):
        return taken
    try:
        leaves, structure = jax.tree.flatten(taken)
        before, structure_before = jax.tree.flatten(value)
    except ValueError:  # a dictionary whose keys have no order
        return taken
    if structure != structure_before:
        return taken
    for index, (leaf, its) in enumerate(zip(leaves, before, strict=True)):
        are_arrays = isinstance(leaf, jax.Array) and isinstance(its, jax.Array)
        if are_arrays and leaf.shape == its.shape and leaf.sharding != its.sharding:
            leaves[index] = jax.device_put(leaf, its.sharding)
    return jax.tree.unflatten(structure, leaves)


def _undo_casts(value: Any, saved: Any) -> None:
    """PyTorch's optimizers load state in the dtype of the parameter, which may have another."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.optim.Optimizer):
        return
    parameters = [each for group in value.param_groups for each in group["params"]]
    for index, parameter in enumerate(parameters):
        its = value.state.get(parameter, {})
        for key, kept in saved["state"].get(index, {}).items():
            own = its.get(key)
            are_tensors = isinstance(kept, torch.Tensor) and isinstance(own, torch.Tensor)
            if are_tensors and kept.dtype != own.dtype:
                its[key] = kept.detach().clone().to(own.device)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Tensor and value.layout == torch.strided


def _owns(array: np.ndarray[Any, Any]) -> bool:
    """Whether no other array has its elements; those of `ringdl.empty` are views of its bytes."""
    base = array.base
    is_whole = isinstance(base, np.ndarray) and base.nbytes == array.nbytes
    return base is None or (is_whole and isinstance(base.base, memoryview))


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _form(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype
