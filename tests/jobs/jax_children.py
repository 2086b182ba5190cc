"""Children of a rank import ringdl.jax before it does: the memory of the rank stays its own."""

import multiprocessing
import sys
from pathlib import Path

import numpy as np

import ringdl

COUNT = 1 << 22


def compute(queue: "multiprocessing.Queue[float | str]") -> None:
    try:
        import jax.numpy as jnp

        import ringdl.jax  # noqa: F401

        array = (jnp.ones(COUNT) * 3).block_until_ready()
        address = array.unsafe_buffer_pointer()
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= address < end and "memfd:ringdl" in line:
                raise AssertionError("the child's array lies in its parent's memory")
        queue.put(float(array[0]))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    comm = ringdl.init()
    answers = []
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        queue = context.Queue()
        child = context.Process(target=compute, args=(queue,))
        child.start()
        shared = [comm.empty(COUNT, "float32") for _ in range(4)]
        for array in shared:
            array[...] = 7
        answers.append(queue.get(timeout=60))
        child.join()
        assert all((array == 7).all() for array in shared)
    total = ringdl.allreduce(np.ones(1), ringdl.Sum)
    sys.stdout.write(f"children: {answers}, ranks add up to {total[0]:.0f}\n")
