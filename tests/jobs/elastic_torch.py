"""Trains a small network on ranks that are killed at any moment: see elastic.py.

    elastic_torch.py EPOCHS KILLS [COMMIT]

KILLS says who is killed when, as "rank:seconds,...", in seconds from the first step on.
"""

import hashlib
import sys
import threading
import time

import going_on
import torch
from torch.utils.data import DataLoader, TensorDataset

import ringdl.torch as hvd


def main(epochs: int, kills: str, commit: str = "") -> None:
    hvd.init()
    number, failed_at = going_on.number(), time.monotonic()
    torch.manual_seed(1)
    x = torch.randn(241, 16)
    data = TensorDataset(torch.arange(len(x)), x, x @ torch.randn(16, 4))
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, epoch=0, sampler=sampler, seen=[])
    if commit:
        saved = torch.load(commit, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
        state.epoch = saved["epoch"]

    def tell() -> None:
        where = f"in epoch {state.epoch} with {sampler.processed_num} samples"
        saved = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "sampler": sampler.state_dict(),
            "epoch": state.epoch,
        }
        going_on.tell(number, where, failed_at, ".pt", lambda file: torch.save(saved, file))

    state.register_reset_callbacks([tell])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        nonlocal failed_at
        while state.epoch < epochs:
            going_on.wait(state.epoch, state.commit)
            sampler.set_epoch(state.epoch)
            for batch, (numbers, inputs, targets) in enumerate(
                DataLoader(data, batch_size=12 // hvd.size(), sampler=sampler)
            ):
                failed_at = time.monotonic()
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                sampler.record_batch(batch, len(inputs))
                state.seen = state.seen + hvd.allgather(numbers).tolist()
                state.commit()
            repeated = len(state.seen) - len(set(state.seen))
            assert set(state.seen) == set(range(len(data))) or commit, "some were skipped"
            assert repeated < 12, f"{repeated} were trained on twice"
            state.epoch += 1
            state.seen = []
            state.commit()

    for kill in kills.split(",") if kills else ():
        rank, seconds = kill.split(":")
        if rank == str(number):
            threading.Timer(float(seconds), going_on.kill).start()
    train(state)
    parameters = torch.cat([each.detach().flatten() for each in model.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    sys.stdout.write(f"rank {number} has ended with {digest} on {hvd.size()}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], *sys.argv[3:])
