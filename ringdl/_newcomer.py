"""``python -m ringdl._newcomer``: what MPI starts in place of a rank that has failed.

It runs what that one has run: the same script, with the same arguments and environment. Nothing but
the standard library and mpi4py is loaded before the environment is there: libraries read from it
with how many threads they compute.
"""

from __future__ import annotations

import os
import runpy
import sys

from ringdl import _newcomers


def main() -> None:
    """Run the script, until it ends, or this process does."""
    script = _newcomers.greet()
    sys.argv = [script.file, *script.arguments]
    try:
        if script.module is None:
            sys.path[0] = os.path.dirname(script.file)
            runpy.run_path(script.file, run_name="__main__")
        else:
            runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    except BaseException as error:
        if not _newcomers.has_joined():
            from ringdl import _mpi

            _mpi.end_alone(error)
        raise
    if not _newcomers.has_joined():
        _newcomers.leave("the script has ended without ringdl.elastic.run()")


if __name__ == "__main__":
    main()
