"""Other Pythons that ringdl's own commands start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def finding_ringdl(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for one that is to find this ringdl.

    And not what lies in the folder where it is started: ringdl's sources, say.
    """
    root = str(Path(__file__).parents[1])
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}
