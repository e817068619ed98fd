"""Why a plan of stages or devices is as fast as it is, and why a node is in its stage.

A plan is asked for again with one more device, one fewer, more memory, or as `Stages` would make it, and a node is
put into the stages beside its own; what the plan that results costs is told beside what the plan costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from splitkit.checks import nbytes
from splitkit.costs import roofline
from splitkit.costs.roofline import mesh_of
from splitkit.errors import CycleError, SplitError, listed
from splitkit.graph.dataflow import Dataflow, module_path, nodes_after, waits_for
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.inseparable_nodes import together_because
from splitkit.pipeline.purpose import purpose, ranks_of
from splitkit.plans.parts import PARENT, Claim, PartKey
from splitkit.plans.record import Plan
from splitkit.policies import Devices, MemoryBudget, Stages
from splitkit.prices import Costs
from splitkit.search.device_search import DeviceRequest
from splitkit.search.placement_model import PlacementModel
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.studies.explanation.told import (
    ChangedPlan,
    ComparedFigure,
    Explanation,
    Section,
    changes_table,
    compared_stages,
)
from splitkit.training.flow import op_of
from splitkit.units import duration, size
from splitkit.view.data.report import collapse, part_title, report
from splitkit.view.tables import table

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_MODULES = 8  # that a cell names


def folded_modules(nodes: Iterable[Node], flow: Dataflow) -> str:
    """Return the modules of some nodes, folded to ranges; where few nodes of a module are meant, it says how many."""
    paths = flow.fact(_paths)
    names = collapse([paths[n] for n in nodes if n in paths], paths.values())
    return listed(names, _MOST_MODULES)


def _paths(flow: Dataflow) -> dict[Node, str]:
    return {node: module_path(node) for node in flow.nodes}


def without_numbers(path: str) -> tuple[str, tuple[int, ...]]:
    """Return a module path with ``*`` in place of its numbers, and the numbers."""
    return _NUMBER.sub("*", path), tuple(map(int, _NUMBER.findall(path)))


def ranges(numbers: Sequence[int]) -> str:
    """Return ``0-3,5`` for 0, 1, 2, 3 and 5."""
    found: list[list[int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][-1] + 1:
            found[-1] = [found[-1][0], number]
        else:
            found.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


# Names sets of nodes by their modules, with equal layers folded: ``layers.0-5``.


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
_MOVABLE = ("bottleneck", "traffic", "parts")
"""Objectives whose plans are priced after a move as they were planned."""
_KINDS = {
    "placeholder": ("an input", "It is an input of the graph: the parent holds it and passes it to its readers."),
    "get_attr": ("an attribute", "It is a parameter, a buffer or a constant: each part that reads it holds it."),
    "output": ("the output", "It is the output of the graph, which the parent returns."),
}
_MANY = 4  # times as many stages as the plan has: an op that limits only such plans is told in short
_MOST_ROWS = 16  # parts that the table shows
_MOST_STAGES = 64
"""A plan of more devices is not compared with `Stages`."""
_NAMED = 4  # parts or nodes that a sentence names
_FULL = 0.9  # of a memory limit: from here on a device is called nearly full
MORE = 1.1
"""How many times the memory is asked about."""


def explain_stages(pricing: StagePricing, plan: Plan, policy: object, costs: Costs, *, again: bool) -> Explanation:
    """Explain a plan of stages or devices.

    Args:
        pricing: the prices by which the plan was made.
        plan: the plan.
        policy: the policy that made it; ``None`` if it is not known.
        costs: the prices that the policy was given.
        again: whether to plan again with other devices and more memory.
    """
    figures = pricing.figures(plan)
    limits, longest = pricing.limits(len(figures.held)), _longest_unit(pricing)
    least = _least(pricing, figures)
    changes = tuple(_changes(pricing, plan, policy, costs, figures)) if again else ()
    parent = any(PARENT in (plan.places.get(node) or (PARENT,)) for node in pricing.flow.nodes)
    said: list[Section] = [
        _table(pricing, plan, costs, figures),
        _slowest(pricing, figures),
        _longest(pricing, longest, len(figures.rank_loads)),
        _quality(pricing, plan.claim, figures, least, parent),
        _memory(pricing, figures, limits, parent),
        *([changes_table("planned again with", changes)] if changes else []),
    ]
    known = ("objective", "value", "bound", "gap", "optimal", "solver")
    data: dict[str, Any] = {
        "kind": "stages",
        "note": plan.note,
        "policy": plan.policy or None,
        "unit": pricing.unit,
        "claim": None if plan.claim is None else {name: getattr(plan.claim, name) for name in known},
        "least": least,
        "figures": figures.to_dict(),
        "memory": [{**held.to_dict(), "limit": limit} for held, limit in zip(figures.held, limits, strict=True)],
        "longest": None if longest is None else {"node": longest[0].name, "seconds": longest[1]},
        "changes": [change.to_dict() for change in changes],
    }
    return Explanation(data, tuple(said))


def _longest_unit(pricing: StagePricing) -> tuple[Node, float, float, int] | None:
    """Return the longest op with its seconds, their share of all work, and how many ops must be in its stage.

    ``None`` if nothing takes time.
    """
    request = pricing.request
    model = PlacementModel(request.flow, request.prices, [request.seconds], together=request.inseparable)
    work = model.seconds[0].tolist()
    most = max(work, default=0.0)
    if not most:
        return None
    members = model.members[work.index(most)]
    return max(members, key=lambda node: request.seconds[node]), most, most / sum(work), len(members)


def _least(pricing: StagePricing, figures: StageFigures) -> float:
    """Return a lower bound on the slowest stage of every plan of so many devices that computes each node once."""
    work = pricing.model.seconds.min(axis=0)
    even = float(work.sum()) / max(1, len(figures.rank_loads)) * (1 - 1e-12)
    return even if pricing.replicated else max(even, float(work.max(initial=0.0)))


def _slowest(pricing: StagePricing, figures: StageFigures) -> str:
    value, ranks, loads, unit = figures.value, figures.rank_loads, figures.loads, pricing.unit
    step = "" if figures.step is None else f" A step takes {duration(figures.step, unit)}."
    each = "microbatch on each of its devices" if pricing.replicated else "microbatch"
    if len(loads) < 2:
        return f"One stage does all the work: {duration(value, unit)} for a {each}.{step}"
    place = part_title(figures.limiting)
    whole = len(ranks) == len(loads)
    what = f"Stage {place} is the slowest" if whole else f"The rank of stage {place} is the busiest"
    mean, following = sum(ranks) / len(ranks), sorted(ranks)[-2]
    next_slowest = f"{_more(value, following)} than the next slowest"
    above = f"{_more(value, mean)} than the mean of all {len(ranks)} and {next_slowest}"
    above = above.replace("as much than", "as much as")
    sent = value - figures.work.get(figures.limiting, value)
    transfers = f", of which {duration(sent, unit)} are transfers" if sent > 0 and whole else ""
    return f"{what}: {duration(value, unit)} for a {each}{transfers}. That is {above}.{step}"


def _more(value: float, other: float) -> str:
    """Return by how much a value is above another."""
    if not other:
        return "more"
    above = value / other - 1
    if above >= 2:
        return f"{value / other:.1f} times as much"
    return f"{above:.0%} more" if above >= 0.005 else "hardly more"


def _longest(pricing: StagePricing, longest: tuple[Node, float, float, int] | None, ranks: int) -> str:
    if longest is None or pricing.replicated:
        return ""
    node, seconds, share, count = longest
    where = f" of {module_path(node)}" if module_path(node) else ""
    several = "" if count == 1 else f" with {count - 1} others that must be in its stage"
    op = f"{op_of(node)}{where} ({node.name}){several}"
    time = f"{duration(seconds, pricing.unit)}, {share:.0%} of all work"
    if share * ranks * _MANY < 1:
        return f"No single op limits this plan: the longest, {op}, takes {time}."
    return f"The longest op is {op}: {time}. No cut can divide it, so its stage takes at least that."


def _quality(pricing: StagePricing, claim: Claim | None, figures: StageFigures, least: float, parent: bool) -> str:
    if claim is None and parent:
        return "This plan was not optimised, and the parent runs some nodes itself, so it is not a pipeline of stages."
    if claim is None:
        gap = 1 - least / figures.value if figures.value else 0.0
        return (
            f"This plan was not optimised. With as many devices, no plan's slowest stage takes less than "
            f"{duration(least, pricing.unit)} (the work divided evenly, or the longest op), {gap:.0%} less than here."
        )
    value, bound = (_objective(claim, number, pricing.unit) for number in (claim.value, claim.bound))
    proof = claim.solver.rpartition(", ")[2]
    source = f"The bound comes from {_PROOFS.get(proof, proof)}."
    name = _OBJECTIVES.get(claim.objective, claim.objective)
    if claim.gap < 1e-5:
        return f"No plan is better: {name} {value}, and that is proven. {source}"
    side = "more than" if claim.objective == "tokens" else "less than"
    return f"How far from the best: {name} {value}; no plan has {side} {bound}, which is {claim.gap:.2%} away. {source}"


def _objective(claim: Claim, value: float, unit: str) -> str:
    if claim.objective in ("bottleneck", "makespan"):
        return duration(value, unit)
    return size(value) if claim.objective == "traffic" else f"{value:,.0f}"


def _memory(pricing: StagePricing, figures: StageFigures, limits: Sequence[int | None], parent: bool) -> str:
    held, devices = figures.held, list(figures.loads)
    if not held:
        return f"Memory is not known: {'some nodes are in no part' if parent else 'the graph has no sizes'}."
    used = [one.total / limit if limit else 0.0 for one, limit in zip(held, limits, strict=True)]
    tight = max(used) > 0.5
    full = max(range(len(held)), key=lambda i: (used[i] if tight else 0.0, held[i].total))
    name = f"rank {full}" if len(held) != len(devices) else f"stage {part_title(devices[full])}"
    limit, what = limits[full], f"{purpose(pricing.request.optimizer)}{pricing.assumed}"
    told = f"Memory, for {what}: {name} is the fullest with {size(held[full].total)}: {held[full]}."
    if limit is None:
        return f"{told} No limit was given."
    left = limit - held[full].total
    if left < 0:
        return f"{told} That is {size(-left)} more than its {size(limit)}: this plan does not fit."
    room = "so memory is tight" if used[full] >= _FULL else "so there is room"
    return f"{told} That is {used[full]:.1%} of its {size(limit)}, {room}."


def _table(pricing: StagePricing, plan: Plan, costs: Costs, figures: StageFigures) -> Section:
    """Return a row for each part, in the order in which the parts run."""
    rows = {row.part: row for row in report(pricing.flow.root, plan, costs).parts}
    order = dict.fromkeys([*map(part_title, figures.loads), *map(part_title, pricing.parts_of(plan)), *rows])
    loads = {part_title(key): load for key, load in figures.loads.items()}
    works = {part_title(key): work for key, work in figures.work.items()}
    alone = len(figures.held) == len(figures.loads)
    held = dict(zip(loads, figures.held, strict=True)) if alone else {}
    cells = []
    for row in (rows[title] for title in order if title in rows):
        load = loads.get(row.part)
        share = "" if load is None or not figures.value else f"{load / figures.value:.0%}"
        times = ["" if load is None else duration(one, pricing.unit) for one in (works.get(row.part, 0.0), load or 0.0)]
        name = row.part if row.replicas == 1 else f"{row.part} x{row.replicas}"
        full = [size(held[row.part].total) if row.part in held else ""] if held else []
        cells.append([name, row.modules, *times, share, size(row.bytes_in), size(row.bytes_out), *full])
    titles = ("stage", "modules", "work", "load", "of slowest", "in", "out", *(("memory",) if held else ()))
    title = f"the first {_MOST_ROWS} of {len(cells)} parts" if len(cells) > _MOST_ROWS else ""
    return table(titles, cells[:_MOST_ROWS], titles[2:], title, least={"modules": 24}, spare=("out", "in"))


def _changes(
    pricing: StagePricing, plan: Plan, policy: object, costs: Costs, figures: StageFigures
) -> Iterator[ChangedPlan]:
    """Yield the plans of the requests next to the one that a plan was made for, planned again."""
    for change, other in _others(pricing, plan, policy):
        try:
            made = other()
            found = made.assign(pricing.flow, _costs_of(pricing, made, costs))
            own = StagePricing.of(pricing.flow, found, _costs_of(pricing, made, costs), made)
            compared = compared_stages(figures, own.figures(found), pricing.unit) if own.unit == pricing.unit else []
        except SplitError as error:
            yield ChangedPlan(change, (), error.reason)
            continue
        claims = [one.claim for one in (plan, found) if one.claim is not None]
        if len(claims) == 2 and claims[0].objective not in ("bottleneck", "traffic"):
            unit = pricing.unit if claims[0].objective == "makespan" else ""
            compared.insert(0, ComparedFigure(claims[0].objective, claims[0].value, claims[1].value, unit))
        yield ChangedPlan(change, tuple(compared), "" if compared else "it has prices in another unit")


def _costs_of(pricing: StagePricing, policy: object, costs: Costs) -> Costs:
    """Return the prices for a changed policy: of the roofline of the devices if these are alike now."""
    asked = pricing.request
    if isinstance(policy, Devices) and isinstance(asked, DeviceRequest) and len(set(asked.kinds)) > 1:
        return roofline(pricing.flow, find_device(next(iter(policy.given.values()))), mesh=mesh_of(costs))
    return costs


def _others(pricing: StagePricing, plan: Plan, policy: object) -> Iterator[tuple[str, Any]]:
    """Yield (change, function that makes the changed policy); making one may be refused."""
    parts = len(plan.parts)
    if plan.claim is None:
        count, asked = len(pricing.devices_of(plan)), pricing.request
        if 1 < count <= _MOST_STAGES and not pricing.replicated:
            trained = None if pricing.assumed else asked.optimizer
            yield f"Stages({count})", lambda: Stages(count, links=asked.links, optimizer=trained)
    if isinstance(policy, Stages):
        each = _stages_of_rank(policy)
        number = pricing.microbatches(parts)
        yield "one more device", lambda: _with_count(policy, policy.n + each, number)
        if policy.n > each:
            yield "one device fewer", lambda: _with_count(policy, policy.n - each, number)
    if isinstance(policy, Devices):
        given = dict(policy.given)
        last = list(given)[-1]
        more = f"{last}+1" if isinstance(policy.devices, Mapping) else len(given)
        if policy.links is None or isinstance(policy.links, str):
            yield "one more device", lambda: _with_devices(policy, {**given, more: given[last]})
        if len(given) > 1:
            fewer = {key: device for key, device in given.items() if key != last}
            yield "one device fewer", lambda: _with_devices(policy, fewer)
    if isinstance(policy, Stages | MemoryBudget) and policy.memory not in (None, "least"):
        yield "10 % more memory", lambda: replace(policy, memory=_scaled(policy.memory))
    if isinstance(policy, Devices):
        limits = pricing.limits(parts)
        if all(limit is not None for limit in limits):
            yield "10 % more memory", lambda: replace(policy, memory=[int(MORE * (limit or 0)) for limit in limits])


def _stages_of_rank(policy: Stages) -> int:
    """Return how many stages a device runs."""
    if policy.schedule is None or policy.replicas != (1,):
        return 1
    return policy.n // (max(ranks_of(policy.schedule, policy.microbatches, policy.n)) + 1)


def _with_count(policy: Stages, count: int, microbatches: int) -> Stages:
    """Return the policy for another number of stages, with the same number of microbatches."""
    memory: Any = policy.memory
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        memory = [*memory, *[memory[-1]] * (count - len(memory))][:count]
    degrees: Any = policy.replicas
    step = None if policy.schedule is None else microbatches
    return replace(
        policy, n=count, memory=memory, microbatches=step, replicas=[degree for degree in degrees if degree <= count]
    )


def _with_devices(policy: Devices, devices: Mapping[Any, Any]) -> Devices:
    memory: Any = policy.memory
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        memory = [*memory, memory[-1]][: len(devices)]
    only = {pattern: [key for key in keys if key in devices] for pattern, keys in policy.only.items()}
    given = devices if isinstance(policy.devices, Mapping) else list(devices.values())
    return replace(policy, devices=given, memory=memory, only=only)


def _scaled(memory: Any) -> Any:
    """Return the memory that is asked about."""
    if isinstance(memory, Sequence) and not isinstance(memory, str):
        return [_scaled(one) for one in memory]
    return None if memory is None else int(MORE * nbytes("explain", "memory", memory))


def explain_node(pricing: StagePricing, plan: Plan, node: Node) -> Explanation:
    """Explain the place of a node in a plan: what must be in its part, and what moving it costs.

    Args:
        pricing: the prices by which the plan was made.
        plan: the plan.
        node: the node.
    """
    flow, request = pricing.flow, pricing.request
    asked, reasons = node, []
    if node in flow.followers:
        node = flow.producer(node)
        reasons.append(f"It is a member of the tuple that {node.name} returns, and goes with it.")
    parts = [key for key in plan.places.get(node, ()) if key is not PARENT]
    seconds, held = request.seconds.get(node, 0.0), request.costs.nbytes(asked)
    where = f" of {module_path(asked)}" if module_path(asked) else ""
    place = f"in stage {listed(list(map(part_title, parts)), _NAMED)}" if parts else "in the parent"
    time = f"; it takes {duration(seconds, pricing.unit)} and produces {size(held)}" if parts else ""
    moves, changes = StageMoves(pricing, plan), tuple[ChangedPlan, ...]()
    if node.op in _KINDS:
        reasons.append(_KINDS[node.op][1])
    elif not parts:
        reasons.append("The plan gives it no part, so the parent computes it.")
    elif not moves.are_stages:
        reasons.append("Moves are not priced for this plan.")
    else:
        if len(parts) > 1:
            reasons.append("Each of these parts computes its own copy instead of receiving one.")
        reasons += [
            f"It must be in one stage with {listed([n.name for n in nodes if n is not node], _NAMED)}: {why}."
            for nodes, why in moves.together.get(node, ())
        ]
        changes = tuple(change for step in (-1, 1) if (change := moves.move(node, step)) is not None)
    head = f"{asked.name} is {_KINDS[asked.op][0] if asked.op in _KINDS else op_of(asked)}{where}, {place}{time}."
    data: dict[str, Any] = {
        "kind": "node",
        "node": asked.name,
        "op": op_of(asked),
        "module": module_path(asked),
        "parts": list(map(part_title, parts)),
        "seconds": seconds,
        "bytes": held,
        "reasons": reasons,
        "changes": [change.to_dict() for change in changes],
        "unit": pricing.unit,
    }
    return Explanation(data, (head, *reasons, *([changes_table("moved", changes)] if changes else [])))


class StageMoves:
    """Moves of a node to the stage beside its own, with all that must go along.

    Moved to the next stage, a node takes along what reads it in its own stage; moved to the stage before, what it reads
    there. Nodes that must be in one stage go together. So every move leaves a plan that runs::

        stage 1:  a -> b -> c        b to stage 2: b and c;  b to stage 0: a and b

    Attributes:
        pricing: what prices plans.
        plan: the plan, whose parts run one after another.
        keys: the parts in the order in which they run.
        together: node -> the sets that must be in one stage, with the reason; only sets that the plan keeps together.
    """

    def __init__(self, pricing: StagePricing, plan: Plan) -> None:
        self.pricing, self.plan = pricing, plan
        self.keys = pricing.parts_of(plan)
        self.together: dict[Node, list[tuple[tuple[Node, ...], str]]] = {}
        for nodes, why in pricing.flow.fact(together_because):
            if len({plan.places.get(node, ()) for node in nodes}) == 1:
                for node in nodes:
                    self.together.setdefault(node, []).append((nodes, why))

    @property
    def are_stages(self) -> bool:
        """Whether each part is a stage on one device and every node is in a part, so that moves can be priced."""
        pricing, plan = self.pricing, self.plan
        placed = all(plan.places.get(node) and PARENT not in plan.places[node] for node in pricing.flow.nodes)
        is_priced = plan.claim is None or plan.claim.objective in _MOVABLE
        one_each = len(pricing.devices_of(plan)) >= len(self.keys) > 1
        return placed and is_priced and one_each and not pricing.replicated

    def closure(self, node: Node, step: int) -> list[Node]:
        """Return what moves if a node moves to the next part (1) or the one before (-1)."""
        flow, own = self.pricing.flow, self.plan.home(node)
        before = {n: waits_for(flow, n) for n in flow.nodes}
        beside = nodes_after(before) if step > 0 else before
        found, stack = {node: None}, [node]
        while stack:
            last = stack.pop()
            for other in (*beside[last], *(n for group, _ in self.together.get(last, ()) for n in group)):
                if other not in found and own in self.plan.places.get(other, ()):
                    found[other] = None
                    stack.append(other)
        return sorted(found, key=flow.index.__getitem__)

    def moved(self, nodes: Sequence[Node], source: PartKey, target: PartKey) -> Plan:
        """Return the plan with nodes of one part in another; nodes with copies in both have one there."""
        order = {key: i for i, key in enumerate(self.keys)}
        places = {n: {target if key == source else key for key in self.plan.places[n]} for n in nodes}
        return self.plan.place({n: tuple(sorted(keys, key=order.__getitem__)) for n, keys in places.items()})

    def move(self, node: Node, step: int) -> ChangedPlan | None:
        """Return the plan with a node in the part beside its own; ``None`` if there is no such part."""
        own = self.plan.home(node)
        at = self.keys.index(own) + step
        if not 0 <= at < len(self.keys):
            return None
        target, nodes = self.keys[at], self.closure(node, step)
        along = f", with {len(nodes) - 1} others ({folded_modules(nodes, self.pricing.flow)})" if nodes[1:] else ""
        change = f"to stage {part_title(target)}{along}"
        if all(n in nodes for n in self.pricing.flow.nodes if self.plan.home(n) == own):
            return ChangedPlan(change, (), f"stage {part_title(own)} would be empty")
        try:
            after = self.pricing.figures(self.moved(nodes, own, target))
        except CycleError as error:
            return ChangedPlan(change, (), error.reason)
        if excess := self.pricing.excess(after):
            change = f"{change}, for which a device lacks {size(excess)}"
        return ChangedPlan(change, tuple(compared_stages(self.pricing.figures(self.plan), after, self.pricing.unit)))
