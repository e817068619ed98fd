"""Make small graphs that are hard to split, captured in every way that torch offers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

# Small models for `zoo`, each with something that makes splitting hard.


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., width) -> the same."""
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class TiedLanguageModel(nn.Module):
    """A model whose embedding and head are one parameter, with a long skip, a tuple op and a buffer."""

    bias: Tensor

    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(width) * 1.3)
        self.register_buffer("bias", torch.randn(width))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Shape (batch, time) -> logits and a half of the last state."""
        x = self.embedding(ids)
        skip = x * self.scale
        for block in self.blocks:
            x = block(x)
        x = x + skip + self.bias
        left, right = x.chunk(2, -1)
        y = torch.cat([left * right, left + right], -1) * self.scale
        return F.linear(y, self.embedding.weight), left


class Mutating(nn.Module):
    """A model with BatchNorm statistics, a counter buffer, in-place ops, and a write through a view."""

    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("counter", torch.zeros(8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Shape (8, 8) -> the same, and a scalar."""
        y = self.linear(x)
        z = y.relu()
        doubled = y * 2.0
        doubled.add_(z)
        normed = self.norm(doubled)
        base = doubled + 1.0
        view = base.view(4, 16)
        view.select(0, 0).fill_(1.0)
        self.counter.add_(y.detach().mean(0))
        count = self.counter * 2.0
        return normed + doubled + count, view.sum() + base.mean()


class Skips(nn.Module):
    """A U-shaped model: early values are read several parts later."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 8) -> the same."""
        skips = []
        for layer in self.down:
            x = layer(x).tanh()
            skips.append(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = layer(x + skip).sigmoid()
        return x


class ManyOutputs(nn.Module):
    """A model with ops that return tuples, nested unpacking, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Shape (batch, time, 6)."""
        y, (h, c) = self.rnn(x)
        a, b, d = y.split(2, -1)
        values, indices = (a + b * d).topk(2, -1)
        mean, largest = values.mean(), values.max(-1)
        return {"state": [h, c], "top": (values * 2, indices), "both": largest.values + mean}


class Dropouts(nn.Module):
    """Two independent towers with dropout: running them in another order changes the results."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 8) -> the same."""
        a = F.dropout(self.left(x), 0.3, self.training)
        b = F.dropout(self.right(x), 0.3, self.training)
        return torch.rand_like(a).mul(a) + b.sin()


class Regions(nn.Module):
    """A model with ``no_grad`` and autocast blocks, which export turns into higher-order ops."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, 8) -> the same."""
        x = self.a(x)
        with torch.no_grad():
            frozen = self.b(x).cos()
        with torch.autocast("cpu", torch.bfloat16):
            y = self.b(x) + self.a(x).relu()
        mixed: Tensor = y.float() * frozen + x
        return mixed


class Dynamic(nn.Module):
    """A model whose ops compute with the batch size, which is a symbol."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, time, 4) -> (batch, 4)."""
        rows = x.shape[0] * x.shape[1]
        y = self.a(x).reshape(rows, 4).relu()
        z: Tensor = torch.arange(rows, device=x.device).unsqueeze(1) * y / rows
        return z.view(x.shape[0], x.shape[1], 4).sum(1)


class Cache(nn.Module):
    """A key-value cache that is written by index and read as a whole, without a data edge between the two."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(6, 4))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """Shapes (n, 4) and (n,) -> (n, 6)."""
        with torch.no_grad():
            self.keys.index_copy_(0, position, self.project(x))
        turned = self.keys.t()  # computed while tracing: a second attribute of the graph with the buffer's memory
        return F.linear(x, self.keys).sin() + x @ turned


@dataclass(frozen=True)
class Specimen:
    """A graph with inputs to run it on.

    Attributes:
        name: what the graph tests and how it was captured.
        graph: the graph; every call of `zoo` makes a new one.
        inputs: positional inputs.
        other_inputs: inputs of another size, for graphs with symbolic sizes.
        tolerance: relative tolerance of gradients; parts that start inside an autocast region may round weights again.
    """

    name: str
    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    other_inputs: tuple[Any, ...] | None = None
    tolerance: float = 1e-4


def zoo() -> Iterator[Specimen]:
    """Yield every specimen, newly made, with weights and inputs from a fixed seed."""
    for make in _SPECIMENS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield make()


def _exported(model: nn.Module, *inputs: Any, dynamic_shapes: Any = None) -> fx.GraphModule:
    """Return the plain export of a model: guards are off, and regions stay higher-order ops."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a harmless warning about the flat weights of LSTM
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    return program.module(check_guards=False)


def _make_fx(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *xs: model(*xs), pre_dispatch=True)(*inputs)


def _dynamo(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    """Return the graph that a Dynamo backend receives, in which parameters are placeholders."""
    caught: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        caught.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend)(*inputs)
    return caught[0]


def _dynamo_specimen() -> Specimen:
    model = Regions()
    gm = _dynamo(model, torch.randn(3, 8))
    values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    return Specimen("dynamo backend", gm, tuple(torch.randn(v.shape).requires_grad_() for v in values), tolerance=1e-2)


def _dynamic_specimen() -> Specimen:
    x, other = torch.randn(2, 3, 4), torch.randn(5, 3, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    return Specimen("dynamic batch", _exported(Dynamic(), x, dynamic_shapes=({0: batch},)), (x,), (other,))


def _ids() -> Tensor:
    return torch.randint(0, 16, (2, 5))


_SPECIMENS: tuple[Callable[[], Specimen], ...] = (
    lambda: Specimen("tied language model", fx.symbolic_trace(TiedLanguageModel()), (_ids(),)),
    lambda: Specimen("tied language model, exported", _exported(TiedLanguageModel(), _ids()), (_ids(),)),
    lambda: Specimen("mutation", fx.symbolic_trace(Mutating()), (torch.randn(8, 8),)),
    lambda: Specimen("mutation, exported", _exported(Mutating(), torch.randn(8, 8)), (torch.randn(8, 8),)),
    lambda: Specimen("skips", fx.symbolic_trace(Skips()), (torch.randn(4, 8, requires_grad=True),)),
    lambda: Specimen("many outputs", fx.symbolic_trace(ManyOutputs()), (torch.randn(2, 3, 6),)),
    lambda: Specimen("many outputs, exported", _exported(ManyOutputs(), torch.randn(2, 3, 6)), (torch.randn(2, 3, 6),)),
    lambda: Specimen("dropout", fx.symbolic_trace(Dropouts()), (torch.randn(4, 8),)),
    lambda: Specimen("dropout, exported", _exported(Dropouts(), torch.randn(4, 8)), (torch.randn(4, 8),)),
    lambda: Specimen("higher-order regions", _exported(Regions(), torch.randn(3, 8)), (torch.randn(3, 8),), None, 1e-2),
    _dynamo_specimen,
    _dynamic_specimen,
    lambda: Specimen("make_fx", _make_fx(Mutating(), torch.randn(8, 8)), (torch.randn(8, 8),)),
    lambda: Specimen("key-value cache", fx.symbolic_trace(Cache()), (torch.randn(2, 4), torch.tensor([1, 4]))),
)
