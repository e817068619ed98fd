"""Explains a plan, or the place of one of its nodes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy.optimize import linear_sum_assignment
from torch.fx import Node

from splitkit import policies
from splitkit.costs import Costs, Device, Link, Links
from splitkit.errors import PlanError, PolicyError, SplitError, nearest
from splitkit.frontends.aot import joint_flow
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.joint_marks import forward_outputs, is_joint
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import request_of
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan, module_of_plan, plan_of
from splitkit.prices import price_name, require_costs, unit_of
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.short_repr import brief
from splitkit.studies.explanation.recompute_explanation import choices_of, explain_recompute, explain_value, staged_step
from splitkit.studies.explanation.stage_explanation import explain_node, explain_stages, folded_modules
from splitkit.studies.explanation.told import (
    ComparedFigure,
    Explanation,
    Section,
    Told,
    compared_stages,
    compared_steps,
    figure_text,
)
from splitkit.view.data.report import part_title
from splitkit.view.tables import table


def explain(
    plan: Plan,
    where: Node | str | None = None,
    *,
    policy: Policy | None = None,
    costs: Costs | None = None,
    again: bool = True,
) -> Explanation:
    """Explain why a plan is as it is: what limits it, how far it may be from the best, and what a change would bring.

    Every number is computed as `splitkit.plan` and `splitkit.report` compute it. The explanation prints as text, has
    `to_dict`, and is shown as HTML in a notebook.

    Args:
        plan: a plan, or an object that has one, such as a split.
        where: a node or its name, to explain instead of the whole plan.
        policy: the policy whose limits hold (memory, schedule, links); by default the one that the plan has recorded.
        costs: the prices; by default those that the plan was made with.
        again: whether to plan again with one more device, one fewer and more memory, which takes as long as planning.

    Raises:
        PlanError: SK314 if the graph has no such node, or the plan places no node at all.
        PolicyError: SK301 if ``plan`` is not a plan, or ``policy`` is not a policy.
        CycleError: SK203 if parts wait for each other in a cycle.
    """
    plan = plan_of(plan)
    flow = graph_of_plan(plan)
    if policy is not None and not isinstance(policy, Policy):
        raise PolicyError(
            "SK301", f"{policy!r:.200} is not a policy", "Pass a policy such as Stages(4, memory='80GiB')."
        )
    costs = costs_of_plan(plan, flow) if costs is None else require_costs(costs)
    request = plan.request if policy is None else request_of(policy, costs)
    policy = recorded_policy(plan) if policy is None else policy
    node = None if where is None else _node(flow, where)
    if is_joint(flow.graph):
        joint = joint_flow(flow.root, forward_outputs(flow.graph))
        if node is None:
            return explain_recompute(joint, plan, policy, costs, again=again)
        return explain_value(joint, plan, policy, costs, node)
    pricing = StagePricing.of(flow, plan, costs, policy, request)
    if node is None:
        return explain_stages(pricing, plan, policy, costs, again=again)
    return explain_node(pricing, plan, node)


def _node(flow: Dataflow, where: Node | str) -> Node:
    """Return the node that a question is about."""
    nodes = list[Node](flow.graph.nodes)
    if found := [node for node in nodes if where is node or where == node.name]:
        return found[0]
    names = [node.name for node in nodes]
    remedy = nearest(str(where), names, "Nodes have the names of [n.name for n in gm.graph.nodes].")
    raise PlanError("SK314", f"the plan has no node {str(where)!r:.100}", remedy)


# Finds the graph that a plan is for, and makes its policy again: a policy of splitkit with literals, never code.


_MADE: Mapping[str, Callable[..., Any]] = {name: getattr(policies, name) for name in policies.__all__} | {
    made.__name__: made for made in (Device, Link, Links)
}
"""What may be called in the expression of a policy."""


def graph_of_plan(plan: Plan) -> Dataflow:
    """Return the facts of the graph that a plan is for.

    Raises:
        PlanError: SK314 if it places no node, or its graph has no module any more.
    """
    root = module_of_plan(plan)
    if root is None:
        remedy = "Make a plan with splitkit.plan(gm, policy), and keep gm."
        raise PlanError("SK314", "the plan places no node of a graph module that still exists", remedy)
    return analyze(root)


def recorded_policy(plan: Plan) -> Policy | None:
    """Return the policy that made a plan; ``None`` if the plan does not say, or names a policy of another package."""
    try:
        call = ast.parse(plan.policy.strip(), mode="eval").body
        made: Any = _made(call)
    except (SyntaxError, ValueError, TypeError, LookupError, SplitError, RecursionError, MemoryError):
        return None
    return made if isinstance(made, Policy) else None


def _made(node: ast.expr) -> Any:
    """Return the value of a literal or of the call of a policy."""
    if isinstance(node, ast.Name):  # Random is Random()
        node = ast.Call(node, [], [])
    if isinstance(node, ast.List | ast.Tuple):
        items = map(_made, node.elts)
        return list(items) if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        return {_made(key): _made(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    if not isinstance(node.func, ast.Name):
        raise ValueError("no policy of splitkit")
    words = {word.arg: _made(word.value) for word in node.keywords if word.arg is not None}
    return _MADE[node.func.id](*map(_made, node.args), **words)


# Compares two plans of one graph: what is elsewhere, what each costs, and which is better at what.


_SHOWN = 20  # rows of nodes that moved


@dataclass(frozen=True)
class MovedNodes:
    """Nodes that the second plan has elsewhere.

    Attributes:
        source: their parts in the first plan, as text; ``"parent"`` for the parent, ``"no part"`` for none.
        target: their parts in the second plan, by the names of the first plan's parts where these correspond.
        nodes: their names, in graph order.
        modules: their modules, folded.
    """

    source: str
    target: str
    nodes: tuple[str, ...]
    modules: str


@dataclass(frozen=True)
class PlanComparison(Told):
    """Two plans of one graph.

    Attributes:
        equal: whether each node is in the same parts, except perhaps for their names.
        renamed: part of the second plan -> the part of the first that it corresponds to, where names differ.
        moved: what is elsewhere, the most nodes first.
        figures: what both plans cost, by the same prices.
        note: what the prices are, and what else differs.
        names: what the text calls the plans.
    """

    equal: bool
    renamed: Mapping[str, str]
    moved: tuple[MovedNodes, ...]
    figures: tuple[ComparedFigure, ...]
    note: str
    names: tuple[str, str] = ("the first", "the second")

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; sizes are in bytes."""
        return {
            "equal": self.equal,
            "renamed": dict(self.renamed),
            "moved": [asdict(moved) for moved in self.moved],
            "figures": [figure.to_dict() for figure in self.figures],
            "note": self.note,
        }

    def sections(self) -> list[Section]:
        """Return the paragraphs and tables."""
        first, second = self.names
        renamed = [f"{theirs} of {second} is {ours} of {first}" for theirs, ours in self.renamed.items()]
        names = f"Parts with other names: {'; '.join(renamed)}." if renamed else ""
        if self.equal:
            same = "The plans are equal" + (": only the names of parts differ." if renamed else ".")
            return [same, *filter(None, (names,)), *self._differences()]
        count = sum(len(moved.nodes) for moved in self.moved)
        head = f"{count} node{' is' if count == 1 else 's are'} in a different part in {second}."
        return [head, *filter(None, (names,)), self._moved(), self._table(), self._verdict(), self.note]

    def _differences(self) -> list[Section]:
        """Return what equal places do not show: checkpoints and replicas of parts."""
        return [self._table(), self._verdict()] if any(figure.better for figure in self.figures) else []

    def _moved(self) -> Section:
        rows = [(m.source, m.target, str(len(m.nodes)), m.modules) for m in self.moved[:_SHOWN]]
        left = len(self.moved) - len(rows)
        title = f"the first {_SHOWN} of {len(self.moved)}" if left else ""
        titles = (f"in {self.names[0]}", f"in {self.names[1]}", "nodes", "modules")
        return table(titles, rows, ("nodes",), title, least={"modules": 24})

    def _table(self) -> Section:
        rows = []
        for figure in self.figures:
            first, second = (figure_text(value, figure.unit) for value in (figure.first, figure.second))
            rows.append((figure.name, first, second, figure.change))
        return table(("", *self.names, "change"), rows, (*self.names, "change"))

    def _verdict(self) -> str:
        says = []
        for who, name in zip(("first", "second"), self.names, strict=True):
            if better := [figure.name for figure in self.figures if figure.better == who]:
                says.append(f"Better in {name}: {', '.join(better)}.")
        return " ".join(says) or "Neither is better in any figure."


def compare_plans(a: Plan, b: Plan, *, policy: Policy | None = None, costs: Costs | None = None) -> PlanComparison:
    """Compare two plans of one graph, by the prices and limits of the first.

    Args:
        a: the first plan, or an object that has one, such as a split.
        b: the second; it may be of another capture of the same model.
        policy: the policy whose schedule, links and memory hold; by default the one that the first plan has recorded.
        costs: the prices; by default those that the first plan was made with.

    Raises:
        FileError: SK502 if the plans are for different graphs; it names the first difference.
        PlanError: SK314 if one of them places no node.
        PolicyError: SK301 if one of them is not a plan.
    """
    first, second = plan_of(a), plan_of(b)
    flow, other = graph_of_plan(first), graph_of_plan(second)
    if other.graph is not flow.graph:
        second = Plan.from_dict(flow.graph, second.to_dict())
    costs = costs_of_plan(first, flow) if costs is None else require_costs(costs)
    request = first.request if policy is None else request_of(policy, costs)
    policy = recorded_policy(first) if policy is None else policy
    renamed = _matched(flow, first, second)
    if is_joint(flow.graph):
        figures, places = _of_steps(flow, first, second, costs)
    else:
        pricings = [StagePricing.of(flow, plan, costs, policy, request) for plan in (first, second)]
        one, two = (pricing.figures(plan) for pricing, plan in zip(pricings, (first, second), strict=True))
        figures = [*compared_stages(one, two, pricings[0].unit), *_memories(one, two, renamed)]
        places = (first.places, second.places)
    moved = _moved(flow, *places, renamed)
    note = _note(first, second, costs)
    names = {part_title(key): part_title(found) for key, found in renamed.items() if key != found}
    return PlanComparison(not moved, names, moved, tuple(figures), note)


def _note(first: Plan, second: Plan, costs: Costs) -> str:
    says = [f"Both plans are priced by {price_name(costs)}."]
    if first.policy:
        says.append(f"The first plan's policy is {first.policy}.")
    if second.policy and second.policy != first.policy:
        says.append(f"The second plan's policy is {second.policy}.")
    return " ".join(says)


def _matched(flow: Dataflow, first: Plan, second: Plan) -> dict[PartKey, PartKey]:
    """Return part of the second plan -> part of the first that it corresponds to.

    Parts of one name correspond, unless other names make the plans equal. Parts of other names correspond so that as
    many nodes as possible stay where they are.
    """
    homes = [(first.home(node), second.home(node)) for node in flow.nodes]
    exact = paired(homes, list(first.parts), list(second.parts))
    if all(exact.get(theirs, theirs) == ours for ours, theirs in homes):
        return exact
    known = {key: key for key in second.parts if key in first.parts}
    ours, theirs = ([k for k in plan.parts if k not in known] for plan in (first, second))
    return known | paired(homes, ours, theirs)


def _moved(
    flow: Dataflow,
    first: Mapping[Node, tuple[PartKey, ...]],
    second: Mapping[Node, tuple[PartKey, ...]],
    renamed: Mapping[PartKey, PartKey],
) -> tuple[MovedNodes, ...]:
    """Return the nodes with other places, grouped by the places."""
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in flow.nodes:
        before = first.get(node, (PARENT,))
        after = second.get(node, (PARENT,))
        mapped = tuple(renamed.get(key, key) if key is not PARENT else key for key in after)
        if before[:1] != mapped[:1] or set(before) != set(mapped):
            unmatched = {key for key in after if key is not PARENT and key not in renamed}
            target = _places(
                [
                    f"{name_of_part(k)} (new)" if o in unmatched else name_of_part(k)
                    for k, o in zip(mapped, after, strict=True)
                ]
            )
            groups.setdefault((_places(map(name_of_part, before)), target), []).append(node)
    rows = [
        MovedNodes(source, target, tuple(n.name for n in nodes), folded_modules(nodes, flow))
        for (source, target), nodes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -len(row.nodes)))


def _places(names: Any) -> str:
    return " and ".join(names) or "no part"


def _memories(one: StageFigures, two: StageFigures, renamed: Mapping[PartKey, PartKey]) -> Iterator[ComparedFigure]:
    """Yield the peak of each part of the first plan, and of the others; by rank where ranks have several parts."""
    if len(one.held) != len(one.loads) or len(two.held) != len(two.loads):
        for rank in range(max(len(one.held), len(two.held))):
            first, second = (figures.peaks[rank] if rank < len(figures.held) else None for figures in (one, two))
            yield ComparedFigure(f"memory of rank {rank}", first, second, "bytes")
        return
    before = dict(zip(one.loads, one.peaks, strict=True))
    after = {renamed.get(key, key): peak for key, peak in zip(two.loads, two.peaks, strict=True)}
    for key in dict.fromkeys([*before, *after]):
        yield ComparedFigure(f"memory of {part_title(key)}", before.get(key), after.get(key), "bytes")


def _of_steps(
    flow: Dataflow, first: Plan, second: Plan, costs: Costs
) -> tuple[Sequence[ComparedFigure], tuple[Mapping[Node, tuple[PartKey, ...]], Mapping[Node, tuple[PartKey, ...]]]]:
    """Return the figures of two plans of a training step, and where they compute each node."""
    joint = joint_flow(flow.root, forward_outputs(flow.graph))
    found = [choices_of(joint, plan, costs)[0] for plan in (first, second)]
    one, two = (choices.seen for choices in found)
    staged = [bool(choices.stage_of) for choices in found]
    if staged[0] != staged[1]:
        raise PlanError(
            "SK316",
            "one plan divides a training step into stages, and the other does not",
            "Compare plans of one kind: two of Pipeline, or two of one device.",
        )
    unit = unit_of(costs)
    has_peak = all(choices.has_peak or choices.moved for choices in found)
    if not staged[0]:
        figures = compared_steps(one, two, unit, has_peak, [choices.moved for choices in found])
        return figures, (found[0].plan.places, found[1].plan.places)
    steps, runs = zip(*(staged_step(joint, plan, costs) for plan in (first, second)), strict=True)
    one, two = (replace(seen, saved=step.saved_bytes) for seen, step in zip((one, two), steps, strict=True))
    figures = compared_steps(one, two, unit, has_peak)
    if any(runs):
        (step, fullest), (other, fuller) = ((run.seconds, max(run.peaks)) if run else (None, None) for run in runs)
        figures.insert(0, ComparedFigure("step", step, other, unit))
        figures.insert(1, ComparedFigure("fullest device", fullest, fuller, "bytes"))
    return figures, (first.places, second.places)


# Pairs the parts of two plans so that as many nodes as possible are in paired parts, and names parts.


A = TypeVar("A", bound=Hashable)
B = TypeVar("B", bound=Hashable)


def paired(homes: Iterable[tuple[A, B]], ours: Sequence[A], theirs: Sequence[B]) -> dict[B, A]:
    """Return part of the second plan -> part of the first, one to one; parts without a common node have none.

    Args:
        homes: for each node, its part in the first plan and in the second.
        ours: the parts of the first plan that are paired.
        theirs: the parts of the second plan that are paired.
    """
    row, column = {key: i for i, key in enumerate(theirs)}, {key: i for i, key in enumerate(ours)}
    shared = np.zeros((len(theirs), len(ours)))
    for here, there in homes:
        if there in row and here in column:
            shared[row[there], column[here]] += 1
    pairs = zip(*linear_sum_assignment(-shared), strict=True)
    return {theirs[i]: ours[j] for i, j in pairs if shared[i, j]}


def name_of_part(key: PartKey) -> str:
    """Return the name of a part, or ``"parent"``."""
    return "parent" if key is PARENT else part_title(key)
