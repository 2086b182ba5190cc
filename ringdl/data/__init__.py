"""Which samples of a dataset each rank takes, epoch by epoch, and how they are read."""

from ringdl.data._files import Files
from ringdl.data._loader import Loader
from ringdl.data._sampler import Remainder, ShardedSampler

__all__ = ["Files", "Loader", "Remainder", "ShardedSampler"]
