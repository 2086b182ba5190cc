"""``python -m ringdl``: see `ringdl.cli`."""

import sys

from ringdl.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
