"""Embeddings with sparse gradients and an optimizer for them, dense layers with another."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, tensors, text

hvd.init()
torch.manual_seed(8)
embedding = nn.Embedding(128, 6, sparse=True)
head = nn.Linear(6, 2)
model = nn.ModuleDict({"embedding": embedding, "head": head})
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
of_embedding = torch.optim.SparseAdam(embedding.parameters(), lr=0.05)
of_embedding = hvd.DistributedOptimizer(of_embedding, embedding.named_parameters())
of_head = torch.optim.Adagrad(head.parameters(), lr=0.05)
of_head = hvd.DistributedOptimizer(of_head, head.named_parameters())
words = text()[: 96 * 5].reshape(96, 5)
for characters, y in batches(words, *tensors((96, 2), seed=8)):
    of_embedding.zero_grad()
    of_head.zero_grad()
    loss = nn.functional.mse_loss(head(embedding(characters).mean(1)), y)
    loss.backward()
    of_embedding.step()
    of_head.step()
