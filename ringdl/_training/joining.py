"""Ranks that run out of batches before the others."""

from __future__ import annotations

import ringdl


def join(device: int = -1) -> int:
    """Wait until all ranks have called this; until then the others' collectives go on without it.

    Call it after the last batch of an epoch where ranks have more or fewer of them: this rank
    counts as one without gradients, while averages still divide by the number of ranks; see
    `ringdl.Communicator.join`. Ranks that joined early have older parameters then: take those of
    the last one, ``broadcast_parameters(model.state_dict(), root_rank=hvd.join())`` and
    ``broadcast_optimizer_state`` likewise. The next ``step()`` checks that they are equal.

    Args:
        device: ignored.

    Returns:
        The rank that joined last, the same on all ranks.
    """
    del device
    return ringdl.join()
