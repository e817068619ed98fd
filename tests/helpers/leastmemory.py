"""Small models, every way to put them into stages, and the least memory that one of these takes."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import nn

import splitkit as sk
from splitkit.pipeline.stage_prices import StagePrices

KINDS = ("chain", "tower", "branches", "tied", "relus")
SCHEDULES = (None, "1f1b", "gpipe")


class Net(nn.Module):
    """Layers of unlike sizes: one after the other, in two towers, in branches, with the first tied to the last."""

    def __init__(self, kind, width):
        super().__init__()
        w = width
        self.kind = kind
        sizes = {
            "chain": [w, 4 * w, w, 8 * w, w, 2 * w, w],
            "tower": [w, 4 * w, w, 2 * w],
            "branches": [w, 2 * w, 4 * w, w],
            "tied": [w, 4 * w, 2 * w, w],
            "relus": [w, 3 * w, w, 6 * w, w],
        }[kind]
        self.a = nn.ModuleList(nn.Linear(x, y) for x, y in pairwise(sizes))
        if kind in ("tower", "branches"):
            self.b = nn.ModuleList(nn.Linear(x, y) for x, y in pairwise(sizes))
        if kind == "tied":
            self.first = nn.Linear(w, w, bias=False)

    def forward(self, x):
        if self.kind == "tied":
            x = self.first(x)
        y = x = torch.sin(x) if self.kind == "branches" else x
        for layer in self.a:
            x = torch.relu(layer(x)) if self.kind == "relus" else layer(x)
        if self.kind == "tied":
            return nn.functional.linear(x, self.first.weight).sum()
        if self.kind in ("chain", "relus"):
            return x
        for layer in self.b:
            y = layer(y)
        return (x * y).sum()


def cases(widths=(8, 32), batches=(4, 64)):
    """Kind, width, batch, stages, schedule: all of them."""
    return [
        (kind, width, batch, count, schedule)
        for kind in KINDS
        for width, batch in zip(widths, batches, strict=True)
        for count in (2, 3)
        for schedule in SCHEDULES
    ]


@cache
def captured(kind, width, batch):
    """The graph of a model, and what its nodes cost."""
    torch.manual_seed(0)
    gm = sk.capture(Net(kind, width), torch.randn(batch, width))
    return gm, sk.costs.roofline(gm, "h100")


def every_plan(flow, count):
    """All plans of so many stages, none empty, no value going back: by the stage of each node."""
    nodes = list(flow.nodes)
    at = {node: i for i, node in enumerate(nodes)}
    before = [[at[p] for p in (*flow.inputs(n), *flow.after.get(n, ())) if p in at] for n in nodes]

    def further(stages):
        if len(stages) == len(nodes):
            if len(set(stages)) == count:
                yield stages
            return
        for stage in range(max((stages[p] for p in before[len(stages)]), default=0), count):
            yield from further([*stages, stage])

    return further([])


def peaks_of(prices, parts, schedule, microbatches):
    """Bytes of each rank at its peak; without a schedule of one microbatch, forward and backward."""
    stages = prices.of(parts)
    if schedule is None:
        return [stage.fixed_bytes + stage.saved_bytes + stage.temporary_bytes for stage in stages]
    return sk.simulate_schedule(stages, schedule, microbatches).peaks


def least_memory(gm, costs, count, schedule):
    """The least bytes for each rank with which some plan fits, and how many plans there are."""
    flow = sk.analyze(gm)
    prices = StagePrices(flow, sk.costs.training(costs, gm))
    least, plans = None, 0
    for stages in every_plan(flow, count):
        parts = [[n for n, s in zip(flow.nodes, stages, strict=True) if s == part] for part in range(count)]
        peak = max(peaks_of(prices, parts, schedule, 2 * count))
        least, plans = peak if least is None else min(least, peak), plans + 1
    return least, plans
