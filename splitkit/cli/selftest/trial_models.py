"""Models that ``splitkit doctor --device`` tries: small ones for numbers, larger ones for figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from splitkit.runtime.devices.accelerators import move_tensors
from splitkit.testing import models
from splitkit.testing.models import Example

_SMALL = {"layers": 4, "width": 64, "heads": 4, "batch": 2, "vocab": 256, "seq": 16}
_LARGE = {"layers": 6, "width": 1024, "heads": 16, "batch": 8, "vocab": 8000, "seq": 512}
_MIDDLE = {"layers": 4, "width": 256, "heads": 4, "batch": 4, "vocab": 2000, "seq": 128}


class ConvNet(nn.Module):
    """Residual blocks of convolutions with batch norm, whose statistics each step of training writes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(nn.functional.dropout(x.mean((2, 3)), 0.1, self.training))
        return out.square().mean()


class InAutocast(nn.Module):
    """A model whose forward runs under autocast."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        with torch.autocast(self.kind, torch.bfloat16):
            return self.model(*args, **kwargs)


def small(name: str, device: torch.device, precision: str = "float32") -> Example:
    """Return a small model in training mode and its inputs, on a device.

    Args:
        name: ``"conv net"`` or an example of `splitkit.testing.models`.
        device: the device.
        precision: ``"float32"``, ``"float16"`` for the weights, or ``"bfloat16"`` for autocast.
    """
    model: nn.Module
    if name == "conv net":
        torch.manual_seed(0)
        model, kwargs = ConvNet(), {"image": torch.randn(2, 3, 16, 16)}
    else:
        made = models.build(name, **_SMALL)
        model, kwargs = made.model, dict(made.kwargs)
    model = _moved(model.train(), device)
    if precision == "float16":
        model, kwargs = model.half(), {k: t.half() if t.is_floating_point() else t for k, t in kwargs.items()}
    if precision == "bfloat16":
        model = InAutocast(model, device.type)
    return Example(model, (), {name: t.to(device) for name, t in kwargs.items()})


def large(device: torch.device) -> Example:
    """Return a GPT-2 on a device: large enough for a GPU to be busy, smaller where the CPU runs it."""
    made = models.build("gpt2", **(_LARGE if device.type == "cuda" else _MIDDLE))
    model = _moved(made.model.eval(), device)
    return Example(model, (), {name: t.to(device) for name, t in made.kwargs.items()})


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device; its ``to`` would break ties on devices of other vendors than NVIDIA."""
    move_tensors(model, nn.Module(), {id(tensor): device for tensor in (*model.parameters(), *model.buffers())})
    return model


@contextmanager
def exact_products() -> Iterator[None]:
    """Let products of float32 be computed in float32: TF32 rounds them to 10 bits."""
    flags = torch.backends.cudnn
    kept = {"enabled": flags.enabled, "benchmark": flags.benchmark, "deterministic": flags.deterministic}
    with flags.flags(**kept, allow_tf32=False):
        yield
