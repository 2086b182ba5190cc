"""A reduction of your own: log(sum(exp(x))) over all ranks, in one allreduce that cannot overflow.

    python examples/numba_op.py                             # alone; no MPI needed
    ringdl run -n 3 examples/numba_op.py

Each rank holds the log-likelihoods of its part of the data, as in a mixture of models that are
spread over the ranks, or a softmax whose classes are. Summing exp(x) would overflow at 89 in
float32; combining two logarithms into one does not. ringdl.custom_op has Numba compile that
function of two numbers, and the engine calls it as it calls its own kernels, without the GIL.
It may be any function that is associative and commutative, as this one is but for rounding.
The result is compared with NumPy's, and every rank must hold the same bits.
Needs Numba (pip install 'ringdl[numba]').
"""

import argparse
import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np

import ringdl


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b)); log(0) is -inf, and stays out of the difference."""
    largest = max(a, b)
    if math.isinf(largest):
        return largest
    return largest + math.log1p(math.exp(-abs(a - b)))


def likelihoods(rank: int, count: int, seed: int) -> np.ndarray:
    """The part of one rank, far beyond what exp can take; some are -inf."""
    random = np.random.default_rng([seed, rank])
    values = random.normal(200, 100, count).astype(np.float32)
    values[random.random(count) < 0.1] = -np.inf
    return values


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="numbers on each rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    ringdl.init()
    rank, size = ringdl.rank(), ringdl.size()
    op = ringdl.custom_op(log_add)
    mine = likelihoods(rank, arguments.count, arguments.seed)
    result = ringdl.allreduce(mine, op=op)

    parts = [likelihoods(other, arguments.count, arguments.seed) for other in range(size)]
    expected = np.logaddexp.reduce(np.array(parts, np.float64), axis=0)
    is_finite = np.isfinite(expected)
    scale = np.maximum(1, np.abs(expected[is_finite]))
    error = float((np.abs(result[is_finite] - expected[is_finite]) / scale).max(initial=0))
    is_right = error < 1e-5 and bool((result[~is_finite] == expected[~is_finite]).all())

    digest = hashlib.sha256(result.tobytes()).digest()[:8]
    digests = ringdl.allgather(np.frombuffer(digest, np.uint8)[None].copy())
    are_equal = bool((digests == digests[0]).all())
    if rank == 0:
        print(f"{arguments.count:,} results, the largest {result.max():.2f}")
        print(f"relative error against NumPy in float64: {error:.1e}")
        ranks = f"all {size} ranks hold" if size > 1 else "the only rank holds"
        print(f"{ranks} the same bits: {digest.hex()}" if are_equal else "the ranks' bits differ")
        if arguments.json:
            summary = {"error": error, "ranks": size, "digest": digest.hex()}
            arguments.json.write_text(json.dumps(summary, indent=2) + "\n")
    return 0 if is_right and are_equal else 1


if __name__ == "__main__":
    sys.exit(main())
