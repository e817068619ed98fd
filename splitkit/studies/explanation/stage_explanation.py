"""What limits a plan of stages or devices: the slowest stage, memory, one long op, the bound, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitkit.pipeline.byte_breakdown import ByteBreakdown
from splitkit.pipeline.purpose import purpose
from splitkit.plans.parts import PARENT, Claim
from splitkit.plans.record import Plan
from splitkit.prices import Costs
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.short_repr import brief
from splitkit.studies.explanation.folded_names import folded_modules
from splitkit.studies.explanation.longest_op import LongestOp, longest_op
from splitkit.studies.explanation.move_text import move_text
from splitkit.studies.explanation.plan_variants import PlanVariant, plan_variants
from splitkit.studies.explanation.stage_moves import StageMove, StageMoves
from splitkit.studies.explanation.told import Section, Told
from splitkit.units import duration, size
from splitkit.view.console.tables import table
from splitkit.view.data.report import PartReport, part_title, report

_PROOFS = {
    "bound": "the work divided evenly among all devices, or the longest op",
    "joining": "ops that must stay together because their values take too long to send",
    "borders": "where each border between stages can lie",
    "shares": "the least cost of a border with a given amount of work before it",
    "relaxation": "the linear relaxation of an integer program",
    "ideals": "a completed search over all orders that could be better",
    "cover": "the most valuable set that fits on one device",
    "highs": "an integer program",
    "chain": "a path through the graph, divided optimally",
    "path": "the longest path through the graph",
    "all": "a completed search over all placements",
    "sums": "sums of weights, cache and activations",
}
_OBJECTIVES = {
    "bottleneck": "the slowest stage takes",
    "makespan": "a sample takes",
    "tokens": "the tokens that fit are",
    "parts": "the number of parts is",
    "traffic": "the bytes that cross are",
}
_THINGS = {"traffic": "cross"}
_MANY = 4  # times as many stages as the plan has: an op that limits only such plans is told in short
_MOST_ROWS = 16
_MOST_LETTERS = 100
_FULL = 0.9  # of a memory limit: from here on a device is called nearly full


@dataclass(frozen=True)
class StageExplanation(Told):
    """Why a plan of stages or devices is as fast as it is.

    Attributes:
        note: the note of the plan.
        policy: the policy that made it; empty if the plan does not say.
        claim: what the policy asserts; ``None`` for plans of hands, callbacks and policies that do not optimise.
        figures: what the plan costs.
        least: a lower bound on the slowest stage of every plan of so many devices, where there is no claim: the work
            shared evenly, or the longest op.
        parts: a row for each part, in the order in which the parts run.
        devices: the name of each device or stage, in the order of ``figures.loads``.
        limits: the memory limit of each rank or device; ``None`` for none.
        purpose: ``"inference"`` or ``"training with adam"``.
        longest: the longest op.
        moves: the best changes nearby, the best first.
        variants: what other devices and more memory bring; empty if nothing was planned again.
        other: how the plan differs from `Stages` of as many parts, for a plan that was not optimised.
        unit: the unit of the times.
        parent: whether the parent runs some nodes itself.
        replicated: whether some stages run on several devices.
    """

    note: str
    policy: str
    claim: Claim | None
    figures: StageFigures
    least: float
    parts: tuple[PartReport, ...]
    devices: tuple[str, ...]
    limits: tuple[int | None, ...]
    purpose: str
    longest: LongestOp | None
    moves: tuple[StageMove, ...]
    variants: tuple[PlanVariant, ...]
    other: str
    unit: str
    parent: bool = False
    replicated: bool = False

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; times are in ``unit``, sizes in bytes."""
        claim = self.claim
        known = ("objective", "value", "bound", "gap", "optimal", "solver")
        return {
            "kind": "stages",
            "note": self.note,
            "policy": self.policy or None,
            "unit": self.unit,
            "claim": None if claim is None else {name: getattr(claim, name) for name in known},
            "least": self.least,
            "figures": self.figures.to_dict(),
            "memory": [
                {**held.to_dict(), "limit": limit} for held, limit in zip(self.figures.held, self.limits, strict=True)
            ],
            "parts": [{"part": row.part, "modules": row.modules, "ops": row.ops} for row in self.parts],
            "longest": None if self.longest is None else self.longest.to_dict(),
            "moves": [move.to_dict() for move in self.moves],
            "variants": [variant.to_dict() for variant in self.variants],
            "other": self.other or None,
        }

    def sections(self) -> list[Section]:
        """Return the paragraphs and tables."""
        words = [self._slowest(), self._longest(), self._quality(), self._memory(), self._next()]
        return [self._table(), *filter(None, words), *([self._variants()] if self.variants else []), *self._others()]

    def _time(self, seconds: float) -> str:
        return duration(seconds, self.unit)

    def _slowest(self) -> str:
        value, ranks, loads = self.figures.value, self.figures.rank_loads, self.figures.loads
        step = "" if self.figures.step is None else f" A step takes {self._time(self.figures.step)}."
        each = "microbatch on each of its devices" if self.replicated else "microbatch"
        if len(loads) < 2:
            return f"One stage does all the work: {self._time(value)} for a {each}.{step}"
        place = part_title(self.figures.limiting)
        whole = len(ranks) == len(loads)
        what = f"Stage {place} is the slowest" if whole else f"The rank of stage {place} is the busiest"
        mean, following = sum(ranks) / len(ranks), sorted(ranks)[-2]
        next_slowest = f"{_more(value, following)} than the next slowest"
        above = f"{_more(value, mean)} than the mean of all {len(ranks)} and {next_slowest}"
        above = above.replace("as much than", "as much as")
        sent = value - self.figures.work.get(self.figures.limiting, value)
        transfers = f", of which {self._time(sent)} are transfers" if sent > 0 and whole else ""
        return f"{what}: {self._time(value)} for a {each}{transfers}. That is {above}.{step}"

    def _longest(self) -> str:
        op, count = self.longest, len(self.figures.rank_loads)
        if op is None or self.replicated:
            return ""
        where = f"{op.op} of {op.module} ({op.node})" if op.module else f"{op.op} ({op.node})"
        several = "" if op.nodes == 1 else f" with {op.nodes - 1} others that must be in its stage"
        time = f"{self._time(op.seconds)}, {op.share:.0%} of all work"
        if op.least > _MANY * count:
            return f"No single op limits this plan: the longest, {where}{several}, takes {time}."
        bound = (
            f"The longest op is {where}{several}: {time}. No cut can divide it, so no plan has a faster slowest stage."
        )
        if self.figures.value <= op.seconds * (1 + 1e-9):
            bound = f"{bound} It limits this plan."
        if op.enough is None:
            return f"{bound} With fewer than {op.least} stages, every plan is slower than that."
        if op.enough == op.least:
            return f"{bound} {_stages(op.enough)} reach that time; more than {op.enough} are useless."
        return (
            f"{bound} Fewer than {op.least} stages are always slower; {op.enough} reach that time, so more are useless."
        )

    def _quality(self) -> str:
        claim = self.claim
        if claim is None and self.parent:
            return (
                "This plan was not optimised, and the parent runs some nodes itself, so it is not a pipeline of stages."
            )
        if claim is None:
            gap = 1 - self.least / self.figures.value if self.figures.value else 0.0
            return (
                f"This plan was not optimised. With as many devices, no plan's slowest stage takes less than "
                f"{self._time(self.least)} (the work divided evenly, or the longest op), {gap:.0%} less than here."
            )
        value, bound = self._objective(claim.value), self._objective(claim.bound)
        proof = claim.solver.rpartition(", ")[2]
        source = f"The bound comes from {_PROOFS.get(proof, proof)}."
        name = _OBJECTIVES.get(claim.objective, claim.objective)
        if claim.gap < 1e-5:
            return f"No plan is better: {name} {value}, and that is proven. {source}"
        side = "more than" if claim.objective == "tokens" else "less than"
        far = f"{name} {value}; no plan has {side} {bound}, which is {claim.gap:.2%} away"
        return f"How far from the best: {far}. {source}"

    def _objective(self, value: float) -> str:
        assert self.claim is not None
        if self.claim.objective in ("bottleneck", "makespan"):
            return self._time(value)
        return size(value) if self.claim.objective == "traffic" else f"{value:,.0f}"

    def _memory(self) -> str:
        held = self.figures.held
        if not held:
            why = "some nodes are in no part" if self.parent else "the graph has no sizes"
            return f"Memory is not known: {why}."
        used = [one.total / limit if limit else 0.0 for one, limit in zip(held, self.limits, strict=True)]
        tight = max(used) > 0.5
        full = max(range(len(held)), key=lambda i: (used[i] if tight else 0.0, held[i].total))
        name = f"rank {full}" if len(held) != len(self.devices) else f"stage {self.devices[full]}"
        limit = self.limits[full]
        told = f"Memory, for {self.purpose}: {name} is the fullest with {size(held[full].total)}: {held[full]}."
        if limit is None:
            return f"{told} No limit was given."
        left = limit - held[full].total
        if left < 0:
            return f"{told} That is {size(-left)} more than its {size(limit)}: this plan does not fit."
        room = "so memory is tight" if used[full] >= _FULL else "so there is room"
        return f"{told} That is {used[full]:.1%} of its {size(limit)}, {room}."

    def _next(self) -> str:
        if not self.moves:
            return ""
        best = self.moves[0]
        return f"The next-best plan nearby: {move_text(best, self.unit)}"

    def _table(self) -> Section:
        figures = self.figures
        held = dict(zip(self.devices, figures.held, strict=True)) if len(figures.held) == len(self.devices) else {}
        titles = ("stage", "modules", "work", "load", "of slowest", "in", "out")
        titles = (*titles, *(("memory", "most of it") if held else ()))
        loads = {part_title(key): load for key, load in figures.loads.items()}
        works = {part_title(key): work for key, work in figures.work.items()}
        rows = []
        for row in self.parts:
            load = loads.get(row.part)
            share = "" if load is None or not figures.value else f"{load / figures.value:.0%}"
            times = ["" if load is None else self._time(one) for one in (works.get(row.part, 0.0), load or 0.0)]
            name = row.part if row.replicas == 1 else f"{row.part} x{row.replicas}"
            cells = [name, row.modules, *times, share, size(row.bytes_in), size(row.bytes_out)]
            rows.append([*cells, *_held_cells(held.get(row.part))] if held else cells)
        numbers = ("work", "load", "of slowest", "in", "out", "memory")
        more = len(rows) - _MOST_ROWS
        title = f"the first {_MOST_ROWS} of {len(rows)} parts" if more > 0 else ""
        shown = rows[:_MOST_ROWS]
        return table(titles, shown, numbers, title, least={"modules": 24}, spare=("most of it", "out", "in"))

    def _variants(self) -> Section:
        titles = ["planned again with", "slowest stage", "step", "fullest device", "effect"]
        rows = [self._variant_cells(variant) for variant in self.variants]
        if self.figures.step is None:
            titles, rows = [*titles[:2], *titles[3:]], [[*row[:2], *row[3:]] for row in rows]
        return table(titles, rows, ("slowest stage", "step", "fullest device"))

    def _variant_cells(self, variant: PlanVariant) -> list[str]:
        if variant.figures is None:
            return [variant.change, "-", "-", "-", f"no plan: {_short(variant.refusal)}"]
        figures, own = variant.figures, self.figures
        if variant.unit != self.unit:
            return [variant.change, duration(figures.value, variant.unit), "", "", "no comparison: it has other prices"]
        step = "" if figures.step is None else self._time(figures.step)
        peak = size(max(figures.peaks, default=0))
        objective = "" if self.claim is None else self.claim.objective
        if objective in ("", "bottleneck", "makespan"):
            now, before = figures.value, own.value
            if self.claim is not None and objective == "makespan" and variant.value is not None:
                now, before = variant.value, self.claim.value
            if own.step is not None and figures.step is not None:
                now, before = figures.step, own.step
            return [variant.change, self._time(figures.value), step, peak, changed(now, before)]
        assert self.claim is not None and variant.value is not None
        texts = self._objective(variant.value), self._objective(self.claim.value)
        result = f"{texts[0]} {_THINGS.get(objective, objective)} instead of {texts[1]}"
        result = "no change" if variant.value == self.claim.value else result
        return [variant.change, self._time(figures.value), step, peak, result]

    def _others(self) -> list[str]:
        return [self.other] if self.other else []


def _held_cells(held: ByteBreakdown | None) -> list[str]:
    if held is None:
        return ["", ""]
    name, most = max(held.kinds, key=lambda kind: kind[1])
    return [size(held.total), f"{name} {size(most)}" if most else ""]


def _more(value: float, other: float) -> str:
    """Return by how much a value is above another."""
    if not other:
        return "more"
    above = value / other - 1
    if above >= 2:
        return f"{value / other:.1f} times as much"
    return f"{above:.0%} more" if above >= 0.005 else "hardly more"


def _short(reason: str) -> str:
    """Return the beginning of a refusal; the data have all of it."""
    return reason if len(reason) <= _MOST_LETTERS else f"{reason[: _MOST_LETTERS - 3].rstrip()}..."


def _stages(count: int) -> str:
    return f"{count} stages" if count > 1 else "1 stage"


def changed(now: float, before: float) -> str:
    """Return what a change is worth: ``no change``, ``12.3% faster``."""
    if not before or abs(now / before - 1) < 5e-4:
        return "no change"
    return f"{1 - now / before:.1%} faster" if now < before else f"{now / before - 1:.1%} slower"


def explain_stages(
    pricing: StagePricing, plan: Plan, policy: object, costs: Costs, *, again: bool, other: str = ""
) -> StageExplanation:
    """Explain a plan of stages or devices.

    Args:
        pricing: the prices by which the plan was made.
        plan: the plan.
        policy: the policy that made it; ``None`` if it is not known.
        costs: the prices that the policy was given.
        again: whether to plan again with other devices and more memory.
        other: how the plan differs from one that was optimised.
    """
    figures = pricing.figures(plan)
    moves = moves_of(pricing, plan, figures)
    rows = {row.part: row for row in _rows(pricing, plan, costs)}
    order = [part_title(key) for key in figures.loads if pricing.visits] or list(
        map(part_title, pricing.parts_of(plan))
    )
    limits = pricing.limits(len(figures.held))
    longest = longest_op(pricing, figures)
    return StageExplanation(
        plan.note,
        plan.policy,
        plan.claim,
        figures,
        _least(pricing, figures, longest),
        tuple(rows[title] for title in [*order, *(title for title in rows if title not in order)] if title in rows),
        tuple(map(part_title, figures.loads)),
        tuple(limits),
        f"{purpose(pricing.request.optimizer)}{pricing.assumed}",
        longest,
        () if moves is None else tuple(moves.found[:3]),
        plan_variants(pricing, plan, policy, costs) if again else (),
        other,
        pricing.unit,
        any(PARENT in (plan.places.get(node) or (PARENT,)) for node in pricing.flow.nodes),
        pricing.replicated,
    )


def _rows(pricing: StagePricing, plan: Plan, costs: Costs) -> Iterable[PartReport]:
    """Return the rows of the report; one for each device where devices are visited several times."""
    found = report(pricing.flow.root, plan, costs).parts
    if not pricing.visits:
        return found
    key_of = {part_title(key): pricing.device_of(key) for key in plan.parts}
    groups: dict[str, list[PartReport]] = {}
    for row in found:
        groups.setdefault(part_title(key_of[row.part]) if row.part in key_of else row.part, []).append(row)
    return [_joined(pricing, plan, title, rows) for title, rows in groups.items()]


def _joined(pricing: StagePricing, plan: Plan, title: str, rows: Sequence[PartReport]) -> PartReport:
    flow = pricing.flow
    nodes = [
        n
        for n in flow.nodes
        if any(part_title(pricing.device_of(k)) == title for k in plan.places.get(n, ()) if k is not PARENT)
    ]
    sums = {
        name: sum(getattr(row, name) for row in rows) for name in ("ops", "flops", "bytes_in", "bytes_out", "share")
    }
    modules = f"{len(rows)} visits: {folded_modules(nodes, flow)}" if nodes else rows[0].modules
    return replace(rows[0], part=title, modules=modules, **sums)


def moves_of(pricing: StagePricing, plan: Plan, figures: StageFigures) -> StageMoves | None:
    """Return the moves of a plan; ``None`` where its objective is not priced for a moved plan."""
    objective = "bottleneck" if plan.claim is None else plan.claim.objective
    if objective not in ("bottleneck", "traffic", "parts"):
        return None
    return StageMoves(pricing, plan, figures, objective != "bottleneck")


def _least(pricing: StagePricing, figures: StageFigures, longest: LongestOp | None) -> float:
    """Return a lower bound on the slowest stage of every plan that computes each node once."""
    ranks = max(1, len(figures.rank_loads))
    work = pricing.model.seconds.min(axis=0)
    return max(float(work.sum()) / ranks * (1 - 1e-12), 0.0 if longest is None else float(work.max(initial=0.0)))
