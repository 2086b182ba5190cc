"""A generator and a discriminator, each with an optimizer of its own."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors

hvd.init()
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))
discriminator = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(), nn.Linear(8, 1))
for model in (generator, discriminator):
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_generator = hvd.DistributedOptimizer(of_generator, generator.named_parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_discriminator = hvd.DistributedOptimizer(of_discriminator, discriminator.named_parameters())
loss_of = nn.BCEWithLogitsLoss()
for real, noise in batches(*tensors((120, 5), (120, 3), seed=3)):
    ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
    fake = generator(noise)

    discriminator.zero_grad()
    loss = loss_of(discriminator(real), ones) + loss_of(discriminator(fake.detach()), zeros)
    loss.backward()
    of_discriminator.step()

    generator.zero_grad()
    loss_of(discriminator(fake), ones).backward()
    of_generator.step()
