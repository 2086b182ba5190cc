"""Training with a wrapped optimizer while DataLoader forks workers; each would be refused.

Workers of the first loader are forked anew in every epoch, those of the second one live on.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

import ringdl
import ringdl.torch as hvd

EPOCHS = 3


class Numbers(Dataset):
    """Rows that say which process made them, and whether ringdl refused to be called there."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.buckets = ringdl.Buckets([("w", (10,), "float32")])  # a worker inherits them

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, bool]:
        assert get_worker_info() is not None
        is_refused = False
        try:
            ringdl.barrier()
        except ringdl.UsageError as error:
            is_refused = "forked process" in str(error)
        generator = torch.Generator().manual_seed(100 * self.rank + index)
        return torch.randn(6, generator=generator), os.getpid(), is_refused


def train(loader: DataLoader) -> set[int]:
    """The processes that made the rows."""
    torch.manual_seed(ringdl.rank())
    model = torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    processes: set[int] = set()
    for _ in range(EPOCHS):
        for rows, makers, is_refused in loader:
            assert is_refused.all()
            processes |= set(makers.tolist())
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    for parameter in model.parameters():
        everybodys = ringdl.allgather(parameter.detach().reshape(1, -1))
        assert (everybodys == everybodys[0]).all()
    return processes


def main() -> None:
    torch.set_num_threads(1)
    ringdl.init()
    data = Numbers(ringdl.rank())
    anew = train(DataLoader(data, batch_size=4, num_workers=2))
    kept = train(DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True))
    assert os.getpid() not in anew | kept
    sys.stdout.write(f"{len(anew)} workers forked anew, {len(kept)} kept\n")


if __name__ == "__main__":
    main()
