"""Training together, for any framework: what an adapter drives.

An adapter tells a `Store` how its framework's gradients are seen and written, and `Gradients` when
they are accumulated and used. Rounds, steps, replicas, joining and process sets are the same for
all of them.
"""

from ringdl._training.gradients import Gradients
from ringdl._training.store import Spec, Store

__all__ = ["Gradients", "Spec", "Store"]
