"""The ranks of compiled functions' collectives, and the order in which they make them.

Calls are ordered by an effect: XLA passes a token from one to the next, through loops and from one
compiled function to another. So all ranks that run the same program make them in the same order,
and none waits for one that another rank makes later. Where several devices run a program, each has
a token of its own, and its calls are matched with those of the same device of other ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
from jax._src import dispatch, effects

import ringdl
from ringdl import _engine, _recovery, _startup
from ringdl._engine import Kind
from ringdl._errors import UsageError

_numbers = itertools.count()
by_number: weakref.WeakValueDictionary[int, Ranks] = weakref.WeakValueDictionary()


class _Order(effects.Effect):
    def __repr__(self) -> str:
        return "the order of ringdl's collectives"

    __str__ = __repr__


ORDER = _Order()
for _kind in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.shardable_ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kind.add_type(_Order)


def _settle() -> None:
    """Wait for what XLA is still to carry out, and forget what has failed there.

    JAX keeps the token of a call that failed, and all later ones of the thread fail by it.
    """
    with suppress(Exception):  # which whoever needs the result gets, too
        jax.effects_barrier()
    dispatch.runtime_tokens.clear()
    _engine.xla_share_memory(None)


def _share_memory(communicator: ringdl.Communicator) -> None:
    """Have XLA allocate arrays where the ranks share memory, from now on."""
    is_rank = isinstance(communicator, ringdl.Communicator)  # else a child process of one
    if is_rank and communicator._shared.jax_memory:
        _engine.xla_share_memory(communicator._shared.engine)


_startup.before_shutdown.append(_settle)
_startup.after_init.append(_share_memory)
_recovery.renumbered.append(jax.clear_caches)  # functions are compiled for numbers of ranks
if ringdl.is_initialized():
    _share_memory(ringdl.get_communicator())


class Ranks:
    """The ranks of a compiled function's collectives: of one communicator, from epoch to epoch."""

    def __init__(self, communicator: ringdl.Communicator) -> None:
        self.communicator = communicator
        self.number = next(_numbers)
        by_number[self.number] = self
        communicator._shared.add(self)
        self._bind()
        weakref.finalize(self, _engine.xla_forget, self.number).atexit = False

    def _bind(self) -> None:
        its = self.communicator
        its._bind()
        engine: Any = its._engine
        if isinstance(engine, _engine.Communicator):
            _engine.xla_use(self.number, engine, its._group, its._timeout)
        else:  # a group of ranks that there are no more
            _engine.xla_forget(self.number)

    def place(self) -> dict[str, Any]:
        """What is compiled: shapes and roots depend on it."""
        return {"ranks": self, "rank": self.communicator.rank, "size": self.communicator.size}


def ranks_of(communicator: ringdl.Communicator | None) -> Ranks:
    """Those of a communicator, by default of the one of `ringdl.init`; always the same object."""
    its = ringdl.get_communicator() if communicator is None else communicator
    if not isinstance(its, ringdl.Communicator):
        raise UsageError(f"communicator is {its!r}; pass one of ringdl.get_communicator().group()")
    found: Ranks | None = its.__dict__.get("_jax_ranks")
    if found is None:
        found = its.__dict__["_jax_ranks"] = Ranks(its)
    return found


def name_of(what: str, device: int = -1) -> str:
    """What a compiled function's works are matched by, on one of several devices or on all."""
    return f"in jax.jit{'' if device < 0 else f' on device {device}'}: {what}"


@contextmanager
def telling(ranks: Ranks, kind: Kind, what: str) -> Iterator[None]:
    """Around what precedes a call in a function that is traced: others hear of an error in it.

    Args:
        ranks: of the call.
        kind: the call's.
        what: the call's name, without where it is made.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            jax.effects_barrier()  # calls of functions that were dispatched before come first
        mesh = jax.sharding.get_abstract_mesh()
        devices = range(mesh.size) if mesh.manual_axes and mesh.size > 1 else (-1,)
        names = [name_of(what, device) for device in devices]
        ranks.communicator._refuse(error, kind, *names)
        raise
