"""Samples in files that are mapped into memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ringdl._errors import UsageError
from ringdl._mapped import map_bytes
from ringdl._safetensors import Array, map_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Paths: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


class Table:
    """Columns of samples, alike in length.

    Args:
        columns: by name; that of the only one may be empty.

    Raises:
        UsageError: their lengths differ.
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        if not columns:
            raise UsageError("there are no arrays: pass one, or several by name")
        self._columns = columns
        counts = {name: len(column) for name, column in columns.items()}
        if len({*counts.values()}) != 1:
            raise UsageError(f"arrays have different numbers of rows: {counts}")
        self._count = next(iter(counts.values()))

    def __len__(self) -> int:
        return self._count

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> Any:
        """These samples, in this order: copies. An array, or a dictionary of arrays.

        Raises:
            IndexError: there is no such sample.
            TypeError: indices are not integers.
        """
        gathered = {name: column.gather(indices) for name, column in self._columns.items()}
        return gathered[""] if [*gathered] == [""] else gathered


class Column(Protocol):
    """Samples, or a part of each."""

    def __len__(self) -> int: ...
    def gather(self, indices: Any) -> Any: ...


class Files(Table):
    """Samples in ``.npy`` or ``.safetensors`` files, one after the other: rows of their arrays.

    The files are mapped, so what is read is what a batch needs, and ranks of a host read the same
    bytes once. What `gather` gives is an array, of ``.npy`` files; or a dictionary of arrays by
    name, of ``.safetensors`` files, whose tensors all have the same number of rows, and of several
    kinds of files.

    Args:
        paths: the files, or a pattern such as ``"train-*.npy"``, whose files are taken by name; or
            a dictionary of such: the same number of rows in each, file by file or not.

    Raises:
        UsageError: there are no such files, or they do not fit together.

    Example:
        >>> files = ringdl.data.Files({"inputs": "x-*.npy", "targets": "y-*.npy"})
        >>> files.gather([3, 1])["inputs"]
    """

    def __init__(self, paths: Paths | Mapping[str, Paths]) -> None:
        if isinstance(paths, Mapping):
            super().__init__({name: _column(each, name) for name, each in paths.items()})
            return
        files = _files(paths)
        is_named = files[0].suffix == ".safetensors"
        super().__init__(_tensors(files) if is_named else {"": _column(files, "")})


class _Column:
    """Arrays of one name, one after the other."""

    def __init__(self, arrays: Sequence[Array], files: Sequence[Path]) -> None:
        import numpy as np

        first = arrays[0]
        for array, file in zip(arrays, files, strict=True):
            if array.ndim == 0:
                raise UsageError(f"{file} has one number of {array.dtype}, and no rows")
            if array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
                raise UsageError(
                    f"{file} has rows of {array.dtype}{list(array.shape[1:])}, and {files[0]} has "
                    f"{first.dtype}{list(first.shape[1:])}"
                )
        self._arrays = arrays
        self._ends = np.cumsum([len(array) for array in arrays])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: Any) -> Array:
        import numpy as np

        wanted = np.asarray(indices)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise TypeError(f"indices are {wanted.dtype}; pass integers")
        wanted = wanted.astype(np.int64)
        strange = wanted[(wanted < 0) | (wanted >= len(self))]
        if strange.size:
            raise IndexError(f"samples are 0 to {len(self) - 1}, and {strange[0]} is wanted")
        first = self._arrays[0]
        result = np.empty((len(wanted), *first.shape[1:]), first.dtype)
        order = np.argsort(wanted, kind="stable")  # neighbours are read together
        numbers = np.searchsorted(self._ends, wanted[order], side="right")
        for number in np.unique(numbers):
            places = order[numbers == number]
            begin = self._ends[number] - len(self._arrays[number])
            result[places] = self._arrays[number][wanted[places] - begin]
        return result


def _files(paths: Paths) -> list[Path]:
    if isinstance(paths, (str, os.PathLike)):
        path = os.fspath(paths)
        found = [path] if os.path.isfile(path) else sorted(glob.glob(path))
    else:
        found = [os.fspath(path) for path in paths]
    if not found:
        raise UsageError(f"there are no files {paths!r}")
    files = [Path(path) for path in found]
    for file in files:
        if not file.is_file():
            raise UsageError(f"there is no file {file}")
        if file.suffix not in (".npy", ".safetensors") or file.suffix != files[0].suffix:
            raise UsageError(f"{file}: pass .npy files, or .safetensors files")
    return files


def _column(paths: Paths, name: str) -> _Column:
    files = _files(paths)
    if files[0].suffix == ".safetensors":
        columns = _tensors(files)
        if name not in columns:
            raise UsageError(f"{files[0]} has no tensor {name!r}, but {sorted(columns)}")
        return columns[name]
    return _Column([_load(file) for file in files], files)


def _load(file: Path) -> Array:
    import numpy as np

    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        if not isinstance(array, np.memmap):
            raise ValueError("it holds several arrays")
    except (EOFError, ValueError) as error:
        raise UsageError(
            f"{file} is no .npy file of numbers, or was cut off ({error}); write it anew"
        ) from None
    # NumPy's own map keeps the file open, and there may be thousands.
    return np.ndarray(array.shape, array.dtype, map_bytes(file), array.offset, array.strides)


def _tensors(files: Sequence[Path]) -> dict[str, _Column]:
    found = [map_file(file)[0] for file in files]
    if not found[0]:
        raise UsageError(f"{files[0]} has no tensors")
    for file, its in zip(files, found, strict=True):
        if its.keys() != found[0].keys():
            raise UsageError(f"{file} has the tensors {sorted(its)}, {files[0]} {sorted(found[0])}")
    return {name: _Column([its[name] for its in found], files) for name in found[0]}
