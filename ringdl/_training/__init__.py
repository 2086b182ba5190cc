"""Training together, for any framework: what an adapter drives.

An adapter's `Store` reads and writes its framework's gradients; the adapter notifies `Gradients`
when they are accumulated and used. Rounds, steps, replicas, joining and process sets are the same
for all of them.
"""

from ringdl._training.gradients import Gradients, agreeing, end_passes
from ringdl._training.store import SparseStore, Spec, Store

__all__ = ["Gradients", "SparseStore", "Spec", "Store", "agreeing", "end_passes"]
