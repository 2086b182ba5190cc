"""A child of a rank that makes a process group gets ringdl's sentence, and the ranks go on."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing

import ringdl
import ringdl.torch.backend


def make_group(queue: torch.multiprocessing.Queue) -> None:
    try:
        dist.init_process_group("ringdl")
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")
    else:
        queue.put("none")


if __name__ == "__main__":
    dist.init_process_group("ringdl")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=make_group, args=(queue,))
    child.start()
    said = queue.get(timeout=60)
    child.join()
    expected = (
        f"UsageError: this process is a child of rank {ringdl.rank()} (process {os.getpid()})"
    )
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    refused = said.startswith(expected) or said
    sys.stdout.write(f"refused: {refused}, ranks add up to {x.item():.0f}\n")
