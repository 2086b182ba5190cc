"""Arrays in files that other programs read, too: https://github.com/huggingface/safetensors.

Eight bytes say how long the header is, which is JSON; then come the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from ringdl._errors import UsageError
from ringdl._mapped import map_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Arrays: TypeAlias = dict[str, Array]

_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2"}
_DTYPES |= {"I8": "|i1", "U8": "|u1", "BOOL": "|b1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
_DTYPES |= {"C64": "<c8"}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_ML_DTYPES |= {"F8_E8M0": "float8_e8m0fnu"}
_ML_NAMES = {dtype: name for name, dtype in _ML_DTYPES.items()}
_METADATA = "__metadata__"


def map_file(file: Path) -> tuple[Arrays, dict[str, str]]:
    """Views of a file's arrays, which cannot be written to, and what its writer has noted.

    Raises:
        UsageError: it is no such file, was cut, or has a dtype that NumPy lacks.
    """
    data = map_bytes(file)
    begin = 8 + int(data[:8].view("<u8")[0]) if len(data) >= 8 else len(data) + 1
    if begin > len(data):
        raise UsageError(f"{file} is no safetensors file, or was cut")
    try:
        header = json.loads(bytes(data[8:begin]), object_pairs_hook=_without_repeats)
        metadata = header.pop(_METADATA, {})
        if any(not isinstance(text, str) for pair in metadata.items() for text in pair):
            raise ValueError(_METADATA)
        arrays = {name: _view(file, name, its, data[begin:]) for name, its in header.items()}
        ends = sorted(tuple(its["data_offsets"]) for its in header.values())
        if [first for first, _ in ends] != [0, *(last for _, last in ends)][: len(ends)]:
            raise ValueError("arrays overlap, or have bytes between them")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{file} is no safetensors file, or was cut") from None
    return arrays, metadata


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("a name occurs twice")
    return dict(pairs)


def _view(file: Path, name: str, its: Any, data: Array) -> Array:
    import numpy as np

    if its["dtype"] in _ML_DTYPES:
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, _ML_DTYPES[its["dtype"]]))
    elif its["dtype"] in _DTYPES:
        dtype = np.dtype(_DTYPES[its["dtype"]])
    else:
        raise UsageError(f"{file}: {name!r} is {its['dtype']}, which NumPy does not have")
    first, last = its["data_offsets"]
    if not 0 <= first <= last <= len(data) or any(extent < 0 for extent in its["shape"]):
        raise ValueError("it lies elsewhere")
    return np.frombuffer(data[first:last], dtype).reshape(its["shape"])


def write(file: IO[bytes], arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays, of dtypes that such files have.

    Raises:
        UsageError: a dtype that they do not have.
    """
    import numpy as np

    header: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    for name, array in arrays.items():
        dtype = name_of(array.dtype)
        if dtype is None:
            raise UsageError(f"{name!r} is {array.dtype}, which safetensors files cannot hold")
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(np.ascontiguousarray(little_endian(array)).reshape(-1).view(np.uint8).data)


def name_of(dtype: Any) -> str | None:
    """Of a dtype of NumPy's, what such files call it; None if they do not have it."""
    return _ML_NAMES.get(dtype.name) or _NAMES.get(dtype.newbyteorder("<").str)


def little_endian(array: Array) -> Array:
    """The same values in the byte order of such files."""
    if array.dtype.str[0] != ">":
        return array
    return array.astype(array.dtype.newbyteorder("<"))
