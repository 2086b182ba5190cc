"""``python -m ringdl simulate``: what allreduces and steps take on a cluster that need not exist.

See docs/simulate.md. Nothing else in ringdl imports this package.
"""

from ringdl.simulate._command import main

__all__ = ["main"]
