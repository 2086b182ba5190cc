"""A compiled training step in JAX with optax: ringdl, mpi4jax, and the ranks computing alone.

    python bench/jax_step.py --json bench/results/jax-step.json

Each has jobs of its own, as its users would, with one thread per rank; they take turns. "leaves" is
an allreduce of mpi4jax for each gradient, "flat" one of all of them, concatenated. Two ranks, a
network of 27 million parameters, SGD, parameters given away to the step (``donate_argnums``). A
step's time is that of the slowest rank. Each step is followed by one of the same network that
averages nothing ("beside"), and by `ringdl.allreduce_` of as many bytes in `ringdl.empty`: what a
step takes longer than the one beside it is what averaging costs. Figures are medians of all steps
of a job, then over rounds; ratios are of jobs of the same round. All end with the same parameters.

mpi4jax has to be there beside ringdl and an MPI, in the environment that ``--python`` names. Its
wheel is built with the MPI's compiler: ``MPICC=... pip install mpi4jax``.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import links
import numpy as np
import train_step

KINDS = ("ringdl", "leaves", "flat")
Tree = Any


def averaging(kind: str) -> Callable[[Tree], Tree]:
    """What is done to gradients in a step."""
    import jax
    import jax.numpy as jnp
    from jax.flatten_util import ravel_pytree

    if kind == "alone":
        return lambda gradients: gradients
    if kind == "ringdl":
        import ringdl.jax

        transformation = ringdl.jax.average_gradients()
        return lambda gradients: transformation.update(gradients, transformation.init(None))[0]
    import mpi4jax
    from mpi4py import MPI

    def mean(gradient: jax.Array) -> jax.Array:
        total = mpi4jax.allreduce(gradient, op=MPI.SUM, comm=MPI.COMM_WORLD)
        return jnp.asarray(total) / MPI.COMM_WORLD.size

    def of_flat(gradients: Tree) -> Tree:
        flat, restored = ravel_pytree(gradients)
        return restored(mean(flat))

    return of_flat if kind == "flat" else lambda gradients: jax.tree.map(mean, gradients)


class Step:
    """A compiled step and the parameters that it trains."""

    def __init__(self, kind: str, loss: Callable[[Tree], Any], parameters: Tree) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        average = averaging(kind)
        optimizer = optax.sgd(1e-3)

        def step(parameters: Tree, state: Tree) -> tuple[Tree, Tree]:
            updates, state = optimizer.update(average(jax.grad(loss)(parameters)), state)
            return optax.apply_updates(parameters, updates), state

        self._compiled = jax.jit(step, donate_argnums=(0, 1))
        self.parameters = jax.tree.map(jnp.copy, parameters)
        self._state = optimizer.init(self.parameters)

    def __call__(self) -> None:
        import jax

        self.parameters, self._state = self._compiled(self.parameters, self._state)
        jax.block_until_ready(self.parameters)


def run_rank(chosen: argparse.Namespace) -> None:
    """One rank of one job."""
    import jax
    import jax.numpy as jnp
    import optax
    from mpi4py import MPI

    import ringdl

    if chosen.kind == "ringdl":
        import ringdl.jax

    world = MPI.COMM_WORLD
    ringdl.init()
    sizes = [chosen.inputs, *[chosen.width] * chosen.layers, 10]
    keys = jax.random.split(jax.random.key(1), len(sizes))
    parameters = [
        (jax.random.normal(key, (fan_in, fan_out)) * fan_in**-0.5, jnp.zeros(fan_out))
        for key, fan_in, fan_out in zip(keys, sizes, sizes[1:], strict=False)
    ]
    random = np.random.default_rng(world.rank)
    inputs = jnp.asarray(random.normal(size=(chosen.batch, chosen.inputs)).astype(np.float32))
    labels = jnp.asarray(random.integers(10, size=chosen.batch))

    def loss(parameters: Tree) -> jax.Array:
        values = inputs
        *hidden, (weight, bias) = parameters
        for its_weight, its_bias in hidden:
            values = jax.nn.relu(values @ its_weight + its_bias)
        logits = values @ weight + bias
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    steps = {name: Step(name, loss, parameters) for name in (chosen.kind, "alone")}
    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    shared = ringdl.empty(count, "float32")
    shared[:] = 1
    turns = {**steps, "allreduce": lambda: ringdl.allreduce_(shared)}
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for turn in range(-3, chosen.steps):
        for name, take in turns.items():
            world.Barrier()
            begin = time.perf_counter()
            take()
            slowest = world.allreduce(time.perf_counter() - begin, MPI.MAX)
            if turn >= 0:
                seconds[name].append(slowest)
    leaves = jax.tree.leaves(steps[chosen.kind].parameters)
    if world.rank == 0:
        answer = {
            "mpi": " ".join(MPI.Get_library_version().split(",")[0].splitlines()[0].split()),
            "jax": jax.__version__,
            "parameters": count,
            "seconds": seconds,
            "sums": [float(np.asarray(leaf, np.float64).sum()) for leaf in leaves],
        }
        chosen.json.write_text(json.dumps(answer))


def measure(chosen: argparse.Namespace, kind: str) -> dict[str, Any]:
    """One job."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = ["--kind", kind, "--json", str(answer)]
        for name in ("steps", "batch", "inputs", "width", "layers"):
            words += [f"--{name}", str(getattr(chosen, name))]
        launcher = [chosen.python, "-m", "ringdl", "run", "-n", str(chosen.ranks)]
        subprocess.run([*launcher, __file__, *words], timeout=600, check=True)
        answered: dict[str, Any] = json.loads(answer.read_text())
        return answered


def report(chosen: argparse.Namespace, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all rounds say together."""
    for jobs in rounds:
        for kind in ("leaves", "flat"):
            if not np.allclose(jobs["ringdl"]["sums"], jobs[kind]["sums"], rtol=1e-4, atol=1e-3):
                raise SystemExit(f"ringdl and mpi4jax ({kind}) ended with different parameters")
    costs = {kind: [_cost(jobs[kind]["seconds"], kind) for jobs in rounds] for kind in KINDS}
    of_ringdl = [jobs["ringdl"]["seconds"] for jobs in rounds]
    allreduce = [statistics.median(each["allreduce"]) for each in of_ringdl]
    middle = [
        {kind: statistics.median(jobs[kind]["seconds"][kind]) for kind in KINDS} for jobs in rounds
    ]
    return {
        "machine": links.machine(),
        "mpi": rounds[0]["ringdl"]["mpi"],
        "jax": rounds[0]["ringdl"]["jax"],
        "ranks": chosen.ranks,
        "batch": chosen.batch,
        "parameters": rounds[0]["ringdl"]["parameters"],
        "step ratios": {
            kind: statistics.median(each[kind] / each["ringdl"] for each in middle)
            for kind in KINDS[1:]
        },
        "cost": {kind: statistics.median(each) for kind, each in costs.items()},
        "cost ratios": {
            kind: statistics.median(costs[kind]) / statistics.median(costs["ringdl"])
            for kind in KINDS[1:]
        },
        "allreduce": statistics.median(allreduce),
        "cost / allreduce": statistics.median(
            cost / alone for cost, alone in zip(costs["ringdl"], allreduce, strict=True)
        ),
        "seconds": {kind: [jobs[kind]["seconds"] for jobs in rounds] for kind in KINDS},
    }


def _cost(seconds: dict[str, list[float]], kind: str) -> float:
    """What averaging costs: how much longer a step takes than the one without it beside it."""
    return statistics.median(a - b for a, b in zip(seconds[kind], seconds["alone"], strict=True))


def lines(answer: dict[str, Any]) -> list[str]:
    said = [f"{answer['parameters'] / 1e6:.1f} M parameters, {answer['ranks']} ranks"]
    for kind, of_rounds in answer["seconds"].items():
        for name in (kind, "alone"):
            times = [1e3 * second for seconds in of_rounds for second in seconds[name]]
            deciles = statistics.quantiles(times, n=10)
            said.append(
                f"{name if name == kind else '   beside':10}{statistics.median(times):8.1f} ms  "
                f"(p10 {deciles[0]:.1f}, p90 {deciles[-1]:.1f})"
            )
        said[-2] += f", averaging {1e3 * answer['cost'][kind]:.1f}"
    said.append(
        f"allreduce_ in ringdl.empty {1e3 * answer['allreduce']:.1f} ms; averaging costs "
        f"{answer['cost / allreduce']:.2f} times that"
    )
    for kind, each in answer["step ratios"].items():
        said.append(f"{kind} / ringdl = {each:.2f}; averaging {answer['cost ratios'][kind]:.1f}")
    return said


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--python", default=sys.executable, help="that has mpi4jax and an MPI")
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    train_step.add_step_options(parser)
    chosen = parser.parse_args(arguments)
    if chosen.kind:
        run_rank(chosen)
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    )
    rounds = []
    for turn in range(chosen.rounds):
        first = turn % len(KINDS)
        rounds.append({kind: measure(chosen, kind) for kind in KINDS[first:] + KINDS[:first]})
    answer = report(chosen, rounds)
    print("\n".join(lines(answer)))
    if chosen.json:
        words = [word for word in arguments if word not in ("--python", chosen.python)]
        command = {"command": shlex.join(["python", "bench/jax_step.py", *words])}
        chosen.json.write_text(json.dumps(command | answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
