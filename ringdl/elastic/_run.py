"""Training that goes on without ranks that have failed."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, overload

from ringdl import _newcomer, _newcomers, _recovery
from ringdl._errors import Error, RankFailedError, UsageError
from ringdl._startup import get_communicator
from ringdl.elastic._state import State

Result = TypeVar("Result")
Train = Callable[..., Result]

_log = logging.getLogger("ringdl")

_MOST_FRUITLESS = 3
_FRUITLESS = (
    f"train() has failed {_MOST_FRUITLESS} times, as if a rank were lost, while none was, and "
    "nothing was committed"
)


@overload
def run(train: Train[Result]) -> Train[Result]: ...
@overload
def run(train: Train[Result], state: State, *args: Any, **kwargs: Any) -> Result: ...
def run(train: Train[Any], state: State | None = None, *args: Any, **kwargs: Any) -> Any:
    """Train, and go on without ranks that fail. Collective.

    ``run(train, state)`` calls ``train(state)``. When a rank fails, calls that need it raise
    RankFailedError on all others. `run` catches that, gives up what is in flight, numbers the ranks
    that are left anew, restores the state of the last commit, and calls ``train(state)`` again,
    which goes on from there. What communicators, wrapped optimizers and samplers have to know of
    the ranks they learn by themselves. More ranks may fail at any time, down to the last.

    It takes ranks that Open MPI 5 has started with ``python -m ringdl run --elastic`` (or ``mpirun
    --with-ft ulfm``). With another MPI, or without it, the error ends the job as ever.

    As a decorator, ``@ringdl.elastic.run``, it makes a function of ``train`` that does this.

    Args:
        train: called with the state; begins, or goes on, where the state is. It has to make all its
            calls of ringdl in one thread.
        state: what it needs, the same on all ranks.
        args: further arguments of `train`.
        kwargs: the same, by name.

    Returns:
        What `train` returns, once all ranks that are left have ended it.

    Raises:
        RankFailedError: a rank has failed, and the MPI here cannot go on without it.
    """
    if state is None:
        return functools.wraps(train)(functools.partial(_run, train))
    return _run(train, state, *args, **kwargs)


def _run(train: Train[Result], state: State, *args: Any, **kwargs: Any) -> Result:
    if not isinstance(state, State):
        raise UsageError(
            f"ringdl.elastic.run: the state is a {type(state).__name__}; make a "
            "ringdl.elastic.State, which can be committed and restored"
        )
    begins = state._begin
    failure: Exception | None = None
    fruitless = size = 0
    with _recovery.outliving():
        if _newcomer.has_joined():
            _newcomers.prepare()
        else:
            _newcomer.join()
            state._join()
            begins = state._go_back
        while True:
            own, common = 0, None
            try:
                _newcomers.settle()
                goes_on = begins() or size != get_communicator().size
                fruitless = 0 if goes_on else fruitless + 1
                if fruitless == _MOST_FRUITLESS:
                    raise Error(_FRUITLESS) from failure
                size = get_communicator().size
                with state._in_train():
                    result = train(state, *args, **kwargs)
                get_communicator().barrier(name="ringdl.elastic.end")
                own = _recovery.HAS_ENDED
            except _newcomers.RanksJoin:
                own = _recovery.JOINS
            except _newcomers.HaveAgreed:
                common = 0
            except Exception as error:
                if not (_tells_of_a_failed_rank(error) and _recovery.can_go_on()):
                    raise
                _log.warning("rank %d goes on: %s", get_communicator().rank, error)
                failure = error
                traceback.clear_frames(error.__traceback__)  # what train() had is not held
            if common is None:
                common = _recovery.agree(own)
            if common & _recovery.JOINS:
                _newcomers.admit()
            if common & _recovery.HAS_ENDED:
                _newcomers.finish()
                state._finish()
                return result
            _recovery.go_on()
            begins = state._go_back


def _tells_of_a_failed_rank(error: Exception) -> bool:
    """Compiled functions raise errors of their framework's, with ringdl's text."""
    return isinstance(error, RankFailedError) or RankFailedError.__name__ in str(error)
