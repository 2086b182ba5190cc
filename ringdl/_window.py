"""Memory that the ranks of one host share: opened, told of, and mapped, all at `init`."""

from __future__ import annotations

from ringdl._communicator import Communicator
from ringdl._engine import Reduction
from ringdl._errors import Error


def share_memory(communicator: Communicator, hosts: list[int]) -> bool:
    """Let the ranks of each host reach one another's memory. Collective, on all ranks.

    Each rank opens a segment, tells the others where it is, and maps those of its host. Either all
    ranks have reached all others of their hosts, or none uses shared memory: processes in
    containers of their own cannot see each other, whatever MPI says.

    Args:
        communicator: one of all ranks.
        hosts: the number of each rank's host.

    Returns:
        Whether they share memory.
    """
    import numpy as np

    engine, rank = communicator._engine, communicator.rank
    try:
        own = engine.open_window(hosts.count(hosts[rank]))
    except Error:
        own = (0, 0, 0, 0)
    mine = np.array([own], np.uint64).view(np.int64)
    addresses = communicator.allgather(mine, "ringdl.window").view(np.uint64).tolist()
    reached = own[2] > 0 and all(
        engine.reach(other, address)
        for other, address in enumerate(addresses)
        if other != rank and hosts[other] == hosts[rank]
    )
    all_reached = communicator.allreduce(np.array([reached]), Reduction.Min, "ringdl.window")
    if all_reached[0]:
        engine.use_window(hosts)
    else:
        engine.close_window()
    return bool(all_reached[0])
