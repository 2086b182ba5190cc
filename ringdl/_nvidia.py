"""Where NVIDIA's libraries are: in pip's wheels, or in a CUDA toolkit."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from ringdl._errors import Error


def libraries(name: str) -> Iterator[Path]:
    """Those with this file name, in which ``*`` stands for anything, as ``libnvrtc.so.*``."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or []:
        yield from Path(folder).glob(f"*/lib/{name}")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if variable in os.environ:
            yield from Path(os.environ[variable]).glob(f"lib64/{name}")
    yield from Path("/usr/local/cuda").glob(f"lib64/{name}")


def compiler(name: str, file: str, driver: int, wheel: str) -> Path:
    """The newest library that makes code for a driver.

    Args:
        name: for people.
        file: its name, as ``libnvrtc.so``; versions follow.
        driver: the newest CUDA that it runs, as 13010; code of the same major version runs, too.
        wheel: what brings the library, without the CUDA version in its name.

    Raises:
        Error: there is none of that CUDA or an earlier one.
    """
    newest = driver // 1000
    found = {
        int(path.suffix[1:]): path for path in libraries(f"{file}.*") if path.suffix[1:].isdigit()
    }
    suitable = [major for major in found if 12 <= major <= newest]
    if not suitable:
        raise Error(
            f"there is no {name} of CUDA {newest} to compile others: "
            f"pip install {wheel}{'' if newest > 12 else '-cu12'}"
        )
    return found[max(suitable)]
