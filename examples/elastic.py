"""A network that goes on training when ranks are killed.

    ringdl run --elastic -n 4 examples/elastic.py --kill 2

Needs Open MPI 5 (PyPI's has it) and scikit-learn, for its handwritten digits. --kill 2 has rank 2
kill itself in the middle of a step; or kill any of the processes, whose ids are printed: the others
go on from the last commit. With --checkpoint FOLDER a job that was ended goes on when it is started
again.
"""

import argparse
import os
import signal
import sys

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import ringdl.torch as hvd


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=60, help="over all ranks")
    parser.add_argument("--kill", type=int, help="the number of a rank")
    parser.add_argument("--checkpoint", help="a folder")
    chosen = parser.parse_args()
    hvd.init()
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)

    torch.manual_seed(1)
    images, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )

    def die(_: torch.Tensor) -> None:
        if state.epoch == 2 and hvd.size() > 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if chosen.kill == hvd.rank():
        model[0].bias.register_hook(die)  # in the middle of a backward pass
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(
        model, optimizer, epoch=0, sampler=sampler, checkpoint=chosen.checkpoint
    )

    def tell() -> None:
        if hvd.rank() == 0:
            text = f"goes on with {hvd.size()} ranks: epoch {state.epoch}"
            print(f"{text}, {sampler.processed_num} samples", flush=True)

    state.register_reset_callbacks([tell])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < chosen.epochs:
            sampler.set_epoch(state.epoch)
            loader = DataLoader(data, batch_size=chosen.batch // hvd.size(), sampler=sampler)
            loss = torch.zeros(())  # a commit at the end of an epoch leaves no batch
            for number, (inputs, targets) in enumerate(loader):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, len(inputs))
                state.commit()
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {mean:.4f}", flush=True)
            state.epoch += 1

    train(state)
    correct = (model(data.tensors[0]).argmax(1) == labels).float().mean().item()
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {correct:.1%} are right\n")


if __name__ == "__main__":
    main()
