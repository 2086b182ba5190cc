"""How a framework's gradients are read and written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import ringdl
from ringdl._engine import DeviceArray

A = TypeVar("A")
"""A framework's arrays."""

Spec = tuple[str, tuple[int, ...], str, tuple[int, ...]]
"""Of a gradient, as `ringdl.Buckets` takes it: name, shape, dtype, strides in elements."""


class Store(ABC, Generic[A]):
    """The gradients of one optimizer: what an adapter says about them.

    They are counted from 0, in the order of registration, which is the same on every rank. A
    framework that has gradients as attributes of its parameters reads and writes those; one that
    passes them to a function keeps a list.

    Attributes:
        specs: what each gradient is, its dtype floating-point.
        how_to_wrap: the statement that makes an optimizer average, for messages.
    """

    specs: Sequence[Spec]
    how_to_wrap: str

    @abstractmethod
    def get(self, index: int) -> A | None:
        """This rank's gradient as it is now; None if nothing has produced one."""

    @abstractmethod
    def set(self, index: int, gradient: A) -> None:
        """What `get` returns from now on: a view, or what `begin_sparse` has made."""

    @abstractmethod
    def view(self, index: int, memory: Any) -> A:
        """An array over memory that speaks DLPack, as described by the gradient's spec."""

    def place(self, view: A) -> Any:
        """Where a view's elements are, and how: another place if a script has moved them."""
        del view
        return None

    @abstractmethod
    def copy(self, view: A, gradient: A) -> None:
        """Write the elements of a gradient into a view."""

    @abstractmethod
    def scale(self, view: A, factor: float) -> None:
        """Multiply the elements of a view."""

    def device(self, index: int) -> int | None:
        """The number of the CUDA device on which a gradient lies; None for the CPU's memory."""
        return None

    def stream(self, device: int) -> int:
        """The handle of the stream of a device in which this thread computes now."""
        return 0

    def source(self, gradient: A, view: A) -> DeviceArray | None:
        """A gradient on a device as the engine takes it, if it can copy it into the view itself."""
        return None

    def result(self, view: A) -> A:
        """What the optimizer takes for an average: its view, or what is made of it."""
        return view

    def version(self, gradient: A) -> Any:
        """Changes with each write to the gradient, where the framework counts them."""
        return None


class SparseStore(Store[A]):
    """The same of a framework whose gradients may be sparse."""

    @abstractmethod
    def sparse_dim(self, gradient: A) -> int:
        """How many leading axes of a gradient have indices; 0 if it is dense."""

    @abstractmethod
    def begin_sparse(
        self,
        index: int,
        gradient: A | None,
        sparse_dim: int,
        op: ringdl.Reduction,
        communicator: ringdl.Communicator,
        name: str,
    ) -> Callable[[], A | None]:
        """Start the average or sum of a gradient that is sparse on some rank. Collective.

        Args:
            index: which one.
            gradient: this rank's, sparse or not; None counts as zeros.
            sparse_dim: how many axes have indices; the same on all ranks.
            op: Average or Sum.
            communicator: the ranks.
            name: what its collectives are matched by.

        Returns:
            A function that waits, and returns the same on all ranks: the result, or None if no rank
            has a gradient.
        """

    @abstractmethod
    def add_dense(self, gradient: A, view: A, sparse_dim: int) -> A:
        """The sum of what `begin_sparse` has made and of a view, sparse."""
