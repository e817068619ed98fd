"""A small decoder as an inference server writes it: attention is an op of its own that fills a buffer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 16


@torch.library.custom_op("splitkit_consumers::update_cache", mutates_args={"cache"})
def update_cache(k: Tensor, cache: Tensor) -> Tensor:
    """Write keys; the result only says that it was done, as in vLLM."""
    cache[: k.shape[0]].copy_(k)
    return k.new_empty(0)


@update_cache.register_fake
def _(k, cache):
    return k.new_empty(0)


@torch.library.custom_op("splitkit_consumers::attention", mutates_args={"out"})
def attention(q: Tensor, cache: Tensor, out: Tensor, done: Tensor) -> None:
    """Fill ``out``."""
    keys = cache[: q.shape[0]]
    out.copy_(torch.softmax(q @ keys.mT, -1) @ keys)


@attention.register_fake
def _(q, cache, out, done):
    return None


OPS = ["splitkit_consumers::update_cache", "splitkit_consumers::attention"]


class Layer(nn.Module):
    """rms norm, qkv, attention, projection, mlp."""

    def __init__(self):
        super().__init__()
        self.qk, self.out, self.up = (nn.Linear(WIDTH, n * WIDTH) for n in (2, 1, 2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(64, WIDTH))

    def forward(self, x):
        size = x.size()
        q, k = self.qk(nn.functional.rms_norm(x, (WIDTH,))).chunk(2, -1)
        attended = torch.empty_like(q)
        done = torch.ops.splitkit_consumers.update_cache(k, self.cache)
        torch.ops.splitkit_consumers.attention(q, self.cache, attended, done)
        x = x + self.out(attended.view(size))
        return x + self.down(self.up(x).relu())


class Decoder(nn.Module):
    """Tokens of a batch in one dimension, as many as there are."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def captured(depth, tokens=7):
    """(graph of Dynamo with a symbolic number of tokens, its inputs, the model, its input)"""
    model, x = Decoder(depth).eval(), torch.randn(tokens, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    caught = []

    def backend(gm, example):
        caught.append((gm, list(example)))
        return gm

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(x)
    ((gm, example),) = caught
    return gm, example, model, x
