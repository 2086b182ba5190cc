"""How fast ranks of one host push to a parameter server and fetch from it, beside memcpy.

    python -m ringdl run -n 4 bench/parameter_server.py [--megabytes 100] [--json FILE]

All ranks push and fetch at once, or copy as many bytes between arrays of their own, by turns.
Prints medians over rounds of what the slowest rank takes.
"""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

import ringdl
from ringdl.policies._shards import Shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    comm = ringdl.init()
    count = arguments.megabytes * 1_000_000 // 4
    parameters = {"w": np.zeros(count, np.float32)}
    gradient = {"w": np.ones(count, np.float32)}
    model = SimpleNamespace(communicator=comm, parameters=parameters, key="bench")
    shards = Shards(model)
    from_here, to_there = (np.ones(count, np.float32) for _ in range(2))
    calls = {
        "push": lambda: shards.push(gradient, 1e-3),
        "fetch": lambda: shards.fetch(parameters),
        "push and fetch": lambda: (shards.push(gradient, 1e-3), shards.fetch(parameters)),
        "memcpy": lambda: np.copyto(to_there, from_here),
    }
    seconds = {name: [] for name in calls}
    for turn in range(arguments.rounds + 2):
        for name, call in calls.items():
            comm.barrier()
            begin = time.perf_counter()
            call()
            taken = comm.allreduce(np.array([time.perf_counter() - begin]), ringdl.Max)[0]
            if turn > 1:
                seconds[name].append(float(taken))
    if comm.rank:
        return
    medians = {name: float(np.median(each)) for name, each in seconds.items()}
    rates = {
        name: arguments.megabytes * (2 if " and " in name else 1) / 1e3 / each
        for name, each in medians.items()
    }
    print(f"{comm.size} ranks, {arguments.megabytes} MB of float32")
    for name, rate in rates.items():
        low, high = np.percentile(seconds[name], [10, 90]) * 1e3
        print(
            f"{name:16s} {medians[name] * 1e3:7.1f} ms ({low:.1f} to {high:.1f})  "
            f"{rate:5.2f} GB/s per rank  {rate / rates['memcpy']:.2f} of memcpy"
        )
    if arguments.json:
        found = {"ranks": comm.size, "megabytes": arguments.megabytes, "seconds": seconds}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
