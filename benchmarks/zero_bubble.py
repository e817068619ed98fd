"""The tables of Zero Bubble (Qi et al., ICLR 2024) beside splitkit's: ``--rows 8,16,32`` for the numbers of stages.

Published times and rates are those of ``megatron/core/pipeline_parallel/efficiency.py`` in
sail-sg/zero-bubble-pipeline-parallelism (branch arxiv). A rate is (cost - m (F + I + W)) / cost. The cost of 1F1B and
H1 is the time of the step; that of H2, 1p and 2p is the longest span of a rank, from the start of its first action to
the end of its last one. 1p and 2p are orders within the memory of p and 2 p forwards: F takes 34 h + 5 a s, W frees
32 h, I the rest. "bound": no order whose stages take the microbatches in turn has a lower rate.

The second table has the bubbles and memories that the README of that repository gives for equal times of F, I and W, in
units of 1F1B's (for many stages: the memories lie above these by a stage or two); the last three schedules have two
chunks per rank, each half as long. The bubble is that of the longest span, except for 1F1B and H1. "made": the order
that `splitkit.synthesize` makes within the memory of the schedule before it, on the same placement.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.extend import Action, PipelineOrder, StageCosts
from splitkit.pipeline.run import ScheduleRun

SEQUENCE = 1024
ROWS = (
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18546, 18097, 9321, 762, 2304, 24, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29802, 29428, 19530, 577, 4096, 32, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29935, 29621, 19388, 535, 4096, 32, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11325, 11308, 8109, 378, 5120, 40, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (32, 128, 10408, 10204, 7703, 408, 6144, 48, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (32, 256, 10402, 10248, 7698, 460, 6144, 48, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
)
"""Stages, microbatches, F, I, W and message in microseconds, h, a, and the rates of 1F1B, H1, H2, 1p and 2p."""

README = {
    "1F1B": ("1f1b", 1, 1.0),
    "ZB-H1": ("h1", 1 / 3, 1.0),
    "ZB-H2": ("h2", 0.0, 2.0),
    "ZB-V": ("zbv", 0.0, 1.0),
    "V-Half": ("v-half", 1 / 2, 1 / 2),
    "V-Min": ("v-min", 2 / 3, 1 / 3),
}
"""Name -> the schedule, its bubble and its memory in units of 1F1B's."""


@dataclass(frozen=True)
class Constant:
    """Links on which every message takes the same time."""

    each: float

    def seconds(self, source: object, target: object, nbytes: float) -> float:
        """Return the time of one message."""
        return self.each


def hand_order(stages: int, microbatches: int, warm_up: int) -> PipelineOrder:
    """Return ZB-H1 (``warm_up=1``) or ZB-H2 (2): so many forwards more for each stage behind, weight parts last."""
    rows = []
    for rank in range(stages):
        before, row = (stages - 1 - rank) * warm_up, list[Action]()
        row += [Action(rank, "F", m) for m in range(min(before, microbatches))]
        weights = iter(range(microbatches))
        for m in range(microbatches):
            if before + m < microbatches:
                row.append(Action(rank, "F", before + m))
            row.append(Action(rank, "I", m))
            if before + m >= (stages - 1) * warm_up:
                row.append(Action(rank, "W", next(weights)))
        rows.append((*row, *(Action(rank, "W", m) for m in weights)))
    return PipelineOrder(f"ZB-H{warm_up}", tuple(rows))


def span(run: ScheduleRun) -> float:
    """Return the longest time of a rank from the start of its first action to the end of its last."""
    of = [run.order.columns.rank == rank for rank in range(run.ranks)]
    return max(float(run.ends[own].max() - run.starts[own].min()) for own in of)


def rate(cost: float, work: float) -> float:
    """Return the bubble rate."""
    return (cost - work) / cost


def published(most: set[int], effort: float, console: Console) -> None:
    """Print the published rates beside those of the simulator and of `splitkit.synthesize`."""
    titles = ("p", "m", "1F1B", "ours", "H1", "ours", "H2", "ours", "1p", "ours", "bound", "2p", "ours", "bound", "s")
    shown = Table(*titles, title="bubble rates: published, and ours")
    for p, m, forward, backward, weight, message, h, a, *rates in ROWS:
        if p not in most:
            continue
        saved, links, work = 34 * h + 5 * a * SEQUENCE, Constant(message), m * (forward + backward + weight)
        stages = [StageCosts(forward, backward, weight, saved_bytes=saved, deferred_bytes=32 * h)] * p
        found = [rate(sk.simulate_schedule(stages, "1f1b", m, links=links).seconds, work)]
        found.append(rate(sk.simulate_schedule(stages, hand_order(p, m, 1), links=links).seconds, work))
        found.append(rate(span(sk.simulate_schedule(stages, hand_order(p, m, 2), links=links)), work))
        cells, start = [], time.perf_counter()
        for theirs, ours in zip(rates, found, strict=False):
            cells += [f"{theirs:.4f}", f"{ours:.4f}"]
        for limit, theirs in ((p, rates[3]), (2 * p, rates[4])):
            made = sk.synthesize(stages, m, limit * saved, links=links, objective="span", effort=effort)
            bound, ours = rate(made.claim.bound, work), rate(made.value, work)
            assert round(ours, 4) <= theirs and max(made.peaks) <= limit * saved
            cells += [f"{theirs:.4f}", f"{ours:.4f}", "optimal" if made.optimal else f"{bound:.4f}"]
        shown.add_row(str(p), str(m), *cells, f"{time.perf_counter() - start:.0f}")
    console.print(shown)


def unit_times(p: int, effort: float, console: Console) -> None:
    """Print the bubbles and memories for equal times."""
    m, base = 3 * p, 3.0 * (p - 1)
    titles = ("schedule", "bubble", "ours", "made", "bound", "memory", "ours")
    shown = Table(*titles, title=f"equal times, {p} ranks, {m} microbatches")
    for name, (schedule, bubble, memory) in README.items():
        chunks = 1 if schedule in ("1f1b", "h1", "h2") else 2
        saved = 600 // chunks
        stages = [StageCosts(1 / chunks, 1 / chunks, 1 / chunks, saved_bytes=saved, deferred_bytes=0)] * (p * chunks)
        order = hand_order(p, m, int(schedule[1])) if schedule in ("h1", "h2") else schedule
        run = sk.simulate_schedule(stages, order, None if isinstance(order, PipelineOrder) else m, ranks=p)
        objective: Literal["step", "span"] = "step" if schedule in ("1f1b", "h1") else "span"
        cost = run.seconds if objective == "step" else span(run)
        limit, placement = max(run.peaks), "loop" if chunks == 1 else "V"
        made = sk.synthesize(stages, m, limit, ranks=p, placement=placement, objective=objective, effort=effort)
        assert made.value <= cost * (1 + 1e-9) and max(made.peaks) <= limit
        figures = [(value - 3 * m) / base for value in (cost, made.value, made.claim.bound)]
        cells = [bubble, *figures, memory, limit / (p * 600)]
        shown.add_row(name, *(f"{abs(cell):.2f}" for cell in cells))
    console.print(shown)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="8,16,32", help="the numbers of stages to show (default %(default)s)")
    parser.add_argument("--effort", type=float, default=1.0, help="work limit of the search (default 1)")
    args = parser.parse_args()
    console = Console(width=140)
    unit_times(8, args.effort, console)
    published({int(number) for number in args.rows.split(",")}, args.effort, console)


if __name__ == "__main__":
    main()
