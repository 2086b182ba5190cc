"""What a rank runs, and with what environment: so that another process can run the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from ringdl._errors import UsageError

_OF_LAUNCHERS = ("PMIX_", "OMPI_", "PRTE_", "PMI_", "SLURM_")
OF_ONE_JOB = ("RINGDL_TIMELINE", "RINGDL_FLIGHT_RECORDER")
"""What newcomers have to be without: records are of the job that they join."""
_BEFORE_PYTHON = ("PYTHON", "LD_")
"""How variables begin that have to be there when a process starts."""


@dataclass(frozen=True)
class Script:
    """What a rank runs.

    Attributes:
        is_module: whether it was named after ``-m``.
        name: of the module, or the path of a file, or of a folder with ``__main__.py``.
        words: the arguments after it.
        options: those of the interpreter, before it.
        folder: in which it was started.
    """

    is_module: bool
    name: str
    words: Sequence[str]
    options: Sequence[str]
    folder: str

    @property
    def path(self) -> str:
        """What Python has put in front of ``sys.path``."""
        if self.is_module:
            return self.folder
        is_folder = os.path.isdir(self.name)
        return self.name if is_folder else os.path.dirname(os.path.realpath(self.name))


def own_script(command: Sequence[str]) -> Script:
    """What this process runs.

    Args:
        command: that it was started by, from the interpreter on.

    Raises:
        UsageError: neither a file nor a module.
    """
    folder = os.environ.get("PWD", "")
    folder = folder if os.path.isdir(folder) else os.getcwd()
    words, options = list(command[1:]), list[str]()
    while words and words[0].startswith("-") and words[0] != "-":
        option = words.pop(0)
        if option == "--check-hash-based-pycs" or option in ("-W", "-X"):
            options += [option, *words[:1]]
            words = words[1:]
        elif not option.startswith(("--", "-W", "-X")) and option[-1:] in ("m", "c"):
            options += [option[:-1]] * (option[:-1] != "-")  # -um is -u -m
            if option[-1] == "m" and words:
                return Script(True, words[0], words[1:], options, folder)
            words = []
        else:
            options.append(option)
    if not words or words[0] == "-":
        raise UsageError(
            "ranks cannot be replaced (RINGDL_REPLACEMENTS) in a program that is no file and no "
            "module: write it to a file"
        )
    return Script(False, os.path.join(folder, words[0]), words[1:], options, folder)


def is_early(name: str) -> bool:
    """Whether a variable has to be there when Python starts, or programs are loaded."""
    return name.startswith(_BEFORE_PYTHON)


def inherited() -> dict[str, str]:
    """With what environment this process has begun, less what is this rank's alone."""
    with open("/proc/self/environ", "rb") as file:
        pairs = [os.fsdecode(each).partition("=") for each in file.read().split(b"\0") if each]
    return {
        name: value
        for name, _, value in pairs
        if not name.startswith(_OF_LAUNCHERS) and name not in OF_ONE_JOB
    }
