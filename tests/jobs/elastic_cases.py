"""Three ranks, of which the last one is killed, in one of several ways to train.

elastic_cases.py CASE
"""

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ringdl
import ringdl.numpy
from ringdl import _ulfm, elastic, policies
from ringdl.elastic import _shards


def end() -> None:
    """The last of three ranks is killed."""
    if ringdl.size() == 3 and ringdl.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def main(case: str) -> None:
    ringdl.init()
    CASES[case]()
    sys.stdout.write(f"ended on {ringdl.size()}\n")
    sys.stdout.flush()


def steps(state: elastic.State) -> None:
    while state.step < 10:
        if state.step == 5:
            end()
        ringdl.allreduce(np.ones(1), name="step")
        state.step += 1
        state.commit()


def in_groups() -> None:
    """Rank 1 fails for it in a group of both, while rank 0 waits for rank 1 in another one."""
    state = elastic.State(step=0)

    def train(state: elastic.State) -> None:
        ranks = ringdl.get_communicator()
        pairs = [ranks.group([rank, rank + 1]) for rank in range(ranks.size - 1)]
        while state.step < 10:
            if state.step == 5:
                end()
            for pair in reversed(pairs):
                if pair is not None:
                    pair.allreduce(np.ones(1), name="step")
            state.step += 1
            state.commit()

    elastic.run(train, state)


def between_runs() -> None:
    """What the script has set since the first one is what the second one begins with."""
    state = elastic.State(step=8, phase=1)
    elastic.run(steps, state)
    state.step, state.phase = 0, 2
    end()
    elastic.run(steps, state)
    assert (state.step, state.phase) == (10, 2)


def at_the_first_commit() -> None:
    """What it has alone is nowhere else yet."""
    state = elastic.State(step=0, own={"m": np.arange(3.0)})
    keep = _shards.keep

    def dies(*arguments: object) -> object:
        end()
        return keep(*arguments)  # type: ignore[arg-type]

    _shards.keep = dies  # type: ignore[assignment]
    elastic.run(steps, state)


def all_raise() -> None:
    def train(state: elastic.State) -> None:
        raise ZeroDivisionError("everywhere")

    elastic.run(train, elastic.State(step=0))


def all_stop_early() -> None:
    """By an exception that the script catches, to evaluate on all ranks."""

    def train(state: elastic.State) -> None:
        ringdl.allreduce(np.ones(1), name="step")
        raise StopIteration

    with contextlib.suppress(StopIteration):
        elastic.run(train, elastic.State(step=0))
    assert ringdl.allreduce(np.ones(1), ringdl.Sum)[0] == 3


def while_values_arrive() -> None:
    """Rank 0 has begun, and rank 1 has not: both read the files once more, or none does."""
    folder = Path(os.environ["ELASTIC_FOLDER"], "commits")
    state = elastic.State(step=0, checkpoint=folder, checkpoint_every=1)
    keep = elastic.State._keep

    def dies(self: elastic.State) -> None:
        end()
        if ringdl.size() == 3 and ringdl.rank() == 1:
            ringdl.barrier()
        keep(self)

    elastic.State._keep = dies  # type: ignore[method-assign]
    elastic.run(steps, state)


def callbacks_commit() -> None:
    state = elastic.State(step=0)
    state.register_reset_callbacks([state.commit])

    def train(state: elastic.State) -> None:
        raise RuntimeError("it says RankFailedError, and that is all")

    elastic.run(train, state)


def parts_without_copies() -> None:
    """Ranks go at their own pace, and have no commit in common when one is killed."""
    state = elastic.State(step=0, own={"m": np.arange(3.0)}, copies=0)

    def train(state: elastic.State) -> None:
        for _ in range(6 if ringdl.rank() == 0 else 2):
            state.step += 1
            state.commit()
        time.sleep(1)
        end()
        ringdl.barrier()

    elastic.run(train, state)


def one_raises_while_others_compute() -> None:
    def train(state: elastic.State) -> None:
        if ringdl.size() == 3 and ringdl.rank() == 2:
            raise ZeroDivisionError("here alone")
        if ringdl.size() == 3:
            time.sleep(8)
        ringdl.barrier()

    elastic.run(train, elastic.State(step=0))


def one_raises_in_the_recovery() -> None:
    connect = _ulfm.Connections.connect

    def fails(self: _ulfm.Connections, *arguments: object) -> object:
        if ringdl.rank() == 1 and ringdl.size() == 3:
            raise OSError("too many open files")
        return connect(self, *arguments)  # type: ignore[arg-type]

    _ulfm.Connections.connect = fails  # type: ignore[method-assign,assignment]
    elastic.run(steps, elastic.State(step=0))


def no_rank_is_lost() -> None:
    def train(state: elastic.State) -> None:
        raise RuntimeError("it says RankFailedError, and that is all")

    elastic.run(train, elastic.State(step=0))


def train_model(passes: int, policy: policies.Policy | None) -> None:
    """It is killed before the last pass of a step."""
    import torch

    import ringdl.torch as hvd

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 300), torch.nn.Linear(300, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()),
        model.named_parameters(),
        backward_passes_per_step=passes,
        policy=policy,
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    def train(state: elastic.State) -> None:
        x = torch.full((4, 3), float(ringdl.rank()))
        while state.step < 10:
            optimizer.zero_grad()
            for number in range(passes):
                if state.step == 5 and number == passes - 1:
                    end()
                model(x).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    elastic.run(train, state)
    if policy is not None:
        policies.synchronize(optimizer)
    sums = [float(parameter.sum()) for parameter in model.parameters()]
    assert ringdl.broadcast_object(sums) == sums


def between_passes() -> None:
    """One of two has ended, which has begun to average."""
    train_model(2, None)


def parameters_that_differ() -> None:
    """By a policy: those that are left go on from the parameters of one of them."""
    train_model(1, policies.ParameterAveraging(4))


def parameters_that_differ_by_an_optimizer_of_train() -> None:
    """Which is gone with it when values are restored."""
    state = elastic.State(w=np.zeros(3), step=0)

    def train(state: elastic.State) -> None:
        optimizer = ringdl.numpy.DistributedOptimizer(
            ringdl.numpy.SGD(0.1), policy=policies.ParameterAveraging(4)
        )
        while state.step < 12:
            if state.step == 6:
                end()
            optimizer.step([state.w], [state.w - ringdl.rank()])
            state.step += 1
            state.commit()

    elastic.run(train, state)


def train_weights(policy: policies.Policy, pause: float = 0.0, raises: bool = False) -> None:
    """Without a framework. The last rank fails; rank 1 makes a step in so many seconds."""
    optimizer = ringdl.numpy.DistributedOptimizer(ringdl.numpy.SGD(0.1), policy=policy)
    state = elastic.State(w=np.zeros(500), step=0)

    def train(state: elastic.State) -> None:
        while state.step < 20:
            if state.step == 6 and ringdl.size() == 3 and ringdl.rank() == 2:
                if raises:
                    raise ZeroDivisionError("here alone")
                end()
            time.sleep(pause if ringdl.rank() == 1 else 0)
            optimizer.step([state.w], [state.w - ringdl.rank()])
            state.step += 1
            state.commit()
        policies.synchronize(optimizer)

    elastic.run(train, state)
    assert ringdl.broadcast_object(state.w.tolist()) == state.w.tolist()


def memory_goes() -> None:
    """What ranks of an earlier epoch have shared, also of gradients that failed in flight."""
    import torch

    import ringdl.torch as hvd

    model = torch.nn.Linear(300, 300)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters()
    )

    def train(state: elastic.State) -> None:
        while state.step < 10:
            if state.step == 5 and ringdl.rank() == 2:
                time.sleep(0.5)  # the others wait
                end()
            optimizer.zero_grad()
            model(torch.ones(1, 300)).sum().backward()
            optimizer.step()
            ringdl.allreduce_(np.ones(100_000))
            state.step += 1
            state.commit()

    elastic.run(train, hvd.elastic.TorchState(model, optimizer, step=0))
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split()[4] for line in maps if "memfd:ringdl" in line}
    assert len(segments) == ringdl.size() == 2, segments


def names_in_flight() -> None:
    """What was in flight under a name is given up, and the name is free."""
    import torch

    import ringdl.torch as hvd

    kept: dict[str, object] = {}

    def train(state: elastic.State) -> None:
        while state.step < 10:
            for name in ("a", "b", "c"):
                kept[name] = None
                kept[name] = hvd.allreduce_async_(torch.ones(99), name=name)
            handles = [hvd.allreduce_async_(torch.ones(9), name=f"{i}") for i in range(4)]
            if state.step == 5:
                end()
            for handle in (*handles, *kept.values()):
                hvd.synchronize(handle)
            state.step += 1
            state.commit()

    elastic.run(train, elastic.State(step=0))


def arrays_that_differ() -> None:
    train_weights(policies.ParameterAveraging(4))


def one_raises_while_others_wait_for_its_clock() -> None:
    train_weights(policies.ParameterServer(staleness=0), raises=True)


def one_dies_whom_nobody_waits_for() -> None:
    """The others learn of it in steps of their own, not after the last one of the slowest."""
    train_weights(policies.AsyncGossip(), pause=0.5)


def one_dies_while_others_ask() -> None:
    """They never wait for what needs it."""

    def train(state: elastic.State) -> None:
        work = ringdl.allreduce_async(np.ones(1), name="step")
        end()
        while not work.done():
            time.sleep(0.01)
        work.wait()

    elastic.run(train, elastic.State(step=0))


CASES = {
    function.__name__: function
    for function in (
        in_groups,
        between_runs,
        at_the_first_commit,
        all_raise,
        all_stop_early,
        while_values_arrive,
        callbacks_commit,
        parts_without_copies,
        one_raises_while_others_compute,
        one_raises_in_the_recovery,
        no_rank_is_lost,
        between_passes,
        parameters_that_differ,
        parameters_that_differ_by_an_optimizer_of_train,
        arrays_that_differ,
        memory_goes,
        names_in_flight,
        one_raises_while_others_wait_for_its_clock,
        one_dies_whom_nobody_waits_for,
        one_dies_while_others_ask,
    )
}

if __name__ == "__main__":
    main(sys.argv[1])
