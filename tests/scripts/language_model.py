"""A small causal transformer on characters, with AdamW."""

import torch
from torch import nn

import ringdl.torch as hvd
from tests.scripts._data import batches, text

hvd.init()
torch.manual_seed(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 16)
        self.positions = nn.Parameter(torch.zeros(12, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 128)

    def forward(self, characters):
        mask = nn.Transformer.generate_square_subsequent_mask(12)
        embedded = self.embedding(characters) + self.positions
        return self.head(self.block(embedded, mask, is_causal=True))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
rows = text()[: 13 * 96].reshape(96, 13)
for (characters,) in batches(rows):
    optimizer.zero_grad()
    logits = model(characters[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), characters[:, 1:].flatten())
    loss.backward()
    optimizer.step()
