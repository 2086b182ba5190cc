"""Three ranks, or four, of which one is killed, and those that are started in its place.

elastic_newcomers.py CASE
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ringdl
import ringdl.numpy
from ringdl import _newcomer, _newcomers, _sockets, elastic, policies
from ringdl.elastic import _shards

IS_NEW = not _newcomer.has_joined()

ROWS = 11
RANKS = int(os.environ.get("ELASTIC_RANKS", "3"))
FOLDER = Path(os.environ["ELASTIC_FOLDER"])


def die() -> None:
    sys.stdout.write(f"{'a newcomer' if IS_NEW else 'a rank'} dies\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def make_state(copies: int = 1) -> elastic.State:
    rows = np.arange(float(ROWS))[ringdl.rank() :: ringdl.size()]
    return elastic.State(step=0, w=np.zeros(3), own={"rows": rows}, copies=copies, until=0)


def train(state: elastic.State, ends_at: Callable[[], bool]) -> None:
    """Count twenty steps in ``state.w``, see `train_by`."""

    def step() -> None:
        ones = ringdl.allreduce(np.ones(3), name="ones")
        if state.step != 10 or ends_at():
            state.w += ones

    train_by(step, state, ends_at)


def train_by(step: Callable[[], None], state: elastic.State, ends_at: Callable[[], bool]) -> None:
    """Twenty steps. Rank 1 of all is killed before the fifth; the tenth waits for `ends_at`."""
    while state.step < 20:
        if state.step == 5 and ringdl.rank() == 1 and not IS_NEW and ringdl.size() == RANKS:
            die()
        step()
        state.step += state.step != 10 or ends_at()
        state.until += 1
        assert state.until < 3000, "nobody has joined for too long"
        time.sleep(0.01 if state.step == 10 else 0)
        state.commit()


def run(size: int) -> elastic.State:
    """Train until the end, with so many ranks from step 10 on."""
    state = make_state()
    elastic.run(train, state, lambda: ringdl.size() == size)
    assert state.w.tolist() == [20.0] * 3
    rows = np.sort(ringdl.allgather(state.own["rows"]))
    assert rows.tolist() == list(range(ROWS))
    return state


def joins() -> None:
    run(3)


def fails_at_its_start() -> None:
    """So does the second one: then those that are left end without."""
    if IS_NEW:
        raise ZeroDivisionError("at its start")
    state = make_state()

    def nobody_is_left() -> bool:
        left = _newcomers.replacing
        return left is not None and left.left == 0 and _newcomers._meeting is None

    elastic.run(train, state, nobody_is_left)


def does_not_run() -> None:
    if not IS_NEW:
        fails_at_its_start()


def comes_late() -> None:
    if IS_NEW:
        time.sleep(2)
    state = make_state()
    elastic.run(train, state, lambda: True)


def all_others_die() -> None:
    state = make_state(copies=2)

    def goes_on(state: elastic.State) -> None:
        train(state, lambda: ringdl.size() == 3 or IS_NEW)
        if not IS_NEW:
            time.sleep(0.2 * ringdl.rank())
            die()

    elastic.run(goes_on, state)
    assert state.w.tolist() == [20.0] * 3
    assert np.sort(state.own["rows"]).tolist() == list(range(ROWS))


def patched(name: str, dies: Callable[[], bool], after: bool) -> Callable[[], None]:
    """A case in which a rank dies once, before or after a call of a function of `_newcomers`."""
    place = _newcomer if name == "join" else _newcomers

    def case() -> None:
        original = getattr(place, name)

        def function(*arguments: Any, **named: Any) -> Any:
            if not after and dies():
                die()
            result = original(*arguments, **named)
            if after and dies():
                die()
            return result

        setattr(place, name, function)
        state = make_state()
        elastic.run(train, state, lambda: ringdl.size() == 3)
        assert state.w.tolist() == [20.0] * 3

    return case


def while_they_start(dies: Callable[[], bool], is_newcomer: bool) -> Callable[[], None]:
    """A case in which one is killed, once, when MPI_Comm_spawn has started a newcomer.

    That loads Python then, and MPI waits for it.

    Args:
        dies: whether this rank sees to it.
        is_newcomer: whether it is the newcomer that is killed, not this rank.
    """
    has_died = threading.Event()

    def case() -> None:
        original = _newcomers._start

        def start(ranks: ringdl.Communicator, its: _newcomers.Replacing) -> Any:
            def kill() -> None:
                while (newcomer := next(_newcomers._processes(its.mark), 0)) == 0:
                    time.sleep(0.001)
                time.sleep(0 if is_newcomer else 0.1)
                os.kill(newcomer if is_newcomer else os.getpid(), signal.SIGKILL)

            if dies() and not has_died.is_set():
                has_died.set()
                threading.Thread(target=kill).start()
            return original(ranks, its)

        _newcomers._start = start
        run(RANKS)

    return case


def is_left(rank: int) -> Callable[[], bool]:
    """Whether this is a rank that has been here from the start, and one has been killed."""
    return lambda: not IS_NEW and ringdl.size() == RANKS - 1 and ringdl.rank() == rank


def is_first_newcomer() -> bool:
    """Whether nobody has noted yet that it was there."""
    if not IS_NEW:
        return False
    try:
        (FOLDER / "died").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def in_the_second_run() -> None:
    """Newcomers begin with the first one, so nobody joins here: they come when it has ended."""
    has_ended = FOLDER / "has_ended"
    deadline = time.monotonic() + 30
    while IS_NEW and not has_ended.exists():
        assert time.monotonic() < deadline, "the first run does not end"
        time.sleep(0.01)
    first = make_state()
    elastic.run(train, first, lambda: True)
    assert ringdl.size() == 2
    has_ended.touch()
    second = elastic.State(step=0)

    def goes_on(state: elastic.State) -> None:
        while state.step < 20:
            if state.step == 5 and ringdl.rank() == 1:
                die()
            ringdl.barrier()
            state.step += 1
            time.sleep(0.05)
            state.commit()

    elastic.run(goes_on, second)
    assert ringdl.size() == 1


def before_the_first_run() -> None:
    if ringdl.rank() == 2 and not IS_NEW:
        die()
    elastic.run(train, elastic.State(step=0, w=np.zeros(3), until=0), lambda: ringdl.size() == 3)


def twice_with_files() -> None:
    """The second run of a state takes nothing from a file, on newcomers, too."""
    state = elastic.State(step=0, w=np.zeros(3), until=0, checkpoint=FOLDER / "checkpoints")
    elastic.run(train, state, lambda: ringdl.size() == 3)
    state.step = 10
    elastic.run(train, state, lambda: True)
    assert state.w.tolist() == [30.0] * 3


def parts_have_changed() -> None:
    """In training, where newcomers have not been yet."""
    rows = np.zeros(3 + ringdl.rank(), np.float32)
    state = elastic.State(step=0, w=np.zeros(3), until=0, own={"rows": rows})

    def goes_on(state: elastic.State) -> None:
        if state.own["rows"].ndim == 1:
            state.own["rows"] = np.arange(6.0).reshape(-1, 2) + 6 * ringdl.rank()
        train(state, lambda: ringdl.size() == 3)

    elastic.run(goes_on, state)
    assert state.own["rows"].dtype == np.float64
    assert ringdl.allgather(state.own["rows"]).tolist() == np.arange(18.0).reshape(-1, 2).tolist()


def one_has_not_committed() -> None:
    """What newcomers have joined by: the one before is taken, which all others have."""
    keep = _shards.keep

    def fails(*arguments: Any) -> Any:
        kept = keep(*arguments)
        if not IS_NEW and ringdl.size() == 3 and ringdl.rank() < 2 and state.step == 10:
            _shards.keep = keep
            if ringdl.rank() == 1:
                die()
            raise ringdl.RankFailedError("injected")
        return kept

    state = make_state()
    _shards.keep = fails
    elastic.run(train, state, lambda: ringdl.size() == 3)
    rows = ringdl.allgather(state.own["rows"])
    assert sorted(rows.tolist()) == list(range(ROWS))


def gradients_are_sparse() -> None:
    """And in an order that newcomers have not seen: they learn both when they join."""
    import torch

    import ringdl.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(10, 4, sparse=True), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    )
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0, until=0)

    def learns(state: elastic.State) -> None:
        def step() -> None:
            optimizer.zero_grad()
            model(torch.tensor([hvd.rank(), 5])).square().mean().backward()
            optimizer.step()
            if state.step == 2:
                optimizer.replan()

        train_by(step, state, lambda: ringdl.size() == 3)

    elastic.run(learns, state)
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert torch.equal(hvd.allgather(flat[None]), flat.expand(3, -1)), "ranks hold other bits"


def wrapped_at_the_first_step(policy: policies.Policy | None) -> Callable[[], None]:
    """Newcomers agree with the others on what these have agreed on before."""

    def case() -> None:
        w = np.zeros(3)
        optimizer = ringdl.numpy.DistributedOptimizer(
            ringdl.numpy.SGD(1e-3, momentum=0.5), policy=policy
        )
        state = elastic.State(w=w, optimizer=optimizer, step=0, until=0)

        def learns(state: elastic.State) -> None:
            def step() -> None:
                optimizer.step({"w": w}, {"w": np.full(3, ringdl.rank() + 1.0)})

            train_by(step, state, lambda: ringdl.size() == 3)

        elastic.run(learns, state)
        policies.synchronize(optimizer, {"w": w})
        assert len({*ringdl.allgather_object(tuple(w.tolist()))}) == 1, "ranks hold other bits"

    return case


def keras_optimizers() -> None:
    import keras

    import ringdl.keras

    weight = keras.Variable(np.zeros(3, np.float32))
    optimizer = ringdl.keras.DistributedOptimizer(keras.optimizers.SGD(1e-3))
    state = elastic.State(w=np.zeros(3, np.float32), step=0, until=0)

    def learns(state: elastic.State) -> None:
        weight.assign(state.w)

        def step() -> None:
            optimizer.apply([keras.ops.ones(3) * (ringdl.rank() + 1.0)], [weight])
            state.w = np.array(keras.ops.convert_to_numpy(weight))

        train_by(step, state, lambda: ringdl.size() == 3)

    elastic.run(learns, state)
    assert len({*ringdl.allgather_object(tuple(state.w.tolist()))}) == 1, "ranks hold other bits"


def sets_are_made_again() -> None:
    import torch

    import ringdl.torch as hvd

    state = elastic.State(step=0, until=0)

    def goes_on(state: elastic.State) -> None:
        sets = [hvd.add_process_set([rank]) for rank in range(hvd.size())]
        sets += [hvd.add_process_set([0, 2])] if hvd.size() == 3 else []

        def step() -> None:
            ringdl.barrier(name="step")
            for each in sets:
                if each.included():
                    total = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=each)
                    assert total.item() == each.size()

        train_by(step, state, lambda: ringdl.size() == 3)

    elastic.run(goes_on, state)


def has_been_changed() -> None:
    """Its script has, since the others were started: it ends alone."""
    more = {"more": 1} if IS_NEW and is_first_newcomer() else {}
    state = elastic.State(step=0, w=np.zeros(3), until=0, **more)
    elastic.run(train, state, lambda: ringdl.size() == 3)


def raises_in_the_meeting() -> None:
    """One rank alone, once: nobody is replaced then, and nobody waits for it."""
    listen = _sockets.listen

    def fails(address: str) -> Any:
        if is_left(1)():
            _sockets.listen = listen
            raise OSError("too many files are open")
        return listen(address)

    _sockets.listen = fails
    run(3)


def newcomer_raises_at_the_end() -> None:
    raises_at_the_end(IS_NEW)


def other_raises_at_the_end() -> None:
    raises_at_the_end(ringdl.rank() == 0 and not IS_NEW)


def raises_at_the_end(raises: bool) -> None:
    run(3)
    ringdl.barrier()
    if raises:
        raise ZeroDivisionError("at the end")
    time.sleep(30)


CASES: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        joins,
        fails_at_its_start,
        does_not_run,
        comes_late,
        all_others_die,
        in_the_second_run,
        before_the_first_run,
        twice_with_files,
        parts_have_changed,
        one_has_not_committed,
        gradients_are_sparse,
        keras_optimizers,
        sets_are_made_again,
        has_been_changed,
        raises_in_the_meeting,
        newcomer_raises_at_the_end,
        other_raises_at_the_end,
    )
} | {
    "gradients_of_numpy": wrapped_at_the_first_step(None),
    "parameters_of_numpy": wrapped_at_the_first_step(policies.ParameterAveraging(2)),
    "first_dies_before_they_meet": patched("exchange", is_left(0), after=False),
    "second_dies_before_they_meet": patched("exchange", is_left(1), after=False),
    "first_dies_while_they_start": while_they_start(is_left(0), is_newcomer=False),
    "second_dies_while_they_start": while_they_start(is_left(1), is_newcomer=False),
    "newcomer_dies_while_they_start": while_they_start(is_left(0), is_newcomer=True),
    "second_dies_once_they_have_met": patched("meet", is_left(1), after=True),
    "second_dies_before_starting": patched("_start", is_left(1), after=False),
    "first_dies_after_starting": patched("_start", is_left(0), after=True),
    "first_dies_before_admitting": patched("admit", is_left(0), after=False),
    "first_dies_after_admitting": patched("admit", is_left(0), after=True),
    "newcomer_dies_before_it_is_ready": patched("join", is_first_newcomer, after=False),
    "newcomer_dies_at_once": patched("join", is_first_newcomer, after=True),
}

if __name__ == "__main__":
    ringdl.init()
    os.chdir("/")  # newcomers begin where this process did
    CASES[sys.argv[1]]()
    sys.stdout.write(f"ended on {ringdl.size()}\n")
    sys.stdout.flush()
