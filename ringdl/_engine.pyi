"""The C++ engine. Private: use the names that ``ringdl`` exports."""

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np

class DType(enum.Enum):
    float64 = 0
    float32 = 1
    float16 = 2
    bfloat16 = 3
    int64 = 4
    int32 = 5
    int16 = 6
    int8 = 7
    uint8 = 8
    bool = 9

class Reduction(enum.Enum):
    Sum = 0
    Average = 1
    Min = 2
    Max = 3
    Product = 4

class Work:
    @property
    def ended(self) -> bool: ...
    @property
    def label(self) -> str: ...
    def take_gathered(self) -> tuple[list[int], np.ndarray[Any, Any]]: ...

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_shut_down(self) -> bool: ...
    def allreduce(
        self, array: Any, dtype: DType | None, reduction: Reduction, name: str
    ) -> Work: ...
    def broadcast(self, array: Any, dtype: DType | None, root: int, name: str) -> Work: ...
    def allgather(self, array: Any, dtype: DType | None, name: str) -> Work: ...
    def barrier(self, name: str) -> Work: ...
    def wake(self) -> None: ...
    def wait(self, work: Work, timeout: float) -> None: ...
    def shutdown(self) -> None: ...
    def set_segment_bytes(self, segment_bytes: int) -> None: ...
    def set_may_spin(self, may_spin: bool) -> None: ...
    def stats(self) -> dict[str, float]: ...

class GradientBuckets:
    def __init__(
        self,
        communicator: Communicator,
        specs: Sequence[tuple[str, list[int], DType, list[int]]],
        bucket_bytes: int,
        first_bucket_bytes: int,
        reduction: Reduction,
        first_number: int,
    ) -> None: ...
    def numpy_view(self, index: int) -> np.ndarray[Any, Any]: ...
    def dlpack_view(self, index: int) -> Any: ...
    def ready(self, index: int) -> None: ...
    def wait(self, timeout: float) -> list[bool]: ...

def simd_level() -> str: ...
def alone() -> Communicator: ...
def loopback(size: int) -> list[Communicator]: ...
def over_mpi(
    module_path: str,
    open_mpi: bool,
    comm: int,
    byte: int,
    errors_return: int,
    any_source: int,
    max_tag: int,
    threads: bool,
) -> Communicator: ...
def plan_buckets(
    specs: Sequence[tuple[str, list[int], DType, list[int]]],
    bucket_bytes: int,
    first_bucket_bytes: int,
) -> list[list[int]]: ...
