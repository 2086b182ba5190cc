"""``python -m ringdl bench``: how fast a collective is here, with nccl-tests' columns.

See docs/benchmark.md. Nothing else in ringdl imports this package.
"""

from ringdl.bench._run import main

__all__ = ["main"]
