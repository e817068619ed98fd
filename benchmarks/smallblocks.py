"""Training steps small enough for exact models: blocks of transformers and of convolutional nets, a net of gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from splitkit.testing import models

SMALL = {"layers": 1, "width": 64, "heads": 4, "batch": 4, "seq": 32, "vocab": 101}


class Perceptron(nn.Module):
    """Linear layers, a norm and a skip."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        y = nn.functional.gelu(self.up(self.norm(x)))
        return (x + self.down(y)).tanh().square().mean()


class Attention(nn.Module):
    """Attention spelled out: products, a softmax."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(1, 2) * 0.2).tanh().softmax(-1)
        return (x + self.out(scores @ v)).square().mean()


class Residual(nn.Module):
    """Two convolutions with group norms and a skip, at two resolutions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(2, width) for _ in range(2))
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        y = self.norms[0](self.first(x)).relu()
        y = (self.norms[1](self.second(y)) + x).relu()
        return self.shrink(y).sigmoid().square().mean()


class Valley(nn.Module):
    """Down and up again with a connection across: a U-Net of one level."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        y = nn.functional.silu(self.down(x))
        low = nn.functional.silu(self.low(nn.functional.avg_pool2d(y, 2)))
        high = nn.functional.interpolate(low, scale_factor=2)
        return nn.functional.silu(self.up(torch.cat([y, high], 1))).square().mean()


class Gates(nn.Module):
    """An LSTM spelled out, a few steps of it."""

    def __init__(self, width: int = 16, steps: int = 2) -> None:
        super().__init__()
        self.cell, self.steps = nn.Linear(2 * width, 4 * width), steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        h = c = torch.zeros_like(x)
        for _ in range(self.steps):
            i, f, g, o = self.cell(torch.cat([x, h], 1)).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h.square().mean()


def _layer(name: str, kind: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """One layer of a model of ``transformers``, and a batch for it."""
    made = models.build(name, **SMALL)
    layer = next(m for m in made.model.modules() if type(m).__name__ == kind)
    hidden = torch.randn(4, 32, 64, requires_grad=True)
    turns = tuple(torch.randn(1, 32, 16) for _ in range(2))
    return layer, (hidden, turns) if name == "llama" else (hidden,)


class Layer(nn.Module):
    """A layer, its output averaged to a loss."""

    def __init__(self, name: str, kind: str) -> None:
        super().__init__()
        self.layer, self.inputs = _layer(name, kind)
        self.turned = name == "llama"

    def forward(self, x: torch.Tensor, *turns: torch.Tensor) -> torch.Tensor:
        """One number."""
        made = self.layer(x, position_embeddings=turns) if self.turned else self.layer(x)
        return (made if isinstance(made, torch.Tensor) else made[0]).square().mean()


def _of_layer(name: str, kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    made = Layer(name, kind)
    x, *turns = made.inputs
    return made, (x, *(turns[0] if turns else ()))


def _image(net: nn.Module) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return net, (torch.randn(4, 8, 16, 16, requires_grad=True),)


BLOCKS: dict[str, Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]]] = {
    "mlp": lambda: (Perceptron(), (torch.randn(64, 32, requires_grad=True),)),
    "attention": lambda: (Attention(), (torch.randn(4, 32, 32, requires_grad=True),)),
    "resnet block": lambda: _image(Residual()),
    "unet block": lambda: _image(Valley()),
    "lstm, 2 steps": lambda: (Gates(), (torch.randn(32, 16, requires_grad=True),)),
    "lstm, 3 steps": lambda: (Gates(steps=3), (torch.randn(32, 16, requires_grad=True),)),
    "gpt2 layer": lambda: _of_layer("gpt2", "GPT2Block"),
    "llama layer": lambda: _of_layer("llama", "LlamaDecoderLayer"),
}
