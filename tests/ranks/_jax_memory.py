"""Large arrays of JAX lie where the ranks of a host share memory."""

from __future__ import annotations

import gc
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringdl
import ringdl.jax as rj
from ringdl import Communicator
from tests.ranks.support import expect, needs

COUNT = 1 << 18
"""Of float32: a MiB."""


@jax.jit
def total(x: Any) -> Any:
    return rj.allreduce(x + 1, ringdl.Sum)


def segment_of(x: Any) -> str | None:
    """The segment's number, if the array lies in one."""
    address = x.unsafe_buffer_pointer()
    for _ in range(100):  # a map that other threads change while it is read may lack lines
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end, rest = re.split("[- ]", line, maxsplit=2)
            if int(begin, 16) <= address < int(end, 16):
                return rest.split()[3] if "memfd:ringdl" in rest else None
    raise AssertionError("the array lies nowhere")


@contextmanager
def another_job(**settings: str) -> Iterator[None]:
    """After `init`, with these settings."""
    ringdl.shutdown()
    os.environ.update(settings)
    ringdl.init()
    yield
    for name in settings:
        del os.environ[name]


def check_large_arrays_are_shared(comm: Communicator) -> None:
    x = total(jnp.zeros(COUNT))
    assert (np.asarray(x) == comm.size).all()
    assert (segment_of(x) is not None) == (comm.size > 1)
    assert segment_of(total(jnp.zeros(100))) is None


@needs(ranks=2)
def check_steps_touch_no_new_pages(comm: Communicator) -> None:
    """The C library would give them back to the system after each step, and take new ones."""
    x = jnp.zeros(40 * COUNT)
    for step in range(18):
        if step == 8:
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        x = jax.block_until_ready(total(x))
    of_a_step = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / 10
    assert of_a_step < x.nbytes / resource.getpagesize() / 4, of_a_step


@needs(ranks=2)
def check_arrays_outlive_their_job(comm: Communicator) -> None:
    """Those of an earlier epoch stay valid, and are averaged as any others."""
    early = total(jnp.zeros(COUNT))
    its_segment = segment_of(early)
    with another_job():
        late = total(early)
        assert segment_of(late) not in (None, its_segment)
        assert (np.asarray(early) == comm.size).all()
        assert (np.asarray(late) == comm.size * (comm.size + 1)).all()
    del early
    with another_job(RINGDL_JAX_MEMORY="0"):
        assert segment_of(total(late)) is None
    with another_job(RINGDL_SHARED_MEMORY="0"):
        assert segment_of(total(late)) is None
    ringdl.shutdown()
    assert segment_of(jax.jit(lambda: jnp.ones(COUNT) * 2)()) is None
    ringdl.init()


@needs(ranks=2)
def check_memory_of_failed_works_is_not_used_again(comm: Communicator) -> None:
    """Another rank, which has not heard of the failure yet, may be writing there."""
    kept = total(jnp.zeros(COUNT))
    average = rj.average_gradients()
    step = jax.jit(lambda x: average.update(x, None)[0], donate_argnums=0)
    own = jax.block_until_ready(jnp.zeros(COUNT + comm.rank) + 1)
    address = own.unsafe_buffer_pointer()
    with expect(jax.errors.JaxRuntimeError, "ringdl.MismatchError", "shape"):
        jax.block_until_ready(step(own))
    del own
    others = [jax.block_until_ready(jnp.zeros(COUNT) + each) for each in range(20)]
    assert address not in [each.unsafe_buffer_pointer() for each in others]
    ringdl.shutdown()
    ringdl.init()
    assert (np.asarray(total(jnp.zeros(COUNT))) == comm.size).all()
    assert (np.asarray(kept) == comm.size).all()


@needs(ranks=2)
def check_children_leave_it_alone(comm: Communicator) -> None:
    x = total(jnp.zeros(COUNT))
    before = np.array(x)
    child = os.fork()
    if child == 0:
        is_right = (before == comm.size).all()
        del x
        gc.collect()
        os._exit(not is_right)
    assert os.waitpid(child, 0)[1] == 0
    others = [total(jnp.full(COUNT, float(number))) for number in range(3)]
    assert (np.asarray(x) == before).all()
    assert [float(each[-1]) for each in others] == [comm.size * (n + 1.0) for n in range(3)]
