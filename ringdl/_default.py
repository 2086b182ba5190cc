"""The default communicator's collectives as functions of the module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from ringdl import _engine
from ringdl._communicator import Communicator
from ringdl._startup import get_communicator

P = ParamSpec("P")
Result = TypeVar("Result")


def rank() -> int:
    """See `Communicator.rank`."""
    return get_communicator().rank


def size() -> int:
    """See `Communicator.size`."""
    return get_communicator().size


def local_rank() -> int:
    """See `Communicator.local_rank`."""
    return get_communicator().local_rank


def local_size() -> int:
    """See `Communicator.local_size`."""
    return get_communicator().local_size


def local_device() -> int | None:
    """See `Communicator.local_device`."""
    return get_communicator().local_device


def host_rank() -> int:
    """See `Communicator.host_rank`."""
    return get_communicator().host_rank


def host_count() -> int:
    """See `Communicator.host_count`."""
    return get_communicator().host_count


def _of_default(
    method: Callable[Concatenate[Communicator, P], Result],
) -> Callable[P, Result]:
    """A method of the default communicator as a function of the module."""

    def function(*args: P.args, **kwargs: P.kwargs) -> Result:
        return method(get_communicator(), *args, **kwargs)

    function.__name__ = method.__name__
    function.__qualname__ = method.__name__
    function.__doc__ = method.__doc__
    function.__wrapped__ = partial(method, None)  # type: ignore[attr-defined, arg-type]
    return function


empty = _of_default(Communicator.empty)
stats = _of_default(Communicator.stats)
join = _of_default(Communicator.join)
split = _of_default(Communicator.split)
group = _of_default(Communicator.group)
allreduce = _of_default(Communicator.allreduce)
allreduce_ = _engine.quick_allreduce_(_of_default(Communicator.allreduce_))
allreduce_async = _of_default(Communicator.allreduce_async)
allreduce_async_ = _of_default(Communicator.allreduce_async_)
grouped_allreduce = _of_default(Communicator.grouped_allreduce)
grouped_allreduce_ = _of_default(Communicator.grouped_allreduce_)
grouped_allreduce_async = _of_default(Communicator.grouped_allreduce_async)
grouped_allreduce_async_ = _of_default(Communicator.grouped_allreduce_async_)
reducescatter = _of_default(Communicator.reducescatter)
reducescatter_async = _of_default(Communicator.reducescatter_async)
broadcast = _of_default(Communicator.broadcast)
broadcast_ = _of_default(Communicator.broadcast_)
broadcast_async = _of_default(Communicator.broadcast_async)
broadcast_async_ = _of_default(Communicator.broadcast_async_)
allgather = _of_default(Communicator.allgather)
allgather_async = _of_default(Communicator.allgather_async)
alltoall = _of_default(Communicator.alltoall)
alltoall_async = _of_default(Communicator.alltoall_async)
gather = _of_default(Communicator.gather)
gather_async = _of_default(Communicator.gather_async)
scatter = _of_default(Communicator.scatter)
scatter_async = _of_default(Communicator.scatter_async)
send = _of_default(Communicator.send)
send_async = _of_default(Communicator.send_async)
recv_ = _of_default(Communicator.recv_)
recv_async_ = _of_default(Communicator.recv_async_)
barrier = _of_default(Communicator.barrier)
barrier_async = _of_default(Communicator.barrier_async)
broadcast_object = _of_default(Communicator.broadcast_object)
allgather_object = _of_default(Communicator.allgather_object)
