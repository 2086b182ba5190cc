"""An init() that all ranks refuse: a script that catches it ends as it likes, or tries again."""

import os
import sys

import ringdl

try:
    ringdl.init()
except ringdl.UsageError as error:
    if sys.argv[1:] == ["again"]:
        del os.environ["RINGDL_TUNING"]
        ringdl.init()
        print(f"rank {ringdl.rank()} of {ringdl.size()} after {str(error)[:30]}", flush=True)
        sys.exit(0)
    sys.exit(f"refused: {error}")
