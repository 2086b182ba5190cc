"""ringdl.policies, over NumPy: each against a simulation of all its ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import ringdl
import ringdl.numpy as rn
from ringdl import Communicator, policies
from ringdl.policies import AllReduce, DiLoCo, Gossip, ParameterAveraging, PostLocalSGD
from tests.ranks.numpy_optimizers import Arrays, batches, gradients, parameters
from tests.ranks.support import assert_same_bits, expect, needs

Make = Callable[[], Any]
Mix = Callable[[int, list[Arrays], list[Any]], None]
"""What ranks exchange after a step: its number, all ranks' parameters and optimizers."""

MAKERS: dict[str, Make] = {
    "SGD": lambda: rn.SGD(0.1),
    "momentum": lambda: rn.SGD(0.1, momentum=0.9),
    "Adam": lambda: rn.Adam(0.01),
}


def part_of(batch: tuple[Any, Any], rank: int, size: int) -> tuple[Any, Any]:
    inputs, targets = batch
    return inputs[rank::size], targets[rank::size]


def train(comm: Communicator, policy: Any, make: Make, steps: int = 2, **options: Any) -> Any:
    """Train on this rank's part; returns the optimizer and the parameters."""
    its = parameters()
    optimizer = rn.DistributedOptimizer(make(), policy=policy, communicator=comm, **options)
    for batch in batches(steps):
        assert optimizer.step(its, gradients(its, *part_of(batch, comm.rank, comm.size)))
    return optimizer, its


def simulate(size: int, make: Make, mix: Mix, steps: int = 2, synchronous: int = 0) -> list[Arrays]:
    """All ranks' parameters, computed here; the first steps average gradients."""
    all_of_them, optimizers = [parameters() for _ in range(size)], [make() for _ in range(size)]
    for step, batch in enumerate(batches(steps), start=1):
        found = [
            gradients(its, *part_of(batch, rank, size)) for rank, its in enumerate(all_of_them)
        ]
        if step <= synchronous:
            found = [mean_of(found) for _ in range(size)]
        for its, optimizer, own in zip(all_of_them, optimizers, found, strict=True):
            optimizer.step(its, own)
        mix(step, all_of_them, optimizers)
    return all_of_them


def mean_of(each: list[Mapping[str, Any]]) -> Arrays:
    return {key: np.mean([its[key] for its in each], axis=0) for key in each[0]}


def average(all_of_them: list[Any]) -> None:
    mean = mean_of(all_of_them)
    for its in all_of_them:
        for key, array in its.items():
            array[...] = mean[key]


def every(count: int, state: str = "keep", after: int = 0) -> Mix:
    def mix(step: int, all_of_them: list[Arrays], optimizers: list[Any]) -> None:
        if step <= after or (step - after) % count:
            return
        average(all_of_them)
        if state == "average":
            average([optimizer.state for optimizer in optimizers])
        for optimizer in optimizers if state == "reset" else ():
            optimizer.reset()

    return mix


def weighted(rows: Callable[[int], Any]) -> Mix:
    """By a matrix for each step, whose columns add up to 1, with push-sum."""
    kept: dict[str, Any] = {}

    def mix(step: int, all_of_them: list[Arrays], _: list[Any]) -> None:
        matrix = np.array(rows(step))
        weights = kept.get("weights", np.ones(len(matrix)))
        parts = kept.get("parts", [dict.fromkeys(its, 0.0) for its in all_of_them])
        before = kept.get("before", [parameters() for _ in all_of_them])
        parts = [
            {key: (part[key] if kept else old[key]) + its[key] - old[key] for key in its}
            for part, its, old in zip(parts, all_of_them, before, strict=True)
        ]
        kept["weights"] = matrix @ weights
        kept["parts"] = [
            {
                key: sum(share * part[key] for share, part in zip(row, parts, strict=True))
                for key in parts[0]
            }
            for row in matrix
        ]
        for its, part, weight in zip(all_of_them, kept["parts"], kept["weights"], strict=True):
            for key, array in its.items():
                array[...] = part[key] / weight
        kept["before"] = [{key: array.copy() for key, array in its.items()} for its in all_of_them]

    return mix


def compare(own: Arrays, expected: Arrays, what: str) -> None:
    for key in own:
        np.testing.assert_allclose(own[key], expected[key], 1e-10, 1e-12, err_msg=f"{what}, {key}")


def all_policies(size: int) -> list[Any]:
    return [
        AllReduce(),
        *(ParameterAveraging(3, state) for state in ("average", "keep", "reset")),
        ParameterAveraging(2, overlap=True),
        PostLocalSGD(3, 2),
        DiLoCo(3),
        Gossip("ring"),
        Gossip("exponential"),
        Gossip(uneven(size)),
    ]


def uneven(size: int) -> dict[int, list[int]]:
    """A ring with a shorter way: rank 0 gets more than the others."""
    return {r: [(r + 1) % size, *([0] if r == 1 and size > 2 else [])] for r in range(size)}


def check_one_rank_is_the_bare_optimizer(comm: Communicator) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None
    for name, make in MAKERS.items():
        bare, its = make(), parameters()
        for batch in batches(2):
            bare.step(its, gradients(its, *batch))
        for policy in all_policies(1):
            optimizer, own = train(alone, policy, make)
            policies.synchronize(optimizer)
            for key in its:
                assert (own[key] == its[key]).all(), f"{name}, {policy!r}"


def check_every_step_is_the_whole_batch(comm: Communicator) -> None:
    """With SGD; where that ends, and by how much."""
    whole: dict[str, Arrays] = {}
    for name, make in MAKERS.items():
        its, bare = parameters(), make()
        for batch in batches(2):
            bare.step(its, gradients(its, *batch))
        whole[name] = its
    if 24 % comm.size:
        return

    def distance(name: str, policy: Any) -> float:
        own = train(comm, policy, MAKERS[name])[1]
        return max(float(abs(own[key] - whole[name][key]).max()) for key in own)

    for state in ("average", "keep", "reset"):
        assert distance("SGD", ParameterAveraging(1, state)) < 1e-10, state
    assert distance("momentum", ParameterAveraging(1, "average")) < 1e-10
    assert distance("momentum", ParameterAveraging(1, "keep")) < 1e-10, "velocities are linear"
    if comm.size > 1:
        assert 1 < distance("momentum", ParameterAveraging(1, "reset")) < 5
        assert 0.01 < distance("Adam", ParameterAveraging(1)) < 0.1, "squares are not"
        assert 0.02 < distance("SGD", ParameterAveraging(2)) < 0.2
        assert 0.04 < distance("SGD", ParameterAveraging(4)) < 0.3


def check_averages_are_those_of_a_simulation(comm: Communicator) -> None:
    if 24 % comm.size:
        return
    for name, make in MAKERS.items():
        for state in ("average", "keep", "reset") if comm.size > 1 else ():
            own = train(comm, ParameterAveraging(5, state), make)[1]
            compare(own, simulate(comm.size, make, every(5, state))[comm.rank], f"{name}, {state}")
        own = train(comm, PostLocalSGD(4, 3), make)[1]
        compare(own, simulate(comm.size, make, every(3, after=4), 2, 4)[comm.rank], name)


@needs(ranks=2)
def check_overlap(comm: Communicator) -> None:
    """A mean arrives one round late, as a difference to what was sent."""
    if 24 % comm.size:
        return
    sent: list[Arrays] = []

    def mix(step: int, all_of_them: list[Arrays], _: list[Any]) -> None:
        if step % 3:
            return
        mean = mean_of(sent) if sent else {}
        for its, old in zip(all_of_them, sent, strict=False):
            for key in its:
                its[key] += mean[key] - old[key]
        sent[:] = [{key: array.copy() for key, array in its.items()} for its in all_of_them]

    policy = ParameterAveraging(3, "keep", overlap=True)
    optimizer, own = train(comm, policy, MAKERS["momentum"])
    compare(own, simulate(comm.size, MAKERS["momentum"], mix)[comm.rank], "overlap")
    policies.synchronize(optimizer)
    assert_same_bits(comm, *own.values())


@needs(ranks=2)
def check_outer_steps(comm: Communicator) -> None:
    if 24 % comm.size:
        return
    for nesterov in (False, True):
        outer, velocity = parameters(), dict.fromkeys(parameters(), 0.0)

        def mix(
            step: int,
            all_of_them: list[Arrays],
            _: list[Any],
            nesterov: bool = nesterov,
            outer: Any = outer,
            velocity: Any = velocity,
        ) -> None:
            if step % 4:
                return
            mean = mean_of(all_of_them)
            for key in outer:
                change = outer[key] - mean[key]
                velocity[key] = 0.8 * velocity[key] + change
                outer[key] = outer[key] - 0.5 * (
                    change + 0.8 * velocity[key] if nesterov else velocity[key]
                )
                for its in all_of_them:
                    its[key][...] = outer[key]

        policy = DiLoCo(4, outer_lr=0.5, nesterov=nesterov, outer_momentum=0.8)
        own = train(comm, policy, MAKERS["Adam"])[1]
        compare(own, simulate(comm.size, MAKERS["Adam"], mix)[comm.rank], f"{nesterov}")
        assert_same_bits(comm, *own.values())
    plain = train(comm, DiLoCo(4, 1.0, outer_momentum=0), MAKERS["SGD"])[1]
    averaged = train(comm, ParameterAveraging(4, "keep"), MAKERS["SGD"])[1]
    compare(plain, averaged, "without momentum")


@needs(ranks=2)
def check_gossip(comm: Communicator) -> None:
    if 24 % comm.size:
        return
    size = comm.size

    def rows(graph: Callable[[int, int], list[int]], share: float | None) -> Callable[[int], Any]:
        def of_step(step: int) -> Any:
            matrix = np.zeros((size, size))
            for rank in range(size):
                others = sorted({*graph(rank, step)} - {rank})
                away = len(others) / (len(others) + 1) if share is None else share
                matrix[rank, rank] = 1 - away
                for other in others:
                    matrix[other, rank] = away / len(others)
            return matrix

        return of_step

    turns = (size - 1).bit_length()
    graphs: dict[Any, Callable[[int, int], list[int]]] = {
        "ring": lambda rank, _: [(rank - 1) % size, (rank + 1) % size],
        "exponential": lambda rank, step: [(rank + 2 ** ((step - 1) % turns)) % size],
        "uneven": lambda rank, _: uneven(size)[rank],
    }
    for name, graph in graphs.items():
        for share in (None, 0.3):
            topology = uneven(size) if name == "uneven" else name
            optimizer, own = train(comm, Gossip(topology, share), MAKERS["momentum"])
            expected = simulate(size, MAKERS["momentum"], weighted(rows(graph, share)))
            compare(own, expected[comm.rank], f"{name}, {share}")
            policies.synchronize(optimizer)
            assert_same_bits(comm, *own.values())


def check_all_agree_in_the_end(comm: Communicator) -> None:
    """With several dtypes, scalars, missing gradients and passes."""
    for policy in all_policies(comm.size):
        its = {"a": np.ones((3, 2), np.float32), "b": np.ones(()), "c": np.ones(5, np.float16)}
        optimizer = rn.DistributedOptimizer(
            rn.SGD(0.1, 0.9), policy=policy, backward_passes_per_step=2
        )
        for turn in range(14):
            own = {key: np.full_like(each, comm.rank + turn) for key, each in its.items()}
            given: Any = own | ({"c": None} if (comm.rank + turn) % 2 else {})
            assert optimizer.step(its, given) == (turn % 2 == 1)
        policies.synchronize(optimizer)
        assert_same_bits(comm, *its.values())
        assert [each.dtype.name for each in its.values()] == ["float32", "float64", "float16"]
        assert (its["a"] < 1).all()


class Nothing(policies.Policy):
    """A policy of one's own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, model: policies.Model) -> None:
        self.calls.append("attach")

    def before_step(self, model: policies.Model) -> None:
        self.calls.append("before")
        gradient = model.gradients["w"]
        assert gradient is not None
        gradient[...] = 1

    def after_step(self, model: policies.Model) -> None:
        self.calls.append(f"after {model.step}")
        model.parameters["w"][0] = 7

    def start_over(self, model: policies.Model) -> None:
        self.calls.append("start over")

    def __repr__(self) -> str:
        return "Nothing()"


@needs(ranks=2)
def check_a_policy_of_ones_own(comm: Communicator) -> None:
    policy, its = Nothing(), {"w": np.zeros(3)}
    optimizer = rn.DistributedOptimizer(rn.SGD(0.5), policy=policy)
    optimizer.step(its, {"w": np.zeros(3)})
    assert its["w"].tolist() == [7, -0.5, -0.5]
    comm.join()
    optimizer.step(its, {"w": np.zeros(3)})
    ringdl.shutdown()
    ringdl.init()
    optimizer.step(its, {"w": np.zeros(3)})
    expected = ["start over", "before", "after 1"]
    assert policy.calls == ["attach", *expected, *expected, "attach", *expected]


def check_late_means_keep_squares(comm: Communicator) -> None:
    """Those of Adam never get negative."""
    policy = ParameterAveraging(2, overlap=True)
    optimizer, its = rn.DistributedOptimizer(rn.Adam(0.1), policy=policy), [np.zeros(3)]
    for turn in range(200):
        optimizer.step(its, [np.full(3, 1e-3 if turn > 2 or comm.rank else 1e3)])
    policies.synchronize(optimizer)
    assert np.isfinite(its[0]).all()


class Signs(policies.Policy):
    """Of gradients, which it changes."""

    def before_step(self, model: policies.Model) -> None:
        for each in model.gradients.values():
            assert each is not None
            each[...] = np.sign(each)

    def __repr__(self) -> str:
        return "Signs()"


@needs(ranks=2)
def check_gradients_that_are_numbers() -> None:
    """As NumPy has those of arrays without axes; and lists."""
    for passes in (1, 2):
        optimizer = rn.DistributedOptimizer(
            rn.SGD(1.0), policy=Signs(), backward_passes_per_step=passes
        )
        its = {"a": np.zeros(()), "b": np.zeros(()), "c": np.zeros(2)}
        for _ in range(passes):
            optimizer.step(its, {"a": np.float64(7), "b": -3.0, "c": [2.0, -2.0]})
        assert (its["a"], its["b"], its["c"].tolist()) == (-1, 1, [-1, 1])


def check_gradients_of_several_passes() -> None:
    """Given in one buffer, which nobody writes to."""
    for policy in (AllReduce(), ParameterAveraging(1)):
        optimizer = rn.DistributedOptimizer(rn.SGD(1.0), policy=policy, backward_passes_per_step=2)
        its, buffer = [np.zeros(3)], np.zeros(3)
        for turn in range(1, 3):
            buffer[...] = turn
            optimizer.step(
                its, [buffer if isinstance(policy, ParameterAveraging) else buffer.copy()]
            )
            assert (buffer == turn).all()
        assert (its[0] == -3).all(), repr(policy)


@needs(ranks=2)
def check_wrong_use(comm: Communicator) -> None:
    def wrapped(policy: Any, **options: Any) -> Any:
        return rn.DistributedOptimizer(rn.SGD(0.1, 0.9), policy=policy, **options)

    for make, text in (
        (lambda: ParameterAveraging(0), "every is 0; pass a number of steps, at least 1"),
        (lambda: ParameterAveraging(2, "mean"), "pass 'average', 'keep' or 'reset'"),  # type: ignore[arg-type]
        (lambda: PostLocalSGD(-1, 2), "after is -1"),
        (lambda: DiLoCo(5, outer_lr=0), "outer_lr is 0"),
        (lambda: Gossip("star"), "pass 'ring', 'exponential', or a graph"),
        (lambda: Gossip([[1], [0]]), "a graph is a dictionary"),  # type: ignore[arg-type]
        (lambda: Gossip(mixing=1.0), "a share between 0 and 1"),
        (lambda: wrapped("gossip"), "pass one of ringdl.policies"),
        (lambda: wrapped(DiLoCo(3), op=ringdl.Sum), "is for AllReduce()"),
        (lambda: wrapped(Gossip(), compression="bfloat16"), "none travel"),
        (lambda: policies.synchronize(rn.SGD(0.1)), "this SGD is not wrapped"),
    ):
        with expect(ringdl.UsageError, text):
            make()
    its = {"w": np.ones(3)}

    def step(policy: Any, values: Any = None) -> Any:
        optimizer = wrapped(policy)
        optimizer.step(its, its if values is None else values)
        return optimizer

    mine = ParameterAveraging(3 + (comm.rank == 1))
    with expect(ringdl.MismatchError, "policy is", "every=3", "every=4"):
        step(mine)
    with expect(ringdl.MismatchError, "policy is", "nothing on rank"):
        step(Gossip() if comm.rank == 1 else AllReduce())
    shared = Gossip()
    first, second = step(shared), step(shared)
    with expect(ringdl.UsageError, "was given to another optimizer", "make a policy for each"):
        first.step(its, its)
    second.step(its, its)
    with expect(ringdl.UsageError, "was given to another optimizer"):
        policies.synchronize(first)
    with expect(ringdl.UsageError, "has not made a step yet"):
        policies.synchronize(wrapped(Gossip()))

    class Nameless(policies.Policy):
        pass

    with expect(ringdl.UsageError, "Nameless has no __repr__"):
        step(Nameless())
    with expect(ringdl.UsageError, "a mean that arrives late is for parameters"):
        ParameterAveraging(2, "average", overlap=True)
    lost = comm.size  # a rank that does not exist
    with expect(ringdl.UsageError, "is not one of"):
        step(Gossip({rank: [lost] for rank in range(comm.size)}))
    with expect(ringdl.UsageError, "is not strongly connected"):
        step(Gossip({rank: [0] for rank in range(comm.size)}))
    different = {"w": np.full(3, float(comm.rank))}
    with expect(ringdl.MismatchError, "the replicas differ"):
        wrapped(DiLoCo(3)).step(different, different)
    out_of_step = wrapped(ParameterAveraging(4))
    with expect(ringdl.MismatchError, "means met that belong to step 3 on", "step 4 on"):
        for _ in range(3 + comm.rank % 2):
            out_of_step.step(its, its)
        policies.synchronize(out_of_step)
    later, its = wrapped(PostLocalSGD(2, 4)), {"w": np.ones(3)}
    with expect(ringdl.MismatchError, "means met that belong to step 5 on", "step 6 on"):
        for _ in range(5 + comm.rank % 2):
            later.step(its, its)
        policies.synchronize(later)
