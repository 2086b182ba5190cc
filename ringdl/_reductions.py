"""Reductions over the ranks of a communicator: allreduce, grouped allreduce, reducescatter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ringdl import _arrays, _engine, _fusion
from ringdl._adasum import Adasum, AdasumOp
from ringdl._arrays import AnyArray
from ringdl._base import Base, refusing
from ringdl._engine import Algorithm, DeviceArray, DType, Kind, Reduction
from ringdl._errors import UsageError
from ringdl._work import GroupedWork, Work, one_of_several_steps, seconds_of

if TYPE_CHECKING:
    from ringdl._custom_op import CustomOp

AlgorithmName = Literal["ring", "doubling", "mpi", "direct", "hierarchical", "nccl"]
CompressionName = Literal["float16", "bfloat16"]
Op: TypeAlias = "Reduction | AdasumOp | CustomOp"


class Reductions(Base):
    """The reductions of `ringdl.Communicator`."""

    def allreduce(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
        *,
        algorithm: AlgorithmName | None = None,
        compression: CompressionName | None = None,
    ) -> AnyArray:
        """Reduce an array over all ranks; every rank gets the same bits.

        Ranks of one host reduce in memory that they share (see `empty`), in the order of the ranks.
        Between hosts small arrays use recursive doubling (Thakur, Rabenseifner and Gropp 2005):
        log2(P) steps; others the ring of Patarasuk and Yuan (2009): each rank sends and receives
        2(P-1)/P of the array, in segments, so that sending, receiving and reducing overlap. Below
        fp32, each hop adds in fp32 and rounds once.

        Args:
            x: an array of NumPy, PyTorch, JAX or CuPy, of any shape; same shape and dtype on all
                ranks.
            op: Average (default), Sum, Min, Max or Product; BitAnd, BitOr or BitXor of integers
                and bool. Integers wrap, and their average truncates towards zero. bool: sum and max
                are "or", product, min and average "and". Min and max propagate NaN. Or `Adasum`, or
                what `custom_op` returns.
            name: what the call is matched by; by default its number among unnamed allreduces.
            timeout: seconds until StallError.
            algorithm: "direct" (ranks that share memory), "hierarchical" (several hosts with such
                ranks), "ring", "doubling" (for small arrays), "nccl" for NCCL's
                (of arrays on devices, one for each rank), or "mpi" for MPI's own Allreduce, which
                must be the only work in flight; these two promise no equal bits. The same on all
                ranks. By default chosen by size.
            compression: what float32 travels as between hosts, half as many bytes: "float16" or
                "bfloat16". Sums are formed in float32, and the result is what the wire can carry,
                the same on all ranks. Where no ring between hosts is needed nothing is rounded.

        Returns:
            A new array of the same kind; `x` is not changed.

        Raises:
            MismatchError: shapes, dtypes, reductions or algorithms differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: not an array that can be reduced.
        """
        copy: AnyArray = self._copy_of(x, Kind.allreduce, name)
        return self.allreduce_(
            copy, op, name, timeout, algorithm=algorithm, compression=compression
        )

    def allreduce_(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
        *,
        algorithm: AlgorithmName | None = None,
        compression: CompressionName | None = None,
    ) -> AnyArray:
        """Like `allreduce`, in place: no copy is made of a contiguous array. Returns `x`."""
        if timeout is not None:
            self._refuse_timeout(timeout, Kind.allreduce, name)
        if name is None and algorithm is None and compression is None and self._group is None:
            try:
                begun = self._engine.allreduce_now(x, op)  # which takes NumPy's arrays alone
                if begun is None:
                    with self._telling(Kind.allreduce, name):
                        its = _arrays.in_numpy(x)
                    begun = self._engine.allreduce_now(its, op)
            except UsageError as error:
                self._refuse(error, Kind.allreduce, name)
                raise
            if begun is True:
                return x
            if isinstance(begun, _engine.Work):
                return self._finish_allreduce(begun, x, timeout)
        if algorithm == "mpi":
            return self._allreduce_by_mpi(x, op, name, timeout)
        return self._allreduce(name, x, op, algorithm, compression, is_async=False).wait(timeout)

    def allreduce_async(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
        *,
        algorithm: AlgorithmName | None = None,
        compression: CompressionName | None = None,
    ) -> Work[AnyArray]:
        """Like `allreduce`, but return at once. Wait for the returned work to get the array."""
        copy: AnyArray = self._copy_of(x, Kind.allreduce, name)
        return self.allreduce_async_(copy, op, name, algorithm=algorithm, compression=compression)

    def allreduce_async_(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
        *,
        algorithm: AlgorithmName | None = None,
        compression: CompressionName | None = None,
    ) -> Work[AnyArray]:
        """Like `allreduce_`, but return at once. `x` is off limits until the work has ended."""
        return self._allreduce(name, x, op, algorithm, compression, is_async=True)

    def grouped_allreduce(
        self,
        xs: Sequence[AnyArray],
        op: Op = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
        *,
        compression: CompressionName | None = None,
    ) -> list[AnyArray]:
        """Like `allreduce` of each array, in fewer messages: see `grouped_allreduce_async_`."""
        work = self._grouped_allreduce(xs, op, name, compression, timeout, copies=True)
        return work.wait(timeout)

    def grouped_allreduce_(
        self,
        xs: Sequence[AnyArray],
        op: Op = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
        *,
        compression: CompressionName | None = None,
    ) -> list[AnyArray]:
        """Like `grouped_allreduce`, in place. Returns the arrays."""
        return self._grouped_allreduce(xs, op, name, compression, timeout).wait(timeout)

    def grouped_allreduce_async(
        self,
        xs: Sequence[AnyArray],
        op: Op = Reduction.Average,
        name: str | None = None,
        *,
        compression: CompressionName | None = None,
    ) -> GroupedWork[AnyArray]:
        """Like `grouped_allreduce`, but return at once."""
        return self._grouped_allreduce(xs, op, name, compression, copies=True)

    def grouped_allreduce_async_(
        self,
        xs: Sequence[AnyArray],
        op: Op = Reduction.Average,
        name: str | None = None,
        *,
        compression: CompressionName | None = None,
    ) -> GroupedWork[AnyArray]:
        """Start to reduce several arrays as one, in place.

        Arrays of at most 256 KiB and one dtype are copied into one flat array and back; larger ones
        are reduced where they are. All ranks pass the same number of arrays, in the same order.

        Args:
            xs: arrays as in `allreduce`; dtypes may differ.
            op: as in `allreduce`, for all.
            name: what the call is matched by.
            compression: as in `allreduce`, of the float32 arrays among them.

        Returns:
            One work for all; its ``wait()`` returns the arrays.

        Raises:
            UsageError: one of them cannot be reduced; nothing has been submitted then.
        """
        return self._grouped_allreduce(xs, op, name, compression)

    def _grouped_allreduce(
        self,
        xs: Sequence[AnyArray],
        op: Op,
        name: str | None,
        compression: CompressionName | None,
        timeout: float | None = None,
        *,
        copies: bool = False,
    ) -> GroupedWork[AnyArray]:
        operands: list[_arrays.Operand] = []
        refused: Exception | None = None
        listed: list[AnyArray] = []
        try:
            listed = [*xs]
            seconds_of(0 if timeout is None else timeout)
            if wire_dtype(compression) and op not in (Reduction.Sum, Reduction.Average):
                raise UsageError(f"compression is for sums and averages, and not for {op}")
        except Exception as error:
            refused = error
        for x in listed:
            try:
                operand = _arrays.operand(_arrays.copy_of(x) if copies else x, written=True)
                _arrays.dtype_of(operand)
                operands.append(operand)
                _operation(op, operand)
            except Exception as error:
                refused = refused or error
        groups = [[each] for each in operands] if op is Adasum else _fusion.grouped(operands)
        parts: list[_fusion.Part] = []
        try:
            parts += map(_fusion.joined, groups)
        except Exception as error:  # no room on the device, say
            refused = refused or error
        if refused is not None:  # an array that is none counts as one that travels with others
            self._refuse(refused, Kind.allreduce, *_part_names(name, max(1, len(groups))))
            try:
                raise refused
            finally:
                del refused  # it holds this frame, and so the communicator, in a cycle
        works: list[Work[Any]] = []
        names = _part_names(name, len(parts))
        for part_name, part in zip(names, parts, strict=True):
            operand, digest = part[0], _fusion.digest(part)
            wire = compression if _arrays.dtype_of(operand) == DType.float32 else None
            with self._telling(Kind.allreduce, *names[len(works) :]):
                work = self._begin_to_reduce(
                    part_name, operand, op, None, wire, digest, is_async=True
                )
            works.append(work)

        def finish() -> list[AnyArray]:
            for part in parts:
                _fusion.split(part)
            return [operand.given for operand in operands]

        return GroupedWork(works, finish)

    def reducescatter(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
        timeout: float | None = None,
    ) -> AnyArray:
        """Reduce an array over all ranks and give each rank its part of the rows.

        Ranks of one host reduce in memory that they share (see `empty`), in the order of the ranks.
        Else the first half of the ring allreduce: each rank sends (P-1)/P of the array. Rows (axis
        0) are dealt as evenly as can be, in rank order; earlier ranks take the remainder.

        Args:
            x: an array of at least one axis; same shape and dtype on all ranks.
            op: as in `allreduce`.
            name: as in `allreduce`, among reducescatters.
            timeout: as in `allreduce`.

        Returns:
            A new array of the same kind: this rank's rows; `x` is not changed.

        Raises:
            MismatchError: shapes, dtypes or reductions differ; on every rank.
            StallError: some rank has not arrived in time.
            UsageError: not an array that can be reduced, or one without axes.
        """
        self._refuse_timeout(timeout, Kind.reducescatter, name)
        return self._reducescatter(name, x, op, is_async=False).wait(timeout)

    def reducescatter_async(
        self,
        x: AnyArray,
        op: Op = Reduction.Average,
        name: str | None = None,
    ) -> Work[AnyArray]:
        """Like `reducescatter`, but return at once; `x` must not change until the work ends."""
        return self._reducescatter(name, x, op, is_async=True)

    @refusing(Kind.allreduce)
    def _allreduce(
        self,
        name: str | None,
        x: AnyArray,
        op: Op,
        algorithm: AlgorithmName | None,
        compression: CompressionName | None,
        *,
        is_async: bool,
    ) -> Work[AnyArray]:
        if is_async and algorithm == "mpi":
            raise UsageError(
                "MPI's own allreduce is blocking only; call allreduce() or allreduce_(), or take "
                "another algorithm"
            )
        operand = _arrays.operand(x, written=True)
        return self._reduce(name, operand, op, algorithm, compression, is_async=is_async)

    def _begin_to_reduce(
        self,
        name: str | None,
        operand: _arrays.Operand,
        op: Op,
        algorithm: AlgorithmName | None,
        compression: CompressionName | None,
        digest: int = -1,
        *,
        is_async: bool,
    ) -> Work[Any]:
        if op is Adasum:  # which needs arrays whole
            if algorithm not in (None, "doubling"):
                raise UsageError(f"Adasum goes by recursive doubling, not by {algorithm!r}")
            algorithm = "doubling"
        operation = _operation(op, operand)
        load_on = getattr(op, "load_on", None)
        if load_on is not None and isinstance(operand.handed, DeviceArray):
            load_on(operand.handed.device, operand.handed.dtype)
        return self._submit(
            Kind.allreduce,
            operand,
            name,
            lambda _: operand.write_back(),
            algorithm=None if algorithm is None else _algorithm(algorithm),
            compression=wire_dtype(compression),
            root=digest,
            is_async=is_async,
            **operation,
        )

    _reduce = refusing(Kind.allreduce)(_begin_to_reduce)

    @refusing(Kind.reducescatter)
    def _reducescatter(
        self, name: str | None, x: AnyArray, op: Op, *, is_async: bool
    ) -> Work[AnyArray]:
        operand = _arrays.operand(x, written=False)
        if op is Adasum:
            raise UsageError("Adasum needs arrays whole; take allreduce, not reducescatter")
        if x.ndim == 0:
            raise UsageError("reducescatter deals rows, and an array without axes has none")
        rows, size, rank = x.shape[0], self.size, self.rank
        own_rows = rows // size + (rank < rows % size)
        result = _arrays.empty_like(x, own_rows)
        output = _arrays.operand(_arrays.Own(result), written=True)
        return self._submit(
            Kind.reducescatter,
            operand,
            name,
            lambda _: result,
            output=output.handed,
            is_async=is_async,
            **_operation(op, operand),
        )

    def _finish_allreduce(
        self, begun: _engine.Work, x: AnyArray, timeout: float | None = None
    ) -> AnyArray:
        return Work(self._engine, begun, self._timeout, lambda: x).wait(timeout)

    def _allreduce_by_mpi(
        self, x: AnyArray, op: Op, name: str | None, timeout: float | None
    ) -> AnyArray:
        try:
            if not isinstance(op, Reduction):
                raise UsageError(f"MPI's own allreduce does not know the reduction {op}")
            operand = _arrays.operand(x, written=True)
        except UsageError as error:
            self._refuse(error, Kind.allreduce, name)
            raise
        with one_of_several_steps():
            work = self._reduce(name, operand, op, "mpi", None, is_async=False)
            work.wait(timeout)  # all have arrived
            self._reduce_by_mpi(operand, op)
        result: AnyArray = operand.write_back()
        return result

    @abstractmethod
    def _reduce_by_mpi(self, operand: _arrays.Operand, op: Reduction) -> None:
        """MPI's own allreduce, in place, once all ranks are known to have arrived."""


def _part_names(name: str | None, count: int) -> list[str | None]:
    """What the parts of a group are matched by."""
    return [
        None if name is None else f"{name} ({number} of {count})" for number in range(1, count + 1)
    ]


def wire_dtype(name: str | None) -> DType | None:
    """The dtype that `compression` names.

    Raises:
        UsageError: there is no such dtype.
    """
    if name is None:
        return None
    if name not in ("float16", "bfloat16"):
        raise UsageError(f"compression is {name!r}; take 'float16', 'bfloat16' or None")
    return DType[name]


def _algorithm(name: str) -> Algorithm:
    if name not in Algorithm.__members__:
        raise UsageError(
            f"there is no algorithm {name!r}; take one of {', '.join(Algorithm.__members__)}"
        )
    return Algorithm[name]


def _operation(op: Op, operand: _arrays.Operand) -> dict[str, Any]:
    """How a reduction is passed to the engine.

    Raises:
        UsageError: it is no reduction, or none of such elements.
    """
    if isinstance(op, Reduction):
        return {"reduction": op}
    if not hasattr(op, "operation"):
        raise UsageError(
            f"op is {op!r}; take ringdl.Average, Sum, Min, Max, Product, BitAnd, BitOr, BitXor, "
            "Adasum, or what ringdl.custom_op returns"
        )
    return {"operation": op.operation(_arrays.dtype_of(operand))}
