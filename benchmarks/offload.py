"""Offload: recompute alone, offload alone and both, at the same peaks, as times of a step: ``--json`` for machines.

For each model and link, budgets go from the peak of saving everything (100 %) to the lowest that recompute alone was
found to reach (0 %), and below. ``recompute`` is `Budget`; ``offload`` moves the largest values first until the peak is
kept, as torchtitan's memory policy does, and recomputes nothing; ``both`` is `Budget` with ``offload=``. All are judged
by one timeline with one copy engine in each direction, at the roofline of an H100. The gap is of the step: how much
shorter any plan in graph order could be at most. The run fails if ``both`` is above one of the others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.costs.links import HostLink
from splitkit.errors import NoPlanError
from splitkit.policies import Budget
from splitkit.search.recompute.plan_pool import Pool
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.testing import models
from splitkit.training.choices import savings
from splitkit.training.offload_timeline import OffloadModel, OffloadRun, OffloadTimeline
from splitkit.training.peaks import Peaks, eager_plan

LINKS = {"pcie5": 50e9, "nvlink-c2c": 350e9}
"""Bytes per second: PCIe 5 with 16 lanes as torch assumes it, and a GB200's own link as torchtitan measured it."""
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0, -0.1, -0.2)


def largest_first(timeline: OffloadTimeline, budget: int) -> OffloadRun | None:
    """Return the run that offloads the largest values until the budget is kept, and nothing else is decided."""
    order = sorted(timeline.values, key=lambda item: (-int(timeline.trace.nbytes[item]), item))
    count = next((few for few in range(len(order) + 1) if timeline.fits(order[:few], budget)), None)
    transfers = None if count is None else timeline.transfers(order[:count], budget)
    return None if transfers is None else timeline.run(transfers)


class Step:
    """A model's joint graph at the roofline of an H100."""

    def __init__(self, name: str, layers: int, batch: int, seq: int) -> None:
        torch.manual_seed(0)
        example = models.build(name, layers=layers, batch=batch, seq=seq)
        for module in example.model.modules():
            module.training = False
        self.name = name
        self.joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
        self.costs = sk.costs.roofline(self.joint.graph_module, "h100")
        self.problem, self.peaks = savings(self.joint.flow, self.costs), Peaks(self.joint.flow)
        self.pool = Pool(self.problem, self.peaks)
        self.whole = self.pool.see_plan(eager_plan(self.joint.flow))
        self.lowest = RecomputeSearch(self.pool).low_peak().peak
        self.seconds = sum(self.costs.seconds(node) for node in self.joint.flow.nodes)

    def recompute(self, budget: int) -> float | None:
        """Seconds of recompute, if nothing is offloaded."""
        try:
            plan = Budget(budget).assign(self.joint.flow, self.costs)
        except NoPlanError:
            return None
        return self.pool.see_plan(plan).seconds

    def offload(self, budget: int, link: float) -> float | None:
        """Seconds of waiting, if nothing is recomputed and the largest values move first."""
        seen, trace = self.pool.trace(self.whole.runs)
        model = OffloadModel(self.problem, self.peaks, self.costs, HostLink.of(link))
        run = largest_first(model.timeline(seen.choice, trace), budget)
        return None if run is None else run.exposed

    def row(self, share: float, link: str, alone: dict[int, float | None]) -> dict[str, Any]:
        """One row."""
        budget = self.lowest + int(share * (self.whole.peak - self.lowest))
        if budget not in alone:
            alone[budget] = self.recompute(budget)
        row: dict[str, Any] = {"model": self.name, "link": link, "share": share, "budget": budget, "step": self.seconds}
        row |= {"recompute": alone[budget], "offload": self.offload(budget, LINKS[link])}
        start = time.perf_counter()
        try:
            plan = Budget(budget, offload=LINKS[link]).assign(self.joint.flow, self.costs)
        except NoPlanError:
            return row | {"both": None, "bound": None, "planning": time.perf_counter() - start}
        claim = plan.claim
        assert claim is not None
        for other in (row["recompute"], row["offload"]):
            assert other is None or claim.value <= other * (1 + 1e-9), row
        return row | {
            "both": claim.value, "bound": claim.bound, "planning": time.perf_counter() - start, "note": plan.note,
        }  # fmt: skip


def rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All rows."""
    for name in args.models:
        step = Step(name, args.layers, args.batch, args.seq)
        alone: dict[int, float | None] = {}
        for link in args.links:
            for share in args.shares:
                yield step.row(share, link, alone)


def _times(row: dict[str, Any], name: str) -> str:
    return "no plan" if row[name] is None else f"{1 + row[name] / row['step']:.4f}"


def main() -> None:
    """Print a table, or a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["gpt2", "llama"])
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    titles = ("model", "link", "budget", "peak, MiB", "recompute", "offload", "both", "gap of step", "planning, s")
    table = Table(*titles, title="times of the step that recomputes and waits for nothing")
    for row in rows(args):
        if args.json:
            print(json.dumps(row), flush=True)
        gap = "" if row["both"] is None else f"{(row['both'] - row['bound']) / (row['step'] + row['both']):.2%}"
        words = (_times(row, name) for name in ("recompute", "offload", "both"))
        table.add_row(
            row["model"], row["link"], f"{row['share']:.0%}", f"{row['budget'] / 2**20:.0f}", *words, gap,
            f"{row['planning']:.1f}",
        )  # fmt: skip
    if not args.json:
        Console(width=120).print(table)


if __name__ == "__main__":
    main()
