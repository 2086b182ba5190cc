"""One matrix as the embedding and as the output layer."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, text

hvd.init()
torch.manual_seed(12)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 10)
        self.mixer = nn.LSTM(10, 10, batch_first=True)
        self.head = nn.Linear(10, 128, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, characters):
        return self.head(self.mixer(self.embedding(characters))[0])


model = Model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
rows = text()[: 8 * 96].reshape(96, 8)
for (characters,) in batches(rows):
    optimizer.zero_grad()
    logits = model(characters[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten()).backward()
    optimizer.step()
