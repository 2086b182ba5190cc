"""How a state copies what it holds, and gives it back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np


def save(value: Any) -> Any:
    """A copy that nothing else refers to."""
    if _has_state(value):
        return copy.deepcopy(value.state_dict())
    return copy.deepcopy(value)


def restore(value: Any, saved: Any) -> Any:
    """What `save` has made, in place where that is possible; the saved copy stays as it is.

    Args:
        value: of what it is a copy. Arrays of NumPy that are no views of others, and what has
            ``load_state_dict``, stay the same objects, so that other references remain good.
        saved: the copy.

    Returns:
        What takes the value's place.
    """
    if _has_state(value):
        value.load_state_dict(copy.deepcopy(saved))
        if hasattr(value, "zero_grad"):  # gradients of a step that has not ended
            value.zero_grad()
        return value
    is_array = type(value) is np.ndarray and type(saved) is np.ndarray
    if is_array and value.flags.writeable and value.flags.owndata and _form(value) == _form(saved):
        np.copyto(value, saved)
        return value
    return copy.deepcopy(saved)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _form(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return array.shape, array.dtype
