"""About twenty calls on many ranks, and one rank that is late: how many messages did each send?

Each rank writes into the folder argv[1] how many it had sent after init(), after the calls, once
the late rank's call had ended, too, and after shutdown().
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

import ringdl
from tests.ranks.support import expect

sent = []
comm = ringdl.init()
rank, size = comm.rank, comm.size
sent.append(comm.stats()["messages_sent"])

small, large = np.full(8, rank, np.float32), np.full(50_000, rank, np.float32)
mean, total = (size - 1) / 2, size * (size - 1) / 2
for count, name in ((8, None), (8, "few"), (5_000, "more"), (300_000, "many"), (300_000, None)):
    assert (ringdl.allreduce(np.full(count, rank, np.float32), name=name) == mean).all()
works = [ringdl.allreduce_async(small, ringdl.Sum, f"async {i}") for i in range(3)]
assert all((work.wait() == total).all() for work in works)
assert (ringdl.broadcast(small, 1) == 1).all()
assert (ringdl.broadcast(large, size - 1, name="weights") == size - 1).all()
assert ringdl.allgather(np.array([rank])).tolist() == list(range(size))
assert len(ringdl.allgather(np.full((rank % 3, 700), rank), name="rows")) == sum(
    other % 3 for other in range(size)
)
ringdl.barrier()
ringdl.barrier(name="here")
assert (ringdl.reducescatter(np.full(size, rank), ringdl.Sum) == total).all()
assert (ringdl.reducescatter(np.full(size * 1000, rank), ringdl.Sum, name="sums") == total).all()
assert ringdl.broadcast_object({"epoch": 3} if rank == 0 else None) == {"epoch": 3}
assert ringdl.allgather_object(rank) == list(range(size))
buckets = ringdl.Buckets([("weight", (300, 30), "float32"), ("bias", (30,), "float32")])
for view in buckets.views():
    view[:] = rank
buckets.ready(0)
buckets.ready(1)
assert buckets.wait() == [True, True]
assert all((view == mean).all() for view in buckets.views())
ringdl.barrier()
sent.append(comm.stats()["messages_sent"])

late = size // 3
folder = Path(sys.argv[1])
if rank == late:
    for other in range(size):
        while not (folder / f"stalled {other}").exists() and other != late:
            time.sleep(0.05)
else:
    work = ringdl.allreduce_async(np.ones(100_000), ringdl.Sum, "late")
    with expect(ringdl.StallError, f": rank {late} has not arrived ("):
        work.wait(timeout=4)
    (folder / f"stalled {rank}").touch()
result = ringdl.allreduce(np.ones(100_000), ringdl.Sum, "late") if rank == late else work.wait()
assert (result == size).all()
sent.append(comm.stats()["messages_sent"])
engine = comm._engine
ringdl.shutdown()
sent.append(engine.stats()["messages_sent"])
(folder / f"{rank}.json").write_text(json.dumps(sent))
