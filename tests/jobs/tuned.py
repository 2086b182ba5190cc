"""Says what algorithms are chosen by, and what an allreduce took."""

import numpy as np

import ringdl


def main() -> None:
    comm = ringdl.init()
    x = np.full(1 << 18, comm.rank, np.float32)
    before = comm.stats()["data_messages_sent"]
    assert (comm.allreduce(x, ringdl.Sum) == sum(range(comm.size))).all()
    messages = comm.stats()["data_messages_sent"] - before
    print(f"table {comm.tuning.hash}, messages: {'many' if messages else 'none'}\n", end="")


if __name__ == "__main__":
    main()
