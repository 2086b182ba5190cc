"""Fused gradient buckets, for any framework."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringdl import _engine
from ringdl._communicator import Communicator
from ringdl._engine import BucketWay, DeviceArray, DType, Reduction
from ringdl._errors import Error, MismatchError, UsageError
from ringdl._reductions import CompressionName, wire_dtype
from ringdl._startup import get_communicator
from ringdl._work import seconds_of

AGREEING = "making gradient buckets (DistributedOptimizer, ringdl.Buckets)"
"""The name that ranks agree under: errors name it on a rank if the others forgot to wrap."""
_MOST_ELEMENTS = 1 << 60
_Spec = tuple[str, list[int], DType, list[int]]


class Buckets:
    """Gradients that live in a few flat arrays, each averaged as soon as it is complete.

    A round is: write each gradient into its view, call `ready`, and in the end `wait`. The
    communication of a bucket overlaps whatever is done until then. Which rank produced which
    gradient travels along, so a gradient that is missing on some ranks counts as zeros there.

    Args:
        specs: per gradient (name, shape, dtype) or (name, shape, dtype, strides), strides in
            elements, dense; dtype a floating NumPy dtype or its name (``"bfloat16"`` too).
        bucket_bytes: a bucket is closed once it holds this many bytes. By default 25 MiB inside a
            host, and between hosts what `Tuning.bucket_bytes` finds: so small that most buckets
            travel while gradients are computed, so large that links are not idle between messages.
        first_bucket_bytes: the same for the first one of each dtype, small so that communication
            starts early; by default `bucket_bytes`, at most 1 MiB. Buckets are filled in the
            reverse order of `specs`, about the order in which a backward pass produces gradients.
        op: Average or Sum.
        compression: what float32 travels as between hosts: see `Communicator.allreduce`.
        communicator: by default the one of `ringdl.init`.
        device: the number of the CUDA device on which the gradients lie, or its name as
            ``"cuda:1"``; ``"cuda"`` is `Communicator.local_device`. By default they lie in the
            CPU's memory.

    Attributes:
        device: its number, or None.
        reduced_on_device: whether they are reduced there: if all ranks are on this host and their
            devices reach one another's memory, or by NCCL, where the tuning table or
            RINGDL_ALGORITHM choose that and each rank has a device of its own. Else they go by way
            of the CPU's memory.

    Raises:
        MismatchError: names, shapes, dtypes, order or sizes differ between ranks; on every rank.
        UsageError: on every rank, if one rank has a spec of another form, a dtype that is not
            floating, strides with gaps, or a name that occurs twice.
    """

    def __init__(
        self,
        specs: Iterable[Sequence[Any]],
        bucket_bytes: int | None = None,
        *,
        first_bucket_bytes: int | None = None,
        op: Reduction = Reduction.Average,
        compression: CompressionName | None = None,
        communicator: Communicator | None = None,
        device: int | str | None = None,
    ) -> None:
        self.communicator = communicator or get_communicator()
        self.device: int | None = None
        self._device = device
        self._specs = specs
        self._bucket_bytes = bucket_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._op = op
        self._compression = compression
        self._counts_nonfinite = False
        self._make()

    def _make(self) -> None:
        communicator = self.communicator
        bucket_bytes, first_bucket_bytes = self._bucket_bytes, self._first_bucket_bytes
        if bucket_bytes is None:
            bucket_bytes = communicator.tuning.bucket_bytes(communicator.memory_hosts())
        terms: dict[str, Any] = {}
        gradients: list[_Spec] = []
        try:
            self._specs = list(_iterable(self._specs))
            gradients = [_normalized(spec) for spec in self._specs]
            wire = wire_dtype(self._compression)
            bucket_bytes = _bytes(bucket_bytes)
            if first_bucket_bytes is None:
                first_bucket_bytes = min(bucket_bytes, 1 << 20)
            first_bucket_bytes = _bytes(first_bucket_bytes)
            if not isinstance(self._op, Reduction):
                raise UsageError(f"buckets reduce gradients by Sum or Average, not {self._op!r}")
            self.plan = _engine.plan_buckets(gradients, bucket_bytes, first_bucket_bytes)
            if self._device is not None:
                from ringdl._cuda import number_of

                self.device = number_of(self._device, communicator)
            terms = {
                "bucket_bytes": bucket_bytes,
                "first_bucket_bytes": first_bucket_bytes,
                "op": self._op.name,
                "compression": self._compression,
                "memory": "the CPU's" if self.device is None else "a device's",
            }
        except Exception as error:  # the others must be notified
            terms = {"error": str(error) if isinstance(error, UsageError) else repr(error)}
        number = agree(communicator, gradients, terms)
        assert first_bucket_bytes is not None  # else an error was raised
        engine = communicator._engine
        specs = (gradients, bucket_bytes, first_bucket_bytes)
        memory = _memory(communicator, specs, self.device)
        self.reduced_on_device = memory.way() != BucketWay.here
        places = memory.places()
        others = []
        if places:
            import numpy as np

            others = communicator.allgather(np.array([places]), name=AGREEING).tolist()
        self._buckets = _engine.GradientBuckets(engine, memory, others, self._op, number, wire)
        communicator._shared.next_bucket = number + len(self.plan)
        self._gradients = gradients
        self._numbers = {
            index: number for number, bucket in enumerate(self.plan) for index in bucket
        }
        if self._counts_nonfinite:
            self.count_nonfinite()
        self._sources: dict[int, list[DeviceArray]] = {}
        """By bucket, what is to be copied there: kept until it is."""

    def rebind(self) -> None:
        """After `shutdown` and `init`: go on with the ranks that there are now. Collective.

        Gradients keep their values, but their views are other memory then: call `views` again.

        Raises:
            MismatchError: as the constructor does.
            UsageError: likewise, or this is a group whose ranks are no more.
        """
        old = [Buckets.view(self, index) for index in range(len(self._gradients))]
        self._make()
        for index, values in enumerate(old):
            view = Buckets.view(self, index)
            if self.device is None:
                view[...] = values
            else:
                view.set(values.numpy())

    def views(self) -> list[Any]:
        """The gradients in the order of the specs: zero at first, and always the same memory."""
        return [self.view(index) for index in range(len(self._gradients))]

    def view(self, index: int) -> Any:
        """One of them: of NumPy, or of `ringdl._cuda.Array` on a device."""
        _, shape, dtype, strides = self._gradients[index]
        if self.device is not None:
            from ringdl._cuda import Array, numpy_dtype

            memory = (self._buckets.address(index), self._buckets)
            return Array(shape, numpy_dtype(dtype), self.device, memory, strides)
        view = self._buckets.numpy_view(index)
        if dtype == DType.bfloat16:
            import ml_dtypes

            view = view.view(ml_dtypes.bfloat16)
        return view

    def dlpack(self, index: int) -> Any:
        """The memory of one gradient by DLPack: for ``torch.from_dlpack``."""
        return self._buckets.dlpack_view(index)

    def bucket_of(self, index: int) -> int:
        """The number of the bucket, of `plan`, that gradient `index` is in."""
        return self._numbers[index]

    def packs(self) -> bool:
        """Whether `ready` takes sources, and `unpack` works: on a device that has kernels."""
        return self._buckets.packs()

    def ready(
        self, index: int, stream: int = 0, source: DeviceArray | None = None, scale: float = 1.0
    ) -> bool:
        """Say that gradient `index` is in its view; the last one of a bucket starts its allreduce.

        Args:
            index: its place among the specs.
            stream: of its device: the handle of the one in which it is computed.
            source: where it is instead, in the memory of that device, with the view's strides. When
                its bucket is complete, its sources are copied into their views by one launch, in
                the stream, and cast, where one of both is float32. It must not change until then.
            scale: what a source is multiplied with.

        Returns:
            Whether its bucket was complete, so its sources may be overwritten in the stream.

        Raises:
            UsageError: it is ready already, or there is no such gradient.
        """
        try:
            if source is None and self.device is None:
                return self._buckets.ready(index)
            if source is not None:
                self._refuse_unlike("ready", index, source)
            is_launched = self._buckets.ready_on_device(index, stream, source, scale)
        except TypeError:
            raise UsageError(f"ready({index!r}): pass the number of a gradient") from None
        number = self._numbers[index]
        if is_launched:
            self._sources.pop(number, None)
        elif source is not None:
            self._sources.setdefault(number, []).append(source)
        return is_launched

    def wait(self, timeout: float | None = None, stream: int = 0) -> list[bool]:
        """End the round: flush what is not ready, and wait for all buckets.

        Gradients that are not ready are missing on this rank: their views are set to zero first.
        After that every view holds the average over all ranks.

        Args:
            timeout: seconds for each bucket, by default RINGDL_TIMEOUT.
            stream: of a device: the handle of the one in which the round before is made use of.

        Returns:
            For each gradient whether any rank produced it.

        Raises:
            StallError: some rank has not arrived in time. The round goes on: wait again.
            MismatchError: a rank has dropped the buckets, or has shut down.
            RankFailedError: a rank's process has ended.
        """
        seconds = self.communicator._timeout if timeout is None else seconds_of(timeout)
        produced = self._buckets.wait(seconds, timeout is None, stream)
        self._sources.clear()
        return produced

    def unpack(self, into: Mapping[int, DeviceArray], scale: float = 1.0, stream: int = 0) -> None:
        """After `wait`: copy gradients of a device to arrays of one's own there.

        Many by one launch, cast where the view or the array is float32.

        Args:
            into: by gradient, an array with the view's shape and strides.
            scale: what the gradients are multiplied with.
            stream: of the device: the handle of the one in which the arrays are used.

        Raises:
            UsageError: there is no such gradient, or such a cast; or `packs` is False.
        """
        for index, array in into.items():
            self._refuse_unlike("unpack", index, array)
        self._buckets.unpack(list(into.items()), scale, stream)

    def _refuse_unlike(self, call: str, index: int, array: DeviceArray) -> None:
        if not isinstance(array, DeviceArray):
            raise UsageError(f"{call}({index!r}): pass a DeviceArray, not {type(array).__name__}")
        if not 0 <= index < len(self._gradients):
            return  # the engine says so
        shape = self._gradients[index][1]
        if list(array.shape) != list(shape) or array.device != self.device:
            raise UsageError(
                f"{call}({index}): the gradient has shape {tuple(shape)} on device {self.device}, "
                f"the array {tuple(array.shape)} on device {array.device}"
            )

    def count_nonfinite(self) -> None:
        """From now on, count the infinite and NaN values among the gradients of this rank.

        They are read once more, in `ready`; on a device by the launch that packs, or by one like
        it. There values count as they are in the views: scaled and cast.

        Raises:
            UsageError: the device has no kernels.
        """
        self._buckets.count_nonfinite()
        self._counts_nonfinite = True

    @property
    def nonfinite(self) -> int:
        """How many there were in the round that has ended last, if they are counted.

        Of this rank alone: which ranks have produced what the average of all shows.
        """
        return self._buckets.nonfinite()


def _memory(
    communicator: Communicator, specs: tuple[list[_Spec], int, int], device: int | None
) -> _engine.BucketMemory:
    """The memory of buckets; on a device as all ranks can reduce there: by NCCL, or directly."""
    arguments = (communicator._engine, *specs, communicator._group)
    if device is None:
        memory = _engine.BucketMemory(*arguments)
        memory.settle(BucketWay.here)
        return memory
    import numpy as np

    from ringdl._cuda import load_kernels, warn

    member: tuple[int, int, int] | None = None
    place: list[int] = []
    error: Error | MemoryError | None = None
    try:
        why_not = load_kernels(device)
        made = _engine.BucketMemory(*arguments, device)
        member, place = made.library_member(), made.place_on_device()
    except (Error, MemoryError) as caught:  # the others must be notified
        error = caught
    own = (error and str(error), place, member)
    answers = communicator.allgather_object(own, name=AGREEING)
    if error is not None:
        raise error
    for rank, (text, _, _) in enumerate(answers):
        if text is not None:
            raise Error(f"rank {rank} cannot make its buckets: {text}")
    if member is not None and not _engine.why_no_library([each for _, _, each in answers]):
        made.settle(BucketWay.library)
        return made
    is_reached = False
    if place:
        if why_not:
            warn(f"gradients go by way of the CPU's memory: {why_not}")
        is_reached = made.reach([its for _, its, _ in answers])
    all_reached = communicator.allreduce(np.array([is_reached]), Reduction.Min, name=AGREEING)
    made.settle(BucketWay.direct if all_reached[0] else BucketWay.here)
    return made


def _iterable(specs: Any) -> Iterable[Sequence[Any]]:
    if not isinstance(specs, Iterable):
        raise UsageError(f"specs is {specs!r}; pass a list of (name, shape, dtype)")
    return specs


def _bytes(count: Any) -> int:
    try:
        return operator.index(count)
    except TypeError:
        raise UsageError(f"bucket_bytes is {count!r}; pass a number of bytes") from None


def _normalized(spec: Sequence[Any]) -> _Spec:
    if not isinstance(spec, Sequence) or isinstance(spec, str) or len(spec) not in (3, 4):
        raise UsageError(
            f"a gradient's spec is {spec!r}; pass (name, shape, dtype) or (name, shape, dtype, "
            "strides)"
        )
    name, shape, dtype, *strides = spec
    if not isinstance(name, str):
        raise UsageError(f"the name of a gradient is {name!r}; pass a string")
    if isinstance(dtype, str):
        text = dtype
    else:
        import numpy as np

        try:
            text = np.dtype(dtype).name
        except TypeError:
            text = repr(dtype)
    if text not in DType.__members__:
        raise UsageError(
            f"gradient {name!r} has dtype {text}; gradients are floating-point, of a NumPy dtype "
            "or its name"
        )
    in_elements = _whole(strides[0], f"the strides of gradient {name!r}") if strides else []
    return name, _whole(shape, f"the shape of gradient {name!r}"), DType[text], in_elements


def _whole(numbers: Any, what: str) -> list[int]:
    try:
        listed = [operator.index(number) for number in numbers]
    except TypeError:
        raise UsageError(f"{what} is {numbers!r}; pass whole numbers, one for each axis") from None
    if any(abs(number) > _MOST_ELEMENTS for number in listed):
        raise UsageError(f"{what} is {numbers!r}; pass numbers of elements that fit in memory")
    return listed


def agree(communicator: Communicator, gradients: list[_Spec], terms: dict[str, Any]) -> int:
    """Raise on every rank unless all ranks pass the same; one small allgather if they do.

    Args:
        communicator: the ranks.
        gradients: names, shapes, dtypes and strides.
        terms: what else they agree on, by name. "error" is what keeps this rank from it.

    Returns:
        The number of the first bucket: the lowest that none of the ranks has used.
    """
    import hashlib
    import json

    import numpy as np

    own = [[name, shape, dtype.name, strides] for name, shape, dtype, strides in gradients]
    text = json.dumps([terms, own]).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)
    mine = np.array([[digest, communicator._shared.next_bucket]])
    digests, numbers = communicator.allgather(mine, name=AGREEING).T
    if len(digests) < communicator.size:
        raise UsageError(
            "a rank has joined: make buckets and wrap optimizers before any rank calls join()"
        )
    if (digests == digests[0]).all() and "error" not in terms:
        return int(numbers.max())
    lengths = communicator.allgather(np.array([len(text)]), name=f"{AGREEING}, lengths")
    texts = communicator.allgather(np.frombuffer(text, np.uint8), name=f"{AGREEING}, texts")
    ends = np.cumsum(lengths)
    plans = [
        json.loads(texts[end - length : end].tobytes())
        for length, end in zip(lengths, ends, strict=True)
    ]
    for rank, (their_terms, _) in enumerate(plans):
        if "error" in their_terms:
            raise UsageError(f"rank {rank} cannot make its buckets: {their_terms['error']}")
    raise MismatchError(_first_difference(plans))


def _first_difference(plans: list[Any]) -> str:
    """Name the first thing that differs and the ranks that differ from the majority."""
    terms = [plan[0] for plan in plans]
    for field in dict.fromkeys(("policy", *(field for term in terms for field in term))):
        values = [term.get(field) for term in terms]
        if values != values[:1] * len(values):
            return "ranks disagree on their buckets: " + _versions(field, values)
    for index in range(max(len(plan[1]) for plan in plans)):
        entries: list[Any] = [plan[1][index] if index < len(plan[1]) else None for plan in plans]
        if entries == entries[:1] * len(entries):
            continue
        for position, field in enumerate(("name", "shape", "dtype", "strides")):
            values = [None if entry is None else entry[position] for entry in entries]
            if values != values[:1] * len(values):
                where = f"{field} of gradient {index}"
                if field != "name":
                    where += f" ({entries[0][0]!r})"
                return (
                    f"ranks disagree on their buckets: {_versions(where, values)}. Pass the same "
                    "gradients in the same order on all ranks"
                )
    raise AssertionError("digests differ, plans do not")


def _versions(what: str, values: list[Any]) -> str:
    import json

    texts = ["nothing" if value is None else json.dumps(value) for value in values]
    versions = [
        f"{text} on rank{'s' if count > 1 else ''} "
        + ", ".join(str(rank) for rank, other in enumerate(texts) if other == text)
        for text, count in Counter(texts).most_common()
    ]
    return f"{what} is " + " and ".join(versions)
