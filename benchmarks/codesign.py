"""`Pipeline` beside deciding stages and recompute one after the other: ``--json`` for machines.

A training step of GPT-2 and Llama in 4 and 8 stages, simulated: bfloat16, the roofline of an H100, NVLink 4. The memory
is a share of what the best stages without recompute need. All ways are judged alike: by the same prices, the same bytes
and the same simulated step, within the same memory.

block   equal layers; the first k layers of each stage are recomputed from their inputs, with the least k that fits
        (Megatron's ``--recompute-method block``)
once    the cuts with the least slowest stage (what `Stages` minimises), then one min-cut price for all stages
each    the same cuts, then what each stage can save at best within its memory
ours    `Pipeline`

Times are milliseconds; ``block``, ``once`` and ``each`` are ratios to ``ours``; a dash: nothing fits. With one stage on
each rank the bound of the gap is the least path bound, else the bound over mixtures of cuts
(`splitkit.search.pipelines.step_bound`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np
import torch

import splitkit as sk
from splitkit.costs import Links
from splitkit.frontends.joint_capture import Joint
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.search.model_blocks import model_blocks
from splitkit.search.pipelines.cut_search import CutSearch
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblem, StageProblems
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.testing import models
from splitkit.training.choices import Choice

SIZES = {"gpt2": {"width": 1024, "heads": 16, "vocab": 50257}, "llama": {"width": 1024, "heads": 16, "vocab": 32000}}


@dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        step: seconds of `Pipeline`'s step, ``None`` if it has no plan.
        gap: how far it may be from the best.
        block: seconds of the step with Megatron's recompute, ``None`` if it does not fit; ``once``, ``each`` likewise.
        planning: seconds of the processor for planning, once the graph is captured.
    """

    model: str
    layers: int
    stages: int
    schedule: str
    share: float
    memory: int
    step: float | None
    gap: float
    block: float | None
    once: float | None
    each: float | None
    planning: float


@dataclass(frozen=True)
class Way:
    """What another way decides.

    Attributes:
        ends: the position behind each stage.
        choices: what each stage saves.
        run: its simulated step.
    """

    ends: tuple[int, ...]
    choices: tuple[Choice, ...]
    run: ScheduleRun


class Rivals:
    """The other ways, for one graph and schedule."""

    def __init__(self, frontiers: StageFrontiers, order: PipelineOrder, links: Links | None) -> None:
        self.frontiers, self.problems, self.order, self.links = frontiers, frontiers.problems, order, links
        self.stages = len(order.rank_of)
        positions = self.problems.positions
        blocks = model_blocks(positions.flow, self.problems.costs)
        forward = set(positions.forward)
        starts = sorted(min(positions.place[n] for n in nodes if n in forward) for nodes in blocks.values())
        self.borders = [_nearest(positions.legal, start) for start in starts]
        self._chosen: dict[tuple[int, int, int], tuple[StageProblem, Choice]] = {}

    def block(self, memory: int) -> Way | None:
        """Return equal layers with block recompute."""
        layers = len(self.borders)
        firsts = [self.borders[layers * s // self.stages] for s in range(1, self.stages)]
        spans = list(pairwise([0, *firsts, len(self.problems.positions.forward)]))
        for count in range(layers // self.stages + 2):
            way = self._way([(span, self._recomputed(span, count)) for span in spans])
            if max(way.run.peaks) <= memory:
                return way
        return None

    def _recomputed(self, span: tuple[int, int], count: int) -> Choice:
        """Recompute the first layers of a stage, each from its input."""
        problem, problems = self.problems.problem(*span), self.problems
        inside = [b for b in self.borders if span[0] < b < span[1]]
        begin = span[0] if span[0] in self.borders else inside.pop(0) if span[0] == 0 else span[0]
        ends = [*inside, span[1]][:count]
        end = ends[-1] if count and ends else begin
        at = problems.op_at[problem.ops]
        kept = {c.value for c in problems.positions.activations for b in (begin, *ends) if c.made < b <= c.last}
        again = [
            begin <= p < end and op not in kept and not kept.intersection(op.users)
            for op, p in zip(problem.savings.ops, at.tolist(), strict=True)
        ]
        return problem.savings.choose(np.array(again, np.bool_) | problem.savings.forced | (problem.savings.late))

    def once(self, ends: Sequence[int], memory: int) -> Way | None:
        """Return given cuts with one min-cut price for all stages."""
        spans = list(pairwise([0, *ends]))
        hulls = [priced(Hull(self.problems.problem(*span).savings)) for span in spans]
        prices = sorted({price for hull in hulls for price, _ in hull})
        for price in prices:
            chosen = [max((c for c in hull if c[0] <= price), key=lambda c: c[0])[1] for hull in hulls]
            way = self._way(list(zip(spans, chosen, strict=True)))
            if max(way.run.peaks) <= memory:
                return way
        return None

    def _way(self, stages: Sequence[tuple[tuple[int, int], Choice]]) -> Way:
        costs = [self.problems.costs_of(self.problems.problem(*span), choice) for span, choice in stages]
        run = simulate_schedule(costs, self.order, links=self.links)
        return Way(tuple(span[1] for span, _ in stages), tuple(choice for _, choice in stages), run)


def priced(hull: Hull) -> list[tuple[float, Choice]]:
    """(seconds a byte, choice) of all corners: the least price of a byte at which it is the best."""
    prices = [(a.second - b.second) * hull.tick / (b.first - a.first) for a, b in pairwise(hull.corners)]
    return list(zip([*prices, 0.0], hull.choices, strict=True))


def _nearest(legal: np.ndarray, position: int) -> int:
    return int(legal[np.abs(legal - position).argmin()])


def captured(name: str, layers: int, batch: int, seq: int) -> Joint:
    """Return the joint graph of a model in bfloat16."""
    made = models.build(name, layers=layers, batch=batch, seq=seq, **SIZES[name])
    return sk.capture_joint(made.model.bfloat16(), *made.args, **made.kwargs)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of all settings."""
    links = Links.preset("nvlink4")
    for name in args.models:
        start = time.perf_counter()
        joint = captured(name, args.layers, args.batch, args.seq)
        print(f"{name}: captured in {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        costs = sk.costs.roofline(joint.graph_module, "h100")
        positions = JointPositions(joint.flow)
        for schedule in args.schedules:
            kind = schedule_named(schedule)
            for ranks in args.ranks:
                stages = ranks if kind.is_single else 2 * ranks
                order = pipeline_order(schedule, stages, args.microbatches or 4 * ranks)
                yield from of_schedule(name, args, positions, costs, order, links, kind.divided)


def of_schedule(name, args, positions, costs, order, links, divided) -> Iterator[Row]:
    """Yield the rows of one schedule, for falling memory."""
    ranks = len(order.ranks)
    free = CutSearch(StageFrontiers(StageProblems(positions, costs, "adam", divided)), order, links, [None] * ranks)
    whole, _ = free.run()
    assert whole is not None
    for share in args.shares:
        memory = int(share * max(whole.run.peaks))
        start = time.process_time()
        frontiers = StageFrontiers(StageProblems(positions, costs, "adam", divided))
        search = CutSearch(frontiers, order, links, [memory] * ranks)
        best, bound = search.run()
        planning = time.process_time() - start
        rivals = Rivals(frontiers, order, links)
        cuts = [int(search.cuts[e]) for e in next(search._balanced())]
        each = search.scoring.of(cuts)
        step = None if best is None else best.seconds
        yield Row(
            name,
            args.layers,
            len(order.rank_of),
            order.name,
            share,
            memory,
            step,
            0.0 if step is None else 1 - min(bound, step) / step,
            _seconds(rivals.block(memory)),
            _seconds(rivals.once(cuts, memory)),
            None if each is None else each.seconds,
            planning,
        )


def _seconds(way: Way | None) -> float | None:
    return None if way is None else way.run.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zbv"])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.9, 0.75, 0.6, 0.5])
    parser.add_argument("--microbatches", type=int, default=None, help="4 a rank by default")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    if not args.json:
        print("model layers stages schedule memory        step   gap | block  once  each | planning")
    for row in rows(args):
        found.append(row)
        if args.json:
            continue
        ratios = [
            "    -" if other is None or row.step is None else f"{other / row.step:5.3f}"
            for other in (row.block, row.once, row.each)
        ]
        step = "no plan" if row.step is None else f"{row.step * 1e3:7.2f}"
        print(
            f"{row.model:6} {row.layers:4} {row.stages:5} {row.schedule:14} {row.share:4.2f} "
            f"{row.memory / 2**30:6.2f} GiB {step} {row.gap:6.2%} | {' '.join(ratios)} | {row.planning:5.1f} s",
            flush=True,
        )
    data = {"rows": [asdict(row) for row in found], "summary": summary_of(found)}
    print(json.dumps(data) if args.json else data["summary"])


def summary_of(found: Sequence[Row]) -> dict[str, list[float]]:
    """Return the least and the greatest gap, and ratio of each way, by schedule."""
    ranges = {}
    for schedule in sorted({row.schedule for row in found}):
        planned = [row for row in found if row.schedule == schedule and row.step is not None]
        ranges[f"{schedule} gap"] = [row.gap for row in planned]
        for way in ("block", "once", "each"):
            times = [(getattr(row, way), row.step) for row in planned]
            ranges[f"{schedule} {way}"] = [time / step for time, step in times if time is not None and step is not None]
    return {name: [min(values), max(values)] for name, values in ranges.items() if values}


if __name__ == "__main__":
    main()
