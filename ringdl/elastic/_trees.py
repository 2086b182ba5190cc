"""Values as arrays and a description in JSON, and back: what a checkpoint holds, without pickle."""

from __future__ import annotations

import copy
import itertools
import sys
import types
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np

from ringdl._errors import UsageError
from ringdl._safetensors import Array, Arrays, little_endian, name_of

_PLAIN = (bool, int, float, str, type(None))
_CODE = (types.FunctionType, types.BuiltinFunctionType, type, np.ufunc)
_OF_CODE = ("jax", "jaxlib")
"""Functions, which hold no values: those of the script are taken. JAX's are objects of its own, but
not its references, which hold arrays."""


def encode(value: Any, name: str, arrays: Arrays) -> Any:
    """Describe a value for JSON.

    Args:
        value: numbers, texts, arrays of NumPy, PyTorch and JAX, lists, tuples and dictionaries of
            such, and JAX's trees.
        name: what its arrays are called by.
        arrays: get what it has of them.

    Raises:
        UsageError: something else, which only pickle could write.
    """
    if type(value) in _PLAIN:
        return {"plain": value}
    kind = _kind_of(value)
    if kind is not None:
        # Names may be alike: "a.b", and "b" in "a".
        others = (f"{name} ({number})" for number in itertools.count(2))
        key = name if name not in arrays else next(each for each in others if each not in arrays)
        array = _to_numpy(value, kind)
        if name_of(array.dtype) is not None:
            arrays[key] = array
            return {kind: key}
        if array.dtype.hasobject or array.dtype.names is not None or array.dtype.kind == "T":
            raise UsageError(
                f"{name!r} is an array of {array.dtype}, which a checkpoint cannot hold: keep an "
                "array for each field, and lists of other objects"
            )
        array = little_endian(array)
        arrays[key] = np.frombuffer(array.tobytes(), np.uint8)
        return {"bytes": [kind, key, _name_of(array.dtype), array.shape]}
    if isinstance(value, Mapping):
        pairs = [
            [_encode_key(key, name), encode(each, f"{name}.{key}", arrays)]
            for key, each in value.items()
        ]
        return {"dict": pairs}
    if type(value) in (list, tuple):
        parts = [encode(each, f"{name}.{index}", arrays) for index, each in enumerate(value)]
        return {type(value).__name__: parts}
    leaves = _leaves_of(value)
    if leaves is not None:
        return {"tree": [encode(leaf, f"{name}.{i}", arrays) for i, leaf in enumerate(leaves)]}
    is_jaxs = type(value).__module__.partition(".")[0] in _OF_CODE
    if isinstance(value, _CODE) or (is_jaxs and type(value).__name__ != "Ref"):
        return {"same": None}
    raise UsageError(
        f"{name!r} is a {type(value).__name__}, which a checkpoint cannot hold: keep numbers, "
        "texts, arrays, and lists and dictionaries of these, or give it state_dict() and "
        "load_state_dict()"
    )


def decode(described: Any, like: Any, arrays: Mapping[str, Array]) -> Any:
    """The value that `encode` has described.

    Args:
        described: by it.
        like: a value of the same structure, for trees of JAX, whose classes are not in the file.
        arrays: of the file.
    """
    ((kind, its),) = described.items()
    if kind == "plain":
        return its
    if kind == "dict":
        named = like if isinstance(like, Mapping) else {}
        keys = [decode(key, None, {}) for key, _ in its]
        decoded = {
            key: decode(each, named.get(key), arrays)
            for key, (_, each) in zip(keys, its, strict=True)
        }
        if type(like) is dict or not isinstance(like, Mapping):
            return decoded
        if not isinstance(like, MutableMapping):  # a FrozenDict
            frozen: Any = type(like)
            return frozen(decoded)
        made = copy.copy(like)  # a Counter, an OrderedDict
        made.clear()
        made.update(decoded)
        return made
    if kind in ("list", "tuple"):
        is_alike = isinstance(like, (list, tuple)) and len(like) == len(its)
        likes = like if is_alike else [None] * len(its)
        parts = [decode(each, one, arrays) for each, one in zip(its, likes, strict=True)]
        return parts if kind == "list" else tuple(parts)
    if kind == "tree":
        import jax

        leaves, structure = jax.tree.flatten(like)
        if len(leaves) != len(its):
            raise UsageError(f"it has a tree of {len(its)} values, and this state {len(leaves)}")
        parts = [decode(each, leaf, arrays) for each, leaf in zip(its, leaves, strict=True)]
        return jax.tree.unflatten(structure, parts)
    if kind == "same":
        return like
    if kind == "bytes":
        kind, key, name, shape = its
        return _from_numpy(arrays[key].view(_dtype_of(name)).reshape(shape), kind, like)
    return _from_numpy(arrays[its], kind, like)


def _encode_key(key: Any, name: str) -> Any:
    plain = key.item() if isinstance(key, np.generic) else key
    if type(plain) not in _PLAIN:
        raise UsageError(
            f"{name!r} has the key {key!r}, which a checkpoint cannot hold: use texts or numbers"
        )
    return {"plain": plain}


def _kind_of(value: Any) -> str | None:
    """Whose array it is; None if it is none."""
    if isinstance(value, np.generic):
        return "number"
    if type(value) in (np.ndarray, np.memmap):  # other classes have more than elements
        return "numpy"
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        return "torch"
    if jax is not None and isinstance(value, jax.Array):
        return "jax"
    return None


def _to_numpy(value: Any, kind: str) -> Array:
    if kind == "jax" and _is_jax_key(value):
        import jax

        return np.asarray(jax.random.key_data(value))
    if kind != "torch":
        return np.asarray(value)
    tensor = value.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):
        import torch

        bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
        return np.asarray(tensor.view(bits).numpy()).view(_dtype_of(name))
    return np.asarray(tensor.numpy())


def _name_of(dtype: np.dtype[Any]) -> str:
    """What `_dtype_of` knows it by."""
    return dtype.name if dtype.type.__module__ == "ml_dtypes" else dtype.str


def _dtype_of(name: str) -> np.dtype[Any]:
    if name[0] in "<|":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def _is_jax_key(value: Any) -> bool:
    import jax

    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


def _from_numpy(array: Array, kind: str, like: Any) -> Any:
    own = np.array(array)
    if kind == "number":
        return own[()]
    if kind == "numpy":
        return own
    if kind == "torch":
        import torch

        if own.dtype.type.__module__ == "ml_dtypes":
            bits = torch.from_numpy(own.view(np.int16 if own.itemsize == 2 else np.uint8))
            tensor = bits.view(getattr(torch, own.dtype.name))
        else:
            tensor = torch.from_numpy(own)
        if not isinstance(like, torch.Tensor):
            return tensor
        return tensor.to(like.device).requires_grad_(like.requires_grad)
    import jax

    if isinstance(like, jax.Array) and _is_jax_key(like):
        return jax.random.wrap_key_data(jax.numpy.asarray(own), impl=jax.random.key_impl(like))
    return jax.numpy.asarray(own)


def _leaves_of(value: Any) -> list[Any] | None:
    """Of a tree of JAX's; None if it is none."""
    jax = sys.modules.get("jax")
    if jax is None:
        return None
    leaves: list[Any] = jax.tree.leaves(value)
    return None if len(leaves) == 1 and leaves[0] is value else leaves
