"""``python -m ringdl compare``: policies of training together, side by side.

See docs/policies.md. Nothing else in ringdl imports this package.
"""

from ringdl.compare._command import main

__all__ = ["main"]
