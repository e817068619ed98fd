"""A small decoder with what exports meet: a rotary table, tied weights, two lists, a block that runs twice."""

from __future__ import annotations

import torch
from torch import nn

import splitkit as sk
from splitkit.graph.dataflow import analyze
from splitkit.policies import Expert

WIDTH, VOCAB = 8, 12


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up = nn.Linear(WIDTH, wide)
        self.down = nn.Linear(wide, WIDTH)

    def forward(self, x, table):
        return x + self.down(torch.relu(self.up(x * table)))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 1.0, WIDTH), persistent=False)

    def forward(self, count):
        return torch.outer(torch.arange(count, dtype=torch.float32), self.angles).cos()


class Decoder(nn.Module):
    """``tok_embeddings``, ``layers``, ``norm`` and ``lm_head``, as torchtitan names them."""

    def __init__(self, layers=4, tied=False):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        self.rotary = Rotary()
        self.layers = nn.ModuleList([Block(4 * (i + 1)) for i in range(layers)])
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, ids):
        x, table = self.tok_embeddings(ids), self.rotary(ids.shape[1])
        for layer in self.layers:
            x = layer(x, table)
        return self.lm_head(self.norm(x))


class Wrapped(nn.Module):
    """The same under the names of transformers, and a head of its own."""

    def __init__(self, layers=4):
        super().__init__()
        self.model = nn.Module()
        inner = Decoder(layers)
        self.model.embed_tokens, self.model.rotary_emb = inner.tok_embeddings, inner.rotary
        self.model.layers, self.model.norm = inner.layers, inner.norm
        self.lm_head = inner.lm_head

    def forward(self, ids):
        x, table = self.model.embed_tokens(ids), self.model.rotary_emb(ids.shape[1])
        for layer in self.model.layers:
            x = layer(x, table)
        return self.lm_head(self.model.norm(x))


class TwoLists(nn.Module):
    """An encoder and a decoder that reads its result in each block."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([Block(16) for _ in range(3)])
        self.decoder = nn.ModuleList([Block(16) for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        table = torch.ones(WIDTH)
        seen = x
        for layer in self.encoder:
            seen = layer(seen, table)
        for layer in self.decoder:
            x = layer(x + seen, table)
        return self.head(x)


class Twice(nn.Module):
    """A block that runs before and after the others."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = self.shared(x)
        for layer in self.layers:
            x = layer(x)
        return self.shared(x)


def captured(model, *inputs):
    """The graph and its facts."""
    gm = sk.capture(model, *inputs)
    return gm, analyze(gm)


def ids(batch=2, count=5):
    return torch.arange(batch * count).reshape(batch, count) % VOCAB


def stages(gm, *starts, **others):
    """A plan with stages that begin at these modules."""
    return sk.plan(gm, Expert(list(starts)), **others)


def homes(plan, nodes):
    return {node.name: plan.home(node) for node in nodes}
