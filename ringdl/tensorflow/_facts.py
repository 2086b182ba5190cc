"""What a graph asks about the job: when it runs, not when it is made."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import ringdl
from ringdl._training import process_sets
from ringdl.tensorflow._graph import fact


def rank_op(name: str | None = None) -> Any:
    """`ringdl.rank` as a tensor."""
    return fact(ringdl.rank, name)


def local_rank_op(name: str | None = None) -> Any:
    """`ringdl.local_rank` as a tensor."""
    return fact(ringdl.local_rank, name)


def local_size_op(name: str | None = None) -> Any:
    """`ringdl.local_size` as a tensor."""
    return fact(ringdl.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """How many ranks a process set has, as a tensor."""
    return fact(lambda: len(_ranks_of(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Whether this rank is in a process set, as a tensor: 1 or 0."""
    return fact(lambda: int(ringdl.rank() in _ranks_of(process_set_id)), name)


def _ranks_of(process_set_id: int) -> list[int]:
    ringdl.get_communicator()
    process_set = process_sets._registered.get(process_set_id)
    if process_set is None:
        raise ringdl.UsageError(f"there is no process set {process_set_id}; see add_process_set()")
    return process_set.ranks or []


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. The arguments have no effect."""
    del ext_base_name, verbose
    return bool(tf.config.list_physical_devices("GPU"))


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
