"""Small nets of kinds that the ``transformers`` examples lack: convolutions, long skips, recurrence and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from splitkit.frontends.joint_capture import sum_of_outputs
from splitkit.graph.losses import loss_of
from splitkit.testing.models import Example


class Bottleneck(nn.Module):
    """A residual block: 1x1, 3x3 and 1x1 convolutions, each normalised."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.skip = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, c, h, w]`` to ``[n, 4 * width, h / stride, w / stride]``."""
        return F.relu(self.body(x) + self.skip(x), inplace=True)


class ResNet(nn.Module):
    """A residual net of three stages (He et al., "Deep residual learning", 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.stages = nn.Sequential(
            Bottleneck(width, width, 1), Bottleneck(4 * width, width, 1),
            Bottleneck(4 * width, 2 * width, 2), Bottleneck(8 * width, 4 * width, 2),
        )  # fmt: skip
        self.head = nn.Linear(16 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, 3, h, w]`` -> ``[n, 10]``."""
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        logits: Tensor = self.head(self.stages(x).mean((2, 3)))
        return logits


class UNet(nn.Module):
    """A U-Net: down, up, and a long skip at each level (Ronneberger et al., 2015)."""

    def __init__(self, width: int = 16, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.start = _twice(3, width)
        self.down = nn.ModuleList(_twice(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(_twice(2 * a, a) for a in widths[:-1])
        self.end = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[n, 3, h, w]`` -> ``[n, 2, h, w]``."""
        skips = [self.start(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, join in zip(reversed(self.up), reversed(self.join), strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        maps: Tensor = self.end(x)
        return maps


def _twice(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU(),
    )  # fmt: skip


class Recurrent(nn.Module):
    """An embedding, two layers of LSTM, and a head that is tied to the embedding."""

    def __init__(self, words: int = 500, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.dropout = nn.Dropout(0.1)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """``[n, length]`` -> ``[n, length, words]``."""
        scores: Tensor = self.head(self.lstm(self.dropout(self.embedding(ids)))[0])
        return scores


class Writing(nn.Module):
    """A net with in-place writes to a view and to a buffer, tied weights, dropout, and an unread piece of a split."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.third.weight = self.first.weight
        self.count: Tensor
        self.register_buffer("count", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """``[n, width]`` -> ``[n, 1]``."""
        y = F.dropout(self.first(x), 0.2, self.training).relu_()
        self.count.add_(y.detach().mean(0))
        a, b, _ = y.tensor_split(3, 1)
        z = self.second(y * 2).clone()
        z[:, : a.shape[1]].mul_(a)
        z[:, -b.shape[1] :].add_(b)
        last: Tensor = self.third(F.dropout(z, 0.2, self.training))
        return last.sum(1, keepdim=True)


def loss_or_sum(output: Any) -> Tensor:
    """Return the loss in an output, else the sum of the output: ``capture_joint(net, *inputs, loss=loss_or_sum)``."""
    own, total = loss_of(output), sum_of_outputs(output)
    if own is not None:
        return own
    return torch.zeros(()) if total is None else total


def _image(net: Callable[[], nn.Module], size: int) -> Example:
    return Example(net(), (torch.randn(2, 3, size, size),), {})


NETS: Mapping[str, Callable[[], Example]] = MappingProxyType(
    {
        "resnet": lambda: _image(ResNet, 64),
        "unet": lambda: _image(UNet, 32),
        "lstm": lambda: Example(Recurrent(), (torch.randint(0, 500, (4, 12)),), {}),
        "writing": lambda: Example(Writing(), (torch.randn(16, 64),), {}),
    }
)
"""Name -> function that makes a net in training mode, with inputs; weights and inputs come from torch's RNG."""
