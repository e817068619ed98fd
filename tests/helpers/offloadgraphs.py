"""Small training steps and every way to keep, offload or recompute their values: the oracle of offload."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
from choices import Prices
from jointgraphs import Hand

from splitkit.costs.links import HostLink
from splitkit.hardware.link_specs import Link
from splitkit.search.recompute.plan_pool import Pool
from splitkit.training.choices import savings
from splitkit.training.offload_timeline import OffloadModel
from splitkit.training.peaks import Peaks

LINK = HostLink(Link(1024.0, 0.25), Link(2048.0, 0.125))
"""A KiB in a second to the host, in half a second back."""


def chained(seed, late=0.25):
    """A chain of forward with skips and views, and a backward that reads what forward made; and prices.

    ``late``: how often a node of backward reads one that forward could compute, too.
    """
    random = np.random.default_rng(seed)
    h, count, prices = Hand().inputs(x=1).gradients(g=1), int(random.integers(3, 6)), {}
    names = ["x"]
    for i in range(count):
        reads = {names[-1], *(names[int(random.integers(len(names)))] for _ in range(int(random.integers(0, 2))))}
        h.op(f"v{i}", int(random.integers(1, 7)), *sorted(reads))
        prices[f"v{i}"] = float(random.integers(1, 8))
        names.append(f"v{i}")
        if random.random() < 0.2:
            h.view(f"w{i}", names[-1])
            names.append(f"w{i}")
    h.op("loss", 1, names[-1])
    before = "g"
    for i in reversed(range(count)):
        reads = [n for n in (f"v{i}", f"v{i - 1}", f"w{i}") if n in h.nodes and random.random() < 0.7]
        if random.random() < late:
            h.back(f"late{i}", int(random.integers(1, 4)), names[int(random.integers(1, len(names)))])
            prices[f"late{i}"] = float(random.integers(1, 4))
            reads.append(f"late{i}")
        h.back(f"b{i}", int(random.integers(1, 3)), before, *reads)
        prices[f"b{i}"] = float(random.integers(1, 8))
        before = f"b{i}"
    return h.flow("loss", before), Prices(**prices)


class EveryWay:
    """All choices of a step, each with all sets of values that it may offload."""

    def __init__(self, flow, costs, link=LINK):
        self.problem, self.peaks = savings(flow, costs), Peaks(flow)
        self.pool = Pool(self.problem, self.peaks)
        self.model = OffloadModel(self.problem, self.peaks, costs, link)
        free = np.flatnonzero(~self.problem.fixed)
        self.runs = {}
        for some in subsets(free.tolist()):
            mask = np.zeros(len(self.problem.ops), np.bool_)
            mask[list(some)] = True
            choice = self.problem.choose(mask)
            self.runs[choice.runs.tobytes()] = choice.runs
        self.timelines = []
        for runs in self.runs.values():
            seen, trace = self.pool.trace(runs)
            self.timelines.append((seen, self.model.timeline(seen.choice, trace)))

    @staticmethod
    def of_plan(flow, costs, link):
        """The timeline of saving everything."""
        problem, peaks = savings(flow, costs), Peaks(flow)
        seen, trace = Pool(problem, peaks).trace(np.zeros(len(problem.ops), np.bool_))
        return OffloadModel(problem, peaks, costs, HostLink.of(link)).timeline(seen.choice, trace)

    def least(self, budget, host=float("inf"), recompute=True):
        """The least seconds of recompute and waiting within a budget; infinite if nothing fits."""
        best = float("inf")
        for seen, timeline in self.timelines:
            if seen.seconds and not recompute:
                continue
            for items in subsets(list(timeline.values)):
                if sum(int(timeline.trace.nbytes[i]) for i in items) > host or seen.seconds >= best:
                    continue
                transfers = timeline.transfers(items, budget)
                if transfers is not None:
                    run = timeline.run(transfers)
                    assert run.peak <= budget
                    best = min(best, seen.seconds + run.exposed)
        return best

    def budgets(self, count):
        """Budgets from the peak of saving everything down to the lowest that offload reaches."""
        high = max(seen.peak for seen, _ in self.timelines)
        low = min(
            int((timeline.trace.timeline - timeline.absent(list(timeline.values))).max())
            for _, timeline in self.timelines
        )
        return [low + (high - low) * i // count for i in range(count + 1)]


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))
