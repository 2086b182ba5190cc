"""Collectives on Python objects, by pickle."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ringdl._engine import Kind
from ringdl._exchanges import Exchanges
from ringdl._work import one_of_several_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Objects(Exchanges):
    """The object collectives of `ringdl.Communicator`."""

    def broadcast_object(
        self, obj: Any, root: int = 0, name: str | None = None, timeout: float | None = None
    ) -> Any:
        """Copy a Python object from the root to all ranks, by pickle (or cloudpickle, if need be).

        Args:
            obj: the object on the root; what others pass is ignored.
            root: the rank that sends.
            name: what the call is matched by.
            timeout: seconds until StallError, for each of its two broadcasts.

        Returns:
            The root's object; on the root `obj` itself.
        """
        import pickle

        import numpy as np

        try:
            payload = _pickled(obj) if self.rank == root else np.empty(0, np.uint8)
        except Exception as error:
            self._refuse(error, Kind.broadcast, name)
            raise
        with one_of_several_steps():
            length = self.broadcast_(np.array([len(payload)]), root, name, timeout)
            if self.rank != root:
                payload = np.empty(int(length[0]), np.uint8)
            self.broadcast_(payload, root, name, timeout)
        return obj if self.rank == root else pickle.loads(payload.tobytes())

    def allgather_object(
        self, obj: Any, name: str | None = None, timeout: float | None = None
    ) -> list[Any]:
        """Collect a Python object from each rank on all ranks, by pickle.

        Args:
            obj: any object that can be pickled; ranks' may differ.
            name: what the call is matched by.
            timeout: seconds until StallError, for each of its two allgathers.

        Returns:
            The objects in rank order; this rank's is a copy too.
        """
        import pickle

        import numpy as np

        try:
            payload = _pickled(obj)
        except Exception as error:
            self._refuse(error, Kind.allgather, name)
            raise
        with one_of_several_steps():
            lengths = self.allgather(np.array([len(payload)]), name, timeout)
            data = self.allgather(payload, name, timeout)
        ends = np.cumsum(lengths)
        return [
            pickle.loads(data[end - length : end].data)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
        ]


def _pickled(obj: Any) -> NDArray[Any]:
    import pickle

    import numpy as np

    try:
        payload = pickle.dumps(obj)
    except (pickle.PicklingError, AttributeError, TypeError):  # a lambda, say
        try:
            cloudpickle: Any = importlib.import_module("cloudpickle")
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
        payload = cloudpickle.dumps(obj)
    return np.frombuffer(bytearray(payload), np.uint8)
