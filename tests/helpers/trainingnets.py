"""Random small nets with a loss: products, norms, gates, skips, tied weights, members of tuples, constants."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

import splitkit as sk

POINTWISE = (torch.tanh, F.gelu, torch.relu, torch.sin, torch.exp, F.leaky_relu, F.silu)
KINDS = ("mm", "mm", "act", "act", "cat", "skip", "norm", "gate", "chunk", "drop", "mask", "tied", "max", "mlp")


class RandomNet(nn.Module):
    """Some steps; each reads the last value, or with a chance of three tenths an earlier one."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.dice, self.weights, shared = random.Random(seed), nn.ParameterList(), {}
        width = self.dice.choice([5, 8, 15, 32])
        self.x = torch.randn(self.dice.choice([4, 16, 64]), width, requires_grad=self.dice.random() < 0.3)
        self.steps, widths = [], [width]
        for _ in range(self.dice.randint(2, 5)):
            kind, last = self.dice.choice(KINDS), len(widths) - 1
            read = last if self.dice.random() < 0.7 else self.dice.randrange(len(widths))
            width, own, act = widths[read], [], self.dice.choice(POINTWISE)
            other = self.dice.choice([i for i, w in enumerate(widths) if w == width or kind == "cat"])
            out = width + widths[other] if kind == "cat" else width
            if kind == "mm":
                out = self.dice.choice([4, 9, 16, 33])
                own = [self.weight(width, out)]
            elif kind == "mlp":
                own = [self.weight(width, 24), self.weight(24, width)]
            elif kind == "norm":
                own = [self.weight(width)]
            elif kind == "tied":
                own = [shared.setdefault(width, len(self.weights))]
                if own == [len(self.weights)]:
                    self.weight(width, width)
            self.steps.append((kind, read, other, act, own))
            widths.append(width // 2 if kind == "chunk" and width % 2 == 0 else out)
        self.steps.append(("mm", len(widths) - 1, 0, torch.tanh, [self.weight(widths[-1], 6)]))
        self.mean = self.dice.random() < 0.3

    def weight(self, *shape):
        self.weights.append(nn.Parameter(torch.randn(shape) * 0.2))
        return len(self.weights) - 1

    def forward(self, x):
        values = [x]
        for kind, read, other, act, own in self.steps:
            values.append(self.step(kind, values[read], values[other], act, [self.weights[i] for i in own]))
        return values[-1].pow(2).mean() if self.mean else values[-1].sum()

    def step(self, kind, h, other, act, own):
        if kind in ("mm", "tied"):
            return h @ own[0]
        if kind == "mlp":
            return h + act(h @ own[0]) @ own[1]
        if kind == "cat":
            return torch.cat([h.softmax(-1), act(other)], 1)
        if kind == "skip":
            return h + other
        if kind == "gate":
            return torch.sigmoid(h) * other
        if kind == "norm":
            return F.layer_norm(h, h.shape[-1:], own[0])
        if kind == "drop":
            return F.dropout(h, 0.3, True)
        if kind == "mask":
            return h.masked_fill(torch.ones_like(h).triu(1).bool(), 0.5)
        if kind == "max":
            return h - h.max(1, keepdim=True)[0]
        if kind == "chunk" and h.shape[1] % 2 == 0:
            first, second = h.chunk(2, -1)
            return first * F.silu(second)
        return act(h)


def random_training_graph(seed):
    """Return the joint graph of a random net, and its prices on an H100."""
    net = RandomNet(seed)
    joint = sk.capture_joint(net, net.x)
    return joint, sk.costs.roofline(joint.graph_module, "h100")
