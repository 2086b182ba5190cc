"""A GAN draws handwritten digits: two models, two optimizers, any number of ranks.

    python examples/torch_gan.py                         # alone; no MPI needed
    ringdl run -n 2 examples/torch_gan.py

An ordinary single-machine script, and these lines that make it distributed:

    + import ringdl.data
    + import ringdl.torch as hvd
    + hvd.init()
    + sampler = ringdl.data.ShardedSampler(images, remainder="drop")
    - loader = DataLoader(images, arguments.batch, shuffle=True)
    + loader = DataLoader(images, arguments.batch // hvd.size(), sampler=sampler)
    + torch.manual_seed(hvd.rank())                         # other noise on each rank
    + for model in (generator, discriminator):
    +     hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    + of_generator = hvd.DistributedOptimizer(of_generator, generator.named_parameters())
    + of_discriminator = hvd.DistributedOptimizer(
    +     of_discriminator, discriminator.named_parameters())
    + if hvd.rank() == 0:                                   # around what is printed

Each loss moves one model, though its gradients flow through both.
Needs torch and scikit-learn (1,797 images of 8 x 8 that come with it).
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

import ringdl.data
import ringdl.torch as hvd

NOISE = 16
SHADES = " .:-=+*#%@"


def drawing(image: torch.Tensor) -> str:
    """An image of 8 x 8 in characters."""
    shades = (image.clamp(0, 1) * (len(SHADES) - 1)).round().int().reshape(8, 8)
    return "\n".join("".join(SHADES[shade] * 2 for shade in row) for row in shades.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64, help="images per step over all ranks")
    parser.add_argument("--json", type=Path, help="write the final figures to this file")
    arguments = parser.parse_args()

    hvd.init()
    images = torch.tensor(load_digits().data / 16).float()
    sampler = ringdl.data.ShardedSampler(images, remainder="drop")
    loader = DataLoader(images, arguments.batch // hvd.size(), sampler=sampler)
    torch.manual_seed(hvd.rank())
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid()
    )
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    for model in (generator, discriminator):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_generator = hvd.DistributedOptimizer(of_generator, generator.named_parameters())
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    of_discriminator = hvd.DistributedOptimizer(of_discriminator, discriminator.named_parameters())
    loss_of = nn.BCEWithLogitsLoss()

    for epoch in range(arguments.epochs):
        sampler.set_epoch(epoch)
        for real in loader:
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = generator(torch.randn(len(real), NOISE))

            of_discriminator.zero_grad()
            loss = loss_of(discriminator(real), ones)
            loss = loss + loss_of(discriminator(fake.detach()), zeros)
            loss.backward()
            of_discriminator.step()

            of_generator.zero_grad()
            loss_of(discriminator(fake), ones).backward()
            of_generator.step()

    torch.manual_seed(0)
    with torch.no_grad():
        drawn = generator(torch.randn(500, NOISE))
    # How far the average drawing is from the average digit, beside how far a grey one is.
    distance = float((drawn.mean(0) - images.mean(0)).norm())
    of_grey = float((images.mean() - images.mean(0)).norm())
    if hvd.rank() == 0:
        print(drawing(drawn[0]))
        print(f"distance of averages {distance:.2f}; of a grey image {of_grey:.2f}")
        if arguments.json:
            figures = {"distance": distance, "of_grey": of_grey, "ranks": hvd.size()}
            arguments.json.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
