"""Runs the scripts on these ranks, and saves what they have learnt.

python -m ringdl run -n 2 -m tests.scripts DIRECTORY
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import torch

import ringdl.torch as hvd

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("[!_]*.py"))


def learnt(variables: dict[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of every model of a script, and its numbers."""
    values: dict[str, Any] = {}
    for name, value in variables.items():
        if isinstance(value, torch.nn.Module):
            values |= {f"{name}.{key}": each for key, each in value.state_dict().items()}
        if name in ("losses", "scale"):
            values[name] = torch.tensor(value)
    return values


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in NAMES:
        torch.set_default_dtype(torch.float64)
        values = learnt(runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__"))
        torch.save(values, folder / f"{name}.{hvd.size()}.{hvd.rank()}")


if __name__ == "__main__":
    main()
