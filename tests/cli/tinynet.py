"""A model for commands whose search is not what is tested: a tenth of the nodes that GPT-2 has."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """A block without attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """As a language model: its embedding is its head too."""

    def __init__(self, layers: int, width: int, vocab: int) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(vocab, width), nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def net(
    layers: int = 2, width: int = 64, vocab: int = 512, seq: int = 16, heads: int = 0
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What the command line asks of a factory; of the sizes of GPT-2, ``heads`` means nothing to it."""
    ids = torch.randint(vocab, (2, seq))
    return Net(layers, width, vocab), {"input_ids": ids, "labels": ids}
