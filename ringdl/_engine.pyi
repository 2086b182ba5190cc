"""The C++ engine. Private: use the names that ``ringdl`` exports."""

import enum
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
Result = TypeVar("Result")

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

class Kind(enum.Enum):
    allreduce = 0
    broadcast = 1
    allgather = 2
    barrier = 3
    reducescatter = 4
    alltoall = 5
    gather = 6
    scatter = 7
    message = 8

class Algorithm(enum.Enum):
    ring = 0
    doubling = 1
    mpi = 2
    direct = 3
    hierarchical = 4

class Group:
    @property
    def id(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...

class CustomOperation:
    def __init__(self, address: int, digest: int, name: str, owner: object) -> None: ...

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
    def submit(
        self,
        kind: Kind,
        array: Any | None,
        dtype: DType | None,
        reduction: Reduction = ...,
        root: int = -1,
        name: str = "",
        group: Group | None = None,
        algorithm: Algorithm | None = None,
        operation: CustomOperation | None = None,
        splits: Sequence[int] = ...,
        output: Any | None = None,
        compression: DType | None = None,
    ) -> Work: ...
    def allreduce_now(self, x: Any, op: Any) -> Work | bool | None: ...
    def group(self, ranks: Sequence[int], salt: int) -> Group: ...
    def pair(self, from_rank: int, to_rank: int, group: Group | None) -> Group: ...
    def wake(self) -> None: ...
    def wait(self, work: Work, timeout: float, for_good: bool) -> None: ...
    def forget_submitters(self) -> None: ...
    def shutdown(self) -> None: ...
    def open_window(self, local_ranks: int) -> tuple[int, int, int, int]: ...
    def reach(self, rank: int, address: Sequence[int]) -> bool: ...
    def use_window(self, hosts: Sequence[int]) -> None: ...
    def close_window(self) -> None: ...
    def allocate(self, byte_count: int) -> np.ndarray[Any, Any]: ...
    def set_segment_bytes(self, segment_bytes: int) -> None: ...
    def set_choice(
        self, costs: list[list[tuple[float, float]]], wanted: Algorithm | None
    ) -> None: ...
    def set_may_spin(self, may_spin: bool) -> None: ...
    def set_watchdog(self, after: float, dumps: bool) -> None: ...
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
        group: Group | None,
        compression: DType | None,
    ) -> None: ...
    def places(self) -> list[int]: ...
    def connect(self, places: Sequence[Sequence[int]]) -> None: ...
    def numpy_view(self, index: int) -> np.ndarray[Any, Any]: ...
    def dlpack_view(self, index: int) -> Any: ...
    def ready(self, index: int) -> None: ...
    def wait(self, timeout: float, for_good: bool) -> list[bool]: ...

def dump_on_signal(signal: int) -> None: ...
def stream_copy(into: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None: ...
def simd_level() -> str: ...
def set_default(
    communicator: Communicator | None, finish: Callable[[Work, Any], Any] | None
) -> None: ...
def quick_allreduce_(otherwise: Callable[P, Result]) -> Callable[P, Result]: ...
def default_costs() -> list[list[tuple[float, float]]]: ...
def choose_allreduce(
    costs: list[list[tuple[float, float]]],
    byte_count: int,
    hosts: list[int],
    segment_bytes: int,
) -> Algorithm: ...
def is_possible_allreduce(
    algorithm: Algorithm, byte_count: int, hosts: list[int], segment_bytes: int
) -> bool: ...
def effort_of_allreduce(
    algorithm: Algorithm, byte_count: int, hosts: list[int]
) -> tuple[float, float]: ...
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
