"""Many allreduces in shared memory, of all kinds, with random delays; says what their bits were.

The arguments: how many, and the seed of the delays, which changes nothing but the timing.
"""

import hashlib
import random
import sys
import time

import numpy as np

import ringdl

COUNTS = (1, 7, 256, 1000, 4099, 20_000)
"""Elements: most are small, as small ones meet most often."""


def delay(chance: random.Random) -> None:
    """Now and then a rank is late: by a sleep, or by computing."""
    dice = chance.random()
    if dice < 0.0005:
        time.sleep(chance.uniform(0, 2e-3))
    elif dice < 0.01:
        until = time.perf_counter() + chance.uniform(0, 1e-4)
        while time.perf_counter() < until:
            pass


def main(works: int, seed: int) -> None:
    comm = ringdl.init()
    choice = random.Random(1)  # the same on all ranks, in all runs
    chance = random.Random(1000 * seed + comm.rank)
    inputs, expected = [], []
    for count in COUNTS:
        of_rank = [
            np.random.default_rng([count, rank]).standard_normal(count, np.float32)
            for rank in range(comm.size)
        ]
        inputs.append(of_rank[comm.rank])
        total = of_rank[0].copy()
        for other in of_rank[1:]:
            total += other
        expected.append(total)
    arrays = [(comm.empty(count), comm.empty(count)) for count in COUNTS]
    bits = hashlib.blake2b()
    done = 0
    while done < works:
        which = min(int(choice.expovariate(1.0)), len(COUNTS) - 1)
        first, second = arrays[which]
        first[...] = inputs[which]
        second[...] = inputs[which]
        way = choice.randrange(4)
        delay(chance)
        if way == 0:
            comm.allreduce_(first, ringdl.Sum)
            delay(chance)
            comm.allreduce_(second, ringdl.Sum, algorithm="direct")
        elif way == 1:
            comm.allreduce_(first, ringdl.Sum, "one")
            comm.allreduce_(second, ringdl.Sum)
        else:
            pairs = [("one", first), ("two", second)]
            if chance.random() < 0.5:  # ranks need not agree on the order
                pairs.reverse()
            under_way = []
            for name, array in pairs:
                under_way.append(comm.allreduce_async_(array, ringdl.Sum, name, algorithm="direct"))
                delay(chance)
            for work in under_way:
                work.wait()
        for array in (first, second):
            assert np.array_equal(array, expected[which]), f"work {done}, {COUNTS[which]} elements"
        bits.update(first[:8])
        done += 2
    print(f"{done} works, bits {bits.hexdigest()[:16]}\n", end="", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
