"""A model that runs over a set, in an order that a test chooses: as hash seeds of processes choose it."""

from __future__ import annotations

import torch
from torch import nn

SIZE = 8


class OverASet(nn.Module):
    """Rotary tables of two kinds, each with constants of its own, for layers of either kind.

    Args:
        kinds: ``"full"`` and ``"sliding"``, in the order in which the set gives them.
        op: what each layer ends with.
    """

    def __init__(self, kinds: tuple[str, ...], op=torch.relu) -> None:
        super().__init__()
        self.kinds, self.op = kinds, op
        self.layers = nn.ModuleDict(
            {f"{kind}{i}": nn.Linear(SIZE, SIZE) for i in (0, 1) for kind in ("full", "sliding")}
        )
        for kind, base in (("full", 10.0), ("sliding", 3.0)):
            self.register_buffer(kind, base ** -torch.arange(SIZE).float())

    def table(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            shift = torch.tensor([0.5, 1.0 if kind == "full" else 2.0]).sum()
            return torch.cos(torch.arange(x.shape[0])[:, None] * getattr(self, kind) + shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = {kind: self.table(kind, x) for kind in self.kinds}
        for name, layer in self.layers.items():
            x = self.op(layer(x) * tables[name[:-1]])
        return x.square().mean()


ORDERS = ("full", "sliding"), ("sliding", "full")


def model(order: int, op=torch.relu) -> OverASet:
    """The same weights in each order."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return OverASet(ORDERS[order], op)


def inputs(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * SIZE).reshape(rows, SIZE)
