"""What the communicators of a process have in common, from one `init` to the next."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ringdl._settings import Settings
from ringdl._tuning import default_tuning

if TYPE_CHECKING:
    from ringdl import _engine
    from ringdl._engine import Algorithm
    from ringdl._mpi import Hosts
    from ringdl._ulfm import Connections


class Bound(Protocol):
    """What refers to an engine, and gets the next one."""

    def _bind(self) -> None: ...


class Shared:
    """The ranks of a process' communicators, and the engine that connects them.

    After `shutdown`, `init` gives it another engine, which may connect other ranks: a new *epoch*.
    Communicators follow at once, by `bind`. What ranks have to agree on follows when it is used
    next, since then all of them use it: who holds such a thing compares epochs.

    Attributes:
        engine: of this epoch.
        epoch: which generation of ranks this is, from 1 on; the same on all ranks.
        hosts: the number of each rank's host, by rank of the engine.
        memory_hosts: the same for memory: a rank that shares none is on a host of its own.
        tuning: what algorithms are chosen by.
        algorithm: what is used instead, wherever possible.
        vendor: of the MPI library.
        mpi: the mpi4py communicator that the engine's is a duplicate of; None if there is no MPI.
        members: the ranks of the engine, as `mpi` counts them: all of it, but those that failed.
        place: where this rank is among the hosts; None if there is no MPI.
        connections: by which ranks go on without those that fail; None if they cannot.
        settings: that all ranks have agreed on.
        timeout: seconds of a wait that names none.
        checks_replicas: whether wrapped optimizers compare the parameters of all ranks.
        jax_memory: whether arrays of JAX are born where ranks share memory.
        next_bucket: buckets have numbers that their ranks agree on, and each rank uses once.
        made: how often this rank has made each group, gradients and the like, in this epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._bound: weakref.WeakSet[Bound] = weakref.WeakSet()

    def renew(
        self,
        engine: _engine.Communicator,
        settings: Settings,
        hosts: Sequence[int] | None = None,
        mpi: Any = None,
        vendor: str = "no MPI",
    ) -> None:
        """Begin an epoch: another engine, and what is known of its ranks.

        Args:
            engine: it.
            settings: of this rank, until all ranks have agreed.
            hosts: the number of each rank's host; by default all are on one.
            mpi: see above.
            vendor: see above.
        """
        self.engine = engine
        self.epoch += 1
        self.hosts: Sequence[int] = [0] * engine.size if hosts is None else hosts
        self.memory_hosts: Sequence[int] = range(engine.size)
        self.tuning = default_tuning(len(set(self.hosts)))
        self.algorithm: Algorithm | None = None
        self.vendor = vendor
        self.mpi = mpi
        self.members: Sequence[int] = range(engine.size)
        self.place: Hosts | None = None
        self.connections: Connections | None = None
        self.settings = settings
        self.timeout = settings.timeout
        self.checks_replicas = settings.check_replicas
        self.jax_memory = settings.jax_memory
        self.next_bucket = 0
        self.made: Counter[tuple[Any, ...]] = Counter()

    def ranks_of_mpi(self, ranks: Sequence[int] | None) -> list[int] | None:
        """Some ranks of the engine, or all, as `mpi` counts them; None if these are all of it."""
        if ranks is None and self.engine.size == self.mpi.Get_size():
            return None
        chosen = range(self.engine.size) if ranks is None else ranks
        return [self.members[rank] for rank in chosen]

    def add(self, bound: Bound) -> None:
        """Bind this one, now and in later epochs, for as long as it lives."""
        self._bound.add(bound)
        bound._bind()

    def bound(self) -> list[Bound]:
        """All that are alive."""
        return list(self._bound)

    def bind(self) -> None:
        """Have all follow to the engine of this epoch."""
        for bound in self.bound():
            bound._bind()
