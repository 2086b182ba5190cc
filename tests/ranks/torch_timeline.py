"""The timeline of a job: a file for Perfetto."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringdl
import ringdl.torch as hvd
from ringdl import Communicator
from tests.ranks.support import expect
from tests.ranks.torch_helpers import loss_of, make_mlp, part, whole_batch, wrap

ODD_NAME = 'Größe "of \\ \t\n\x01"'


def recorded(comm: Communicator, directory: str) -> list[dict[str, Any]]:
    """The events of all ranks of some collectives and a step, on all ranks."""
    path = Path(directory, "timeline.json")
    hvd.start_timeline(str(path), mark_cycles=True)
    with expect(ringdl.UsageError, "recorded already"):
        hvd.start_timeline(path)
    x = np.ones(100_000)
    comm.allreduce_async_(x, name="large one").wait()
    for late in range(comm.size):  # else all may have ended before a rank waits for it
        comm.barrier()
        if comm.rank == late:
            time.sleep(0.1)
        comm.allreduce_async_(x, name="late one").wait()
    comm.allreduce_(np.ones(3))
    comm.allreduce_(np.ones(3), name=ODD_NAME)
    comm.allgather(x[:7])
    model = make_mlp()
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss_of(model, *map(part, whole_batch(0))).backward()
    optimizer.step()
    hvd.stop_timeline()
    with expect(ringdl.UsageError, "no timeline is being recorded"):
        hvd.stop_timeline()
    comm.allreduce(x, name="afterwards")
    text = path.read_text() if comm.rank == 0 else None
    events: list[dict[str, Any]] = json.loads(comm.broadcast_object(text))["traceEvents"]
    return events


def check_what_is_recorded(comm: Communicator) -> None:
    with tempfile.TemporaryDirectory() as directory:
        events = recorded(comm, directory)
    by_rank = Counter(event["pid"] for event in events)
    assert by_rank.keys() == set(range(comm.size))
    for rank in range(comm.size):
        own = [event for event in events if event["pid"] == rank]
        begun = {event["id"]: event for event in own if event["ph"] == "b"}
        ended = {event["id"]: event for event in own if event["ph"] == "e"}
        assert begun.keys() == ended.keys()
        assert all(begun[key]["ts"] <= ended[key]["ts"] for key in begun)
        works = {event["name"]: event["args"] for event in begun.values()}
        assert works["allreduce 'large one'"]["bytes"] == 800_000
        assert works["allreduce 'large one'"]["algorithm"]
        assert any(name.endswith("unnamed allreduce") for name in works), works.keys()
        assert any("allgather" in name for name in works)
        assert f"allreduce '{ODD_NAME}'" in works, works.keys()
        assert any(name.startswith("gradient bucket") for name in works), works.keys()
        assert "allreduce 'afterwards'" not in works
        spans = Counter(event["cat"] for event in own if event["ph"] == "X")
        assert spans["hook"] == 6
        assert spans["average"] == 1
        assert spans["wait"] >= comm.size - 1
        assert all(event["dur"] >= 0 for event in own if event["ph"] == "X")
        (name,) = (event["args"]["name"] for event in own if event["name"] == "process_name")
        assert name.startswith(f"rank {rank} (host ")
    # An allreduce ends on no rank before it has begun on all.
    large = [event for event in events if event["name"] == "allreduce 'large one'"]
    last_begin = max(event["ts"] for event in large if event["ph"] == "b")
    assert all(event["ts"] >= last_begin - 1000 for event in large if event["ph"] == "e")


def check_a_file_that_cannot_be_written(comm: Communicator) -> None:
    with expect(ringdl.UsageError, "rank 0 cannot write the timeline", "/no/such/place"):
        ringdl.start_timeline("/no/such/place/timeline.json")
    comm.barrier()
