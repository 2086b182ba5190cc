"""Commits in files, of the newest of which a job begins again."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ringdl import _safetensors
from ringdl._communicator import Communicator
from ringdl._errors import UsageError
from ringdl._files import write_whole
from ringdl._parts import split
from ringdl._safetensors import Array, Arrays
from ringdl.elastic import _trees

_ABOUT = "ringdl"
_CHECKSUM = "crc32"
_FILE = re.compile(r"(\d{9,})(?:\.own-\d+-of-(\d+))?\.safetensors")
_BESIDE = re.compile(rf"\.{_FILE.pattern}\.\d+")
"""What `write_whole` leaves where its process is killed."""

_BEING_WRITTEN_SECONDS = 600
"""What was changed more recently may still be written, by another job."""

_KEPT = 2
"""How many commits stay: the newest may turn out to be cut."""


@dataclass(frozen=True)
class Job:
    """One that writes commits.

    Attributes:
        run: a name for it: files of one commit are of one job.
        strange: the numbers of commits that it has found, and which are of another state.
        damaged: likewise of those that nobody can take.
    """

    run: str
    strange: frozenset[int] = frozenset()
    damaged: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Found:
    """What there is to begin with.

    Attributes:
        job: the one that begins now.
        last_number: the highest of a file, whether it is taken or not: new ones come after it.
        number: of the commit that is taken; 0 if there is none.
        values: its values; None if there is none.
        lengths: of the parts of each rank, by name.
    """

    job: Job
    last_number: int
    number: int = 0
    values: dict[str, Any] | None = None
    lengths: dict[str, list[int]] = field(default_factory=dict)


class _StrangeError(UsageError):
    """A commit is of a state with other names."""


class Checkpoints:
    """Every so many commits, in a folder that all hosts see.

    Rank 0 writes the values, each rank its own parts, in a thread of its own. A file is written
    beside its place, made to last, and moved there. Its checksum is in it.

    Args:
        folder: made if it is not there.
        every: so many commits.
    """

    job = Job("")
    """The one of what `newest` has found."""

    def __init__(self, folder: str | os.PathLike[str], every: int) -> None:
        self.folder = Path(folder).absolute()
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
            common = {"number": number, "size": size, "run": self.job.run}
            arrays: Arrays = {}
            try:
                described = {
                    name: _trees.encode(value, name, arrays)
                    for name, value in (values.items() if rank == 0 else ())
                }
                if own:
                    _write(self._own(number, rank, size), own, common | {"rank": rank})
                if rank == 0:
                    about = common | {"own": sorted(own), "values": described}
                    _write(self.folder / f"{number:09}.safetensors", arrays, about)
            finally:
                if rank == 0:
                    self._remove_old(number, has_own=bool(own))
        except Exception as error:  # told of in the thread that trains
            self._problem = error

    def _remove_old(self, newest: int, has_own: bool) -> None:
        """Remove commits before the last two that all ranks have written, and what is incomplete.

        Of the one before `newest`, ranks may still write their parts. Those of another state stay.
        """
        found, job = self._files(), self.job
        files = {number: its for number, its in found.items() if number not in job.strange}
        whole = {number for number, its in files.items() if _is_whole(its, has_own)} - job.damaged
        last = sorted(whole, reverse=True)[:_KEPT]
        for number, its in files.items():
            is_old = len(last) == _KEPT and number < last[-1]
            if is_old or (number not in whole and number < newest - self._every):
                for file in its:
                    if _is_ours(file):
                        file.unlink(missing_ok=True)

    def _files(self) -> dict[int, list[Path]]:
        """By commit."""
        found: defaultdict[int, list[Path]] = defaultdict(list)
        for file in self.folder.iterdir() if self.folder.is_dir() else iter(()):
            match = _FILE.fullmatch(file.name)
            if match is not None:
                found[int(match[1])].append(file)
        return found

    def newest(self, like: dict[str, Any], own: Iterable[str]) -> Found:
        """The newest commit whose files are whole.

        Those that were cut, or are no checkpoints, are warned of, and the one before is taken. What
        writers that were killed have left is removed.

        Args:
            like: values of the same structure.
            own: names of the parts that ranks have.
        """
        numbers = sorted(self._files(), reverse=True)
        run, last_number = secrets.token_hex(8), max(numbers, default=0)
        for file in self.folder.iterdir() if self.folder.is_dir() else iter(()):
            if _BESIDE.fullmatch(file.name):
                with suppress(OSError):
                    if time.time() - file.lstat().st_mtime > _BEING_WRITTEN_SECONDS:
                        file.unlink(missing_ok=True)
        strange: set[int] = set()
        damaged: set[int] = set()
        taken = 0
        values: dict[str, Any] | None = None
        lengths: dict[str, list[int]] = {}
        for number in numbers:
            try:
                values, lengths = self._read(number, like, own)
                taken = number
                break
            except Exception as error:  # other programs' files may hold anything
                (strange if isinstance(error, _StrangeError) else damaged).add(number)
                warnings.warn(
                    f"checkpoint {number} is left out: {error or repr(error)}",
                    RuntimeWarning,
                    stacklevel=4,
                )
        job = Job(run, frozenset(strange), frozenset(damaged))
        return Found(job, last_number, taken, values, lengths)

    def _read(
        self, number: int, like: dict[str, Any], own: Iterable[str]
    ) -> tuple[dict[str, Any], dict[str, list[int]]]:
        arrays, about = _read(self.folder / f"{number:09}.safetensors")
        if about["values"].keys() != like.keys():
            raise _StrangeError(
                f"it has the values {sorted(about['values'])}, and this state {sorted(like)}"
            )
        if about["own"] != sorted(own):
            raise _StrangeError(
                f"it has own parts of {about['own']}, and this state of {sorted(own)}"
            )
        lengths: dict[str, list[int]] = {name: [] for name in about["own"]}
        for rank in range(about["size"] if lengths else 0):
            file = self._own(number, rank, about["size"])
            parts, its = _read(file)
            if (its["number"], its["run"]) != (about["number"], about["run"]):
                raise UsageError(f"{file} was written by another job, or is of another commit")
            for name, part in parts.items():
                lengths[name].append(len(part))
        values = {
            name: _trees.decode(its, like[name], arrays) for name, its in about["values"].items()
        }
        return values, lengths

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


def _is_whole(files: Sequence[Path], has_own: bool) -> bool:
    """Whether all ranks have written their files of a commit, which is whole then."""
    sizes = Counter(match[2] for file in files if (match := _FILE.fullmatch(file.name)))
    parts = {size: count for size, count in sizes.items() if size is not None}
    has_parts = any(count >= int(size) for size, count in parts.items()) if parts else not has_own
    return None in sizes and has_parts


def _is_ours(file: Path) -> bool:
    try:
        return _ABOUT in _safetensors.map_file(file)[1]
    except (UsageError, OSError):
        return False


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
        array = arrays[name]
        rows = np.ascontiguousarray(_safetensors.little_endian(array)).reshape(-1)
        head = f"{name} {array.dtype.name} {array.shape}"
        checksum = zlib.crc32(rows.view(np.uint8).data, zlib.crc32(head.encode(), checksum))
    return checksum
