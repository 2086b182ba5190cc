"""The peak memory of some training steps of a model with 100 MB of parameters, per rank.

Arguments: "plain" or "wrapped", and "keep" or "drop" for what zero_grad() does with gradients. The
proportional set size is read whenever a gradient has been accumulated, before it can have moved to
its bucket, and after each phase of a step: memory changes in between only.
"""

import re
import sys
from pathlib import Path

import torch

import ringdl.torch as hvd

LAYERS = 6
WIDTH = 2048
STEPS = 5


def read_pss() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss: +(\d+) kB", text, re.MULTILINE)[1])


def main(is_wrapped: bool, keeps: bool) -> None:
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    peak = 0

    def look(_: object = None) -> None:
        nonlocal peak
        peak = max(peak, read_pss())

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if is_wrapped:
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    before = read_pss()
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=not keeps)
        loss = model(torch.randn(32, WIDTH)).square().mean()
        look()
        loss.backward()
        look()
        optimizer.step()
        look()
    hvd.barrier()
    largest = max(parameter.nbytes for parameter in model.parameters())
    total = sum(parameter.nbytes for parameter in model.parameters())
    sys.stdout.write(
        f"rank {hvd.rank()} parameters {total} largest {largest} before {before} peak {peak}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1] == "wrapped", sys.argv[2] == "keep")
