"""Commits in files, of the newest of which a job begins again."""

from __future__ import annotations

import json
import os
import re
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from ringdl import _safetensors
from ringdl._communicator import Communicator
from ringdl._errors import UsageError
from ringdl._parts import split
from ringdl._safetensors import Array, Arrays
from ringdl._training.files import write_whole
from ringdl.elastic import _trees

_ABOUT = "ringdl"
_CHECKSUM = "crc32"
_FILE = re.compile(r"(\d{9})(?:\.own-\d+-of-\d+)?\.safetensors")
_KEPT = 2
"""How many commits stay: the newest may turn out to be cut."""


class Checkpoints:
    """Every so many commits, in a folder that all hosts see.

    Rank 0 writes the values, each rank its own parts, in a thread of its own. A file is written
    beside its place, made to last, and moved there. Its checksum is in it.

    Args:
        folder: made if it is not there.
        every: so many commits.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int) -> None:
        if every < 1:
            raise UsageError(f"a checkpoint every {every} commits; pass 1 or more")
        self.folder = Path(folder)
        self._every = every
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def offer(self, number: int, values: dict[str, Any], own: Arrays, ranks: Communicator) -> None:
        """Begin to write a commit, if it is its turn; the arrays must not change any more."""
        if number % self._every:
            return
        self.finish()
        self._thread = threading.Thread(
            target=self._write,
            args=(number, values, own, ranks.rank, ranks.size),
            name="ringdl-checkpoint",
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until what was begun is written; warns if it was not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        problem, self._problem = self._problem, None
        if problem is not None:
            warnings.warn(
                f"a checkpoint was not written to {self.folder} ({problem}); training goes on, and "
                "the one before stays",
                RuntimeWarning,
                stacklevel=4,
            )

    def _write(
        self, number: int, values: dict[str, Any], own: Arrays, rank: int, size: int
    ) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if own:
                _write(self._own(number, rank, size), own, {"rank": rank, "size": size})
            if rank == 0:
                arrays: Arrays = {}
                described = {
                    name: _trees.encode(value, name, arrays) for name, value in values.items()
                }
                about = {"number": number, "size": size, "own": [*own], "values": described}
                _write(self.folder / f"{number:09}.safetensors", arrays, about)
                self._remove_old()
        except Exception as error:  # told of in the thread that trains
            self._problem = error

    def _remove_old(self) -> None:
        found = self._files()
        newest = sorted({number for number, _ in found})[-_KEPT:]
        for number, file in found:
            if number not in newest:
                file.unlink(missing_ok=True)

    def _files(self) -> list[tuple[int, Path]]:
        files = self.folder.iterdir() if self.folder.is_dir() else iter(())
        matched = [(file, _FILE.fullmatch(file.name)) for file in files]
        return [(int(match[1]), file) for file, match in matched if match is not None]

    def newest(
        self, like: dict[str, Any]
    ) -> tuple[int, dict[str, Any], dict[str, list[int]]] | None:
        """The newest commit whose files are whole: its number, values, and lengths of own parts.

        Those that were cut, or are no checkpoints, are warned of, and the one before is taken.

        Args:
            like: values of the same structure.
        """
        for number in sorted({number for number, _ in self._files()}, reverse=True):
            try:
                return self._read(number, like)
            except (UsageError, OSError) as error:
                warnings.warn(
                    f"checkpoint {number} is left out: {error}", RuntimeWarning, stacklevel=4
                )
        return None

    def _read(
        self, number: int, like: dict[str, Any]
    ) -> tuple[int, dict[str, Any], dict[str, list[int]]]:
        arrays, about = _read(self.folder / f"{number:09}.safetensors")
        if about["values"].keys() != like.keys():
            raise UsageError(
                f"it has the values {sorted(about['values'])}, and this state {sorted(like)}"
            )
        lengths: dict[str, list[int]] = {name: [] for name in about["own"]}
        for rank in range(about["size"] if lengths else 0):
            parts, _ = _read(self._own(number, rank, about["size"]))
            for name, part in parts.items():
                lengths[name].append(len(part))
        values = {
            name: _trees.decode(its, like[name], arrays) for name, its in about["values"].items()
        }
        return number, values, lengths

    def _own(self, number: int, rank: int, size: int) -> Path:
        return self.folder / f"{number:09}.own-{rank}-of-{size}.safetensors"

    def own_rows(self, number: int, lengths: dict[str, list[int]], ranks: Communicator) -> Arrays:
        """This rank's parts, cut anew for the ranks that there are; read from all that have some.

        Raises:
            UsageError: this host does not see the files.
        """
        parts: dict[str, list[Array]] = {name: [] for name in lengths}
        for name, its in lengths.items():
            first, count = split(sum(its), ranks.size, ranks.rank)
            begin = 0
            for writer, length in enumerate(its):
                low, high = max(first, begin), min(first + count, begin + length)
                if low < high or not parts[name]:
                    part = self._part(number, writer, len(its), name)
                    parts[name].append(part[max(low - begin, 0) : max(high - begin, 0)])
                begin += length
        return {name: np.concatenate(its) for name, its in parts.items()}

    def _part(self, number: int, writer: int, size: int, name: str) -> Array:
        file = self._own(number, writer, size)
        try:
            return _safetensors.map_file(file)[0][name]
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read here ({error}): the folder of checkpoints has to be one "
                "that all hosts see"
            ) from None


def _write(file: Path, arrays: Arrays, about: dict[str, Any]) -> None:
    text = json.dumps(about)
    metadata = {_ABOUT: text, _CHECKSUM: str(_checksum(arrays, text))}
    write_whole(file, lambda opened: _safetensors.write(opened, arrays, metadata))


def _read(file: Path) -> tuple[Arrays, dict[str, Any]]:
    """A file's arrays and description.

    Raises:
        UsageError: it was cut, has changed, or was written by another program.
    """
    if not file.exists():
        raise UsageError(f"there is no {file}")
    arrays, metadata = _safetensors.map_file(file)
    text = metadata.get(_ABOUT)
    if text is None:
        raise UsageError(f"{file} is no checkpoint of ringdl.elastic")
    if metadata.get(_CHECKSUM) != str(_checksum(arrays, text)):
        raise UsageError(f"{file} has changed since it was written: its checksum is wrong")
    about: dict[str, Any] = json.loads(text)
    return arrays, about


def _checksum(arrays: Arrays, text: str) -> int:
    checksum = zlib.crc32(text.encode())
    for name in arrays:
        rows = np.ascontiguousarray(arrays[name]).reshape(-1)
        checksum = zlib.crc32(rows.view(np.uint8).data, zlib.crc32(name.encode(), checksum))
    return checksum
