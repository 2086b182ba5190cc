"""A network whose layers are cut into stages, one after the other, on ranks one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import ringdl
from ringdl import Communicator
from ringdl._parts import split
from ringdl.torch.parallel._cuts import LAYER_COUNT, device_of
from ringdl.torch.parallel._exchanges import applied
from ringdl.torch.parallel._schedule import Task, one_forward_one_backward

Layer = torch.nn.Module | Callable[[], torch.nn.Module]
Loss = Callable[[torch.Tensor, Any], torch.Tensor]


class Pipeline(torch.nn.Module):
    """This rank's stages of a network, and how a batch passes all ranks' stages.

    A batch is cut into microbatches, whose passes follow one another: one forward, one backward
    (Narayanan and others 2021). A rank keeps what at most as many microbatches need as there are
    stages from it on.

    ```
    rank 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3         F0: microbatch 0 forward
    rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..
    ```

    Names in ``state_dict()`` are those of ``torch.nn.Sequential(*layers)``. To average gradients
    along the data axis, wrap the optimizer with ``backward_passes_per_step=pipeline.passes`` and
    ``process_set=grid.data``.

    Args:
        layers: of the whole network, in their order. Functions make theirs where they are needed
            alone: so no rank has all of them in its memory.
        loss: of outputs and targets, a mean over a microbatch. If it is a module, it is none of
            this one's.
        communicator: the ranks, as ``grid.pipeline``.
        microbatches: how many a batch is cut into.
        chunks: with several, each rank has as many stages, and passes are interleaved.
        cuts: which layer each stage but the first begins with; by default stages have equally many
            layers.

    What travels between stages is one tensor, whose shape and dtype depend on those of the inputs
    alone.

    Raises:
        UsageError: fewer layers than stages; layers on different ranks share a parameter (which is
            not noticed where functions make them); or another argument is wrong.
    """

    loss: Loss

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Loss,
        communicator: Communicator,
        *,
        microbatches: int,
        chunks: int = 1,
        cuts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        stages = communicator.size * chunks
        bounds = _bounds(len(layers), stages, cuts)
        if microbatches < 1 or chunks < 1:
            raise ringdl.UsageError("microbatches and chunks are at least 1")
        if chunks > 1 and microbatches % communicator.size != 0:
            raise ringdl.UsageError(
                f"{microbatches} microbatches are not a multiple of {communicator.size} ranks, as "
                "several chunks need"
            )
        vars(self)["loss"] = loss  # no module of this one: Sequential's state has none
        setattr(self, LAYER_COUNT, len(layers))
        self.communicator = communicator
        self.microbatches, self.chunks = microbatches, chunks
        self.busy_seconds = 0.0
        """How long this rank has computed in `step`, since it was made."""
        self._tasks = one_forward_one_backward(
            communicator.rank, communicator.size, microbatches, chunks
        )
        self._shapes: dict[Batch, Shapes] = {}
        self._plan = bounds, microbatches, chunks
        self._has_failed = False
        self._parts: list[list[str]] = []
        _refuse_shared(layers, bounds, communicator.size)
        for chunk in range(chunks):
            stage = chunk * communicator.size + communicator.rank
            names = [str(number) for number in range(bounds[stage], bounds[stage + 1])]
            for name in names:
                layer = layers[int(name)]
                self.add_module(name, layer if isinstance(layer, torch.nn.Module) else layer())
            self._parts.append(names)

    @property
    def passes(self) -> int:
        """How many backward passes a step makes here, of stages that have something to train."""
        trained = [
            any(p.requires_grad for name in names for p in getattr(self, name).parameters())
            for names in self._parts
        ]
        return self.microbatches * max(1, sum(trained))

    @property
    def is_first(self) -> bool:
        """Whether inputs are needed here."""
        return self.communicator.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether targets are needed here."""
        return self.communicator.rank == self.communicator.size - 1

    def step(self, inputs: torch.Tensor | None, targets: Any = None) -> torch.Tensor:
        """A forward and a backward pass of a batch; gradients are added to parameters'. Collective.

        Args:
            inputs: on the first rank; elsewhere they are not looked at.
            targets: on the last rank: anything that can be sliced along its first dimension.

        Returns:
            The mean loss of the batch, on all ranks.

        Raises:
            UsageError: inputs or targets are missing; on all ranks.
            MismatchError: ranks have cut the network in different ways, or an earlier step has
                failed on a rank, so that its messages are on the way still; on all ranks.
        """
        its = self.communicator
        told = self._agree(inputs, targets)
        batch = _batch_of(told, self.microbatches)
        run = _Run(self, inputs, targets, batch, self._shapes.setdefault(batch, {}))
        with self._noting():
            for number, task in enumerate(self._tasks):
                run.expect(self._tasks[number + 1 : number + 2])
                run.do(task)
            run.finish()
            return its.broadcast(run.loss.cpu(), its.size - 1)

    @torch.no_grad()
    def forward(self, inputs: torch.Tensor | None = None) -> torch.Tensor | None:
        """A forward pass alone, of inputs that the first rank has. Collective.

        Returns:
            The outputs, on the last rank.

        Raises:
            UsageError: inputs are missing; on all ranks.
            MismatchError: as for `step`.
        """
        _refuse_no_inputs(self._agree(inputs, None))
        links = _Links(self, {}, knows_shapes=False)
        x = inputs
        with self._noting():
            for chunk in range(self.chunks):
                stage = self._stage(chunk)
                if stage > 0:
                    x = links.receive("forward", stage, 0, (stage - 1) % self.communicator.size)
                x = self._run_chunk(chunk, x)
                if stage < self._stages - 1:
                    links.send("forward", stage + 1, 0, x)
            links.finish()
        return x if self.is_last else None

    def _agree(self, inputs: Any, targets: Any) -> list[_Told]:
        """What all ranks have; raise on all of them unless they can make this step."""
        own = _told(inputs, targets), self._plan, self._has_failed
        told = self.communicator.allgather_object(own)
        for rank, (_, plan, has_failed) in enumerate(told):
            if plan != told[0][1]:
                raise ringdl.MismatchError(
                    f"ranks have cut the network in different ways: its stages begin with layers "
                    f"{told[0][1][0][:-1]} on rank 0, and {plan[0][:-1]} on rank {rank}, of "
                    f"{told[0][1][0][-1]} and {plan[0][-1]} layers, with {told[0][1][1]} and "
                    f"{plan[1]} microbatches; make the same Pipeline on all ranks"
                )
            if has_failed:
                raise ringdl.MismatchError(
                    f"a step of this pipeline has failed on rank {rank}, and what ranks had sent "
                    "for it is on the way still; end the job, or make the grid and the Pipeline "
                    "anew on all ranks"
                )
        return [its for its, _, _ in told]

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Around messages: if they end early, no later step may take them for its own."""
        try:
            yield
        except BaseException:
            self._has_failed = self.communicator.size > 1
            raise

    @property
    def _stages(self) -> int:
        return self.communicator.size * self.chunks

    def _stage(self, chunk: int) -> int:
        return chunk * self.communicator.size + self.communicator.rank

    def _run_chunk(self, chunk: int, x: Any) -> torch.Tensor:
        for name in self._parts[chunk]:
            x = getattr(self, name)(x)
        result: torch.Tensor = x
        return result


Key = tuple[str, int, int]
"""What travels: forward or backward, to which stage, of which microbatch."""
Shapes = dict[Key, tuple[tuple[int, ...], torch.dtype, str]]
"""Of what travels, with the type of the device from which."""
_DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
_MOST_DIMENSIONS = 8
_DEVICES = ["cpu", "cuda"]


class _Links:
    """Messages to and from the stages before and after, each matched by what it is.

    Args:
        pipeline: whose.
        shapes: of what travels; a tensor whose shape is not known yet follows its shape.
        knows_shapes: whether they are, on all ranks.
    """

    def __init__(self, pipeline: Pipeline, shapes: Shapes, knows_shapes: bool) -> None:
        self._its = pipeline.communicator
        self._shapes, self._knows = shapes, knows_shapes
        self._device = device_of(pipeline)
        self._here: dict[Key, torch.Tensor] = {}
        self._sent: list[tuple[ringdl.Work[None], torch.Tensor]] = []
        self._expected: dict[Key, ringdl.Work[torch.Tensor]] = {}

    def send(self, way: str, stage: int, microbatch: int, x: torch.Tensor) -> None:
        key, x = (way, stage, microbatch), x.detach().contiguous()
        to = stage % self._its.size
        if to == self._its.rank:
            # Not the same memory: the next stage may work in it, and this one's backward needs it.
            self._here[key] = x.clone() if way == "forward" else x
            return
        name = _name(key)
        if not self._knows:
            if x.dtype not in _DTYPES or x.ndim > _MOST_DIMENSIONS:
                raise ringdl.UsageError(
                    f"a stage gives {x.dtype} of {x.ndim} dimensions; between ranks travels what "
                    f"has at most {_MOST_DIMENSIONS} and a dtype that is sent (no complex one)"
                )
            numbers = [_DTYPES.index(x.dtype), _DEVICES.index(x.device.type), x.ndim, *x.shape]
            head = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64)
            head[: len(numbers)] = torch.tensor(numbers)
            self._sent.append((self._its.send_async(head, to, f"{name}.shape"), head))
        self._sent = [(work, kept) for work, kept in self._sent if not work.done()]
        self._sent.append((self._its.send_async(x, to, name), x))

    def expect(self, way: str, stage: int, microbatch: int, source: int) -> None:
        """Receive it while something else is computed, if its shape is known."""
        key = (way, stage, microbatch)
        if self._knows and source != self._its.rank:
            self._expected[key] = self._begin(key, source)

    def receive(self, way: str, stage: int, microbatch: int, source: int) -> torch.Tensor:
        key = (way, stage, microbatch)
        if source == self._its.rank:
            return self._here.pop(key)
        if not self._knows:
            head = torch.zeros(3 + _MOST_DIMENSIONS, dtype=torch.int64)
            self._its.recv_(head, source, f"{_name(key)}.shape")
            dtype, device, ndim, *dimensions = head.tolist()
            self._shapes[key] = tuple(dimensions[:ndim]), _DTYPES[dtype], _DEVICES[device]
        got = (self._expected.pop(key, None) or self._begin(key, source)).wait()
        return got if self._device is None else got.to(self._device)

    def _begin(self, key: Key, source: int) -> ringdl.Work[torch.Tensor]:
        shape, dtype, device = self._shapes[key]
        into = torch.empty(shape, dtype=dtype, device=device)
        return self._its.recv_async_(into, source, _name(key))

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()


def _name(key: Key) -> str:
    return ".".join(["ringdl", *map(str, key)])


class _Entry:
    """What a stage has received, and the gradient of it."""

    def __init__(self, x: torch.Tensor) -> None:
        self._zeros = partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
        self._gradient: torch.Tensor | None = None

    @property
    def gradient(self) -> torch.Tensor:
        """Zeros if there is none."""
        return self._zeros() if self._gradient is None else self._gradient

    def take(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient


class _Enter(torch.autograd.Function):
    """What a stage has received: no leaf, so that its first layer may work in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, entry: _Entry, _: torch.Tensor) -> torch.Tensor:
        ctx.entry = entry
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.entry.take(gradient)
        return None, None, None


class _Run:
    """One batch: what is kept for backward passes, and what it has lost."""

    def __init__(
        self, pipeline: Pipeline, inputs: Any, targets: Any, batch: Batch, shapes: Shapes
    ) -> None:
        self._pipeline, self._inputs, self._targets = pipeline, inputs, targets
        self._count = batch[0]
        self._links = _Links(pipeline, shapes, knows_shapes=bool(shapes.pop(_KNOWN, None)))
        self._shapes = shapes
        self._kept: dict[tuple[int, int], tuple[_Entry | None, torch.Tensor]] = {}
        self.loss = torch.zeros((), dtype=torch.float64)

    def expect(self, tasks: Sequence[Task]) -> None:
        """Begin to receive what these need."""
        for task in tasks:
            source = self._source(task)
            if source is not None:
                self._links.expect(*source)

    def do(self, task: Task) -> None:
        source = self._source(task)
        got = None if source is None else self._links.receive(*source)
        begin = time.perf_counter()
        stage = self._pipeline._stage(task.chunk)
        if task.is_forward:
            sent = self._forward(task, got)
            way, to = "forward", stage + 1
        else:
            sent = self._backward(task, got)
            way, to = "backward", stage - 1
        self._pipeline.busy_seconds += time.perf_counter() - begin
        if sent is not None:
            self._links.send(way, to, task.microbatch, sent)

    def finish(self) -> None:
        self._links.finish()
        self._shapes[_KNOWN] = (), torch.bool, ""

    def _source(self, task: Task) -> tuple[str, int, int, int] | None:
        stage, size = self._pipeline._stage(task.chunk), self._pipeline.communicator.size
        if task.is_forward:
            return None if stage == 0 else ("forward", stage, task.microbatch, (stage - 1) % size)
        if stage == self._pipeline._stages - 1:
            return None
        return "backward", stage, task.microbatch, (stage + 1) % size

    def _forward(self, task: Task, x: torch.Tensor | None) -> torch.Tensor | None:
        pipeline = self._pipeline
        begin, count = split(self._count, pipeline.microbatches, task.microbatch)
        entry = None
        if x is None:
            x = self._inputs[begin : begin + count]
        else:
            entry = _Entry(x)
            if x.is_floating_point() or x.is_complex():
                x = applied(_Enter, x, entry, torch.zeros((), requires_grad=True))
        y = pipeline._run_chunk(task.chunk, x)
        if pipeline._stage(task.chunk) < pipeline._stages - 1:
            self._kept[task.chunk, task.microbatch] = entry, y
            return y
        loss = pipeline.loss(y, self._targets[begin : begin + count]) * (count / self._count)
        self.loss = self.loss.to(loss.device) + loss.detach().to(torch.float64)
        self._kept[task.chunk, task.microbatch] = entry, loss
        return None

    def _backward(self, task: Task, gradient: torch.Tensor | None) -> torch.Tensor | None:
        entry, y = self._kept.pop((task.chunk, task.microbatch))
        if y.requires_grad:
            torch.autograd.backward(y, gradient)
        if self._pipeline._stage(task.chunk) == 0:
            return None
        assert entry is not None
        return entry.gradient


_KNOWN: Key = ("all are known", 0, 0)
Batch = tuple[int, tuple[int, ...], str]
"""Rows, and shape and dtype of a row."""


_Told = tuple[Batch | None, int | None]
"""The batch, and how many targets, where a rank has them."""


def _told(inputs: Any, targets: Any) -> _Told:
    """What a rank has, which may be anything where it is not looked at."""
    batch = None
    if isinstance(inputs, torch.Tensor) and inputs.ndim > 0:
        batch = len(inputs), tuple(inputs.shape[1:]), str(inputs.dtype)
    is_sliced = hasattr(targets, "__len__") and getattr(targets, "ndim", 1) > 0
    return batch, len(targets) if is_sliced and not isinstance(targets, Mapping) else None


def _refuse_no_inputs(told: Sequence[_Told]) -> Batch:
    if told[0][0] is None:
        raise ringdl.UsageError("the first rank of the pipeline has no inputs; pass a tensor there")
    return told[0][0]


def _batch_of(told: Sequence[_Told], microbatches: int) -> Batch:
    batch, targets = _refuse_no_inputs(told), told[-1][1]
    if targets is None:
        raise ringdl.UsageError(
            "the last rank of the pipeline has no targets; pass there what can be sliced"
        )
    if batch[0] != targets or batch[0] < microbatches:
        raise ringdl.UsageError(
            f"there are {batch[0]} inputs and {targets} targets, for {microbatches} microbatches; "
            "pass equally many, and at least one for each"
        )
    return batch


def _refuse_shared(layers: Sequence[Layer], bounds: Sequence[int], ranks: int) -> None:
    owners: dict[torch.nn.Parameter, int] = {}
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        for layer in layers[begin:end]:
            for parameter in layer.parameters() if isinstance(layer, torch.nn.Module) else ():
                if owners.setdefault(parameter, stage % ranks) != stage % ranks:
                    raise ringdl.UsageError(
                        "layers share a parameter, and are on different ranks, which would train "
                        "it apart; put them on one rank by cuts, or give each its own"
                    )


def _bounds(layers: int, stages: int, cuts: Sequence[int] | None) -> list[int]:
    if cuts is None:
        if layers < stages:
            raise ringdl.UsageError(f"{layers} layers cannot be cut into {stages} stages")
        return [split(layers, stages, stage)[0] for stage in range(stages)] + [layers]
    bounds = [0, *cuts, layers]
    if len(bounds) != stages + 1 or sorted(set(bounds)) != bounds:
        raise ringdl.UsageError(
            f"cuts is {list(cuts)!r}; pass {stages - 1} numbers of layers, from 1 to {layers - 1}, "
            "each higher than the one before"
        )
    return bounds
