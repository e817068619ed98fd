"""Models of which it is asked what autograd keeps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SMALL = {"layers": 1, "width": 32, "heads": 2, "batch": 2}


LANGUAGE = {**SMALL, "vocab": 100, "seq": 16}


MODELS = {
    "gpt2": LANGUAGE,
    "llama": LANGUAGE,
    "bert": LANGUAGE,
    "t5": LANGUAGE,
    "vit": {**SMALL, "image": 32, "patch": 8, "classes": 10},
}


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x, labels):
        x = F.relu(self.norm(self.first(x)), inplace=True)
        x = F.max_pool2d(x + self.second(x), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Mixed(nn.Module):
    """Autocast, a region without gradients, detached and unused results, a frozen weight, a dropout mask."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.b.requires_grad_(False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.tanh(self.b(self.a(x)))
            z = F.dropout(y, 0.3) * y
        with torch.no_grad():
            scale = torch.exp(self.a(x)).mean()
        torch.exp(self.a(x))  # nobody reads it, and nobody keeps it
        return self.c(z.float()).sin().sum() * scale + torch.exp(y.detach()).sum()


class LossOnly(nn.Module):
    """A model without the outputs beside its loss, which a pipeline drops in training."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return (self.model(*args, **kwargs).loss,)
