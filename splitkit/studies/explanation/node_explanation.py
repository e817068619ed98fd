"""Why a node is in its stage: what the order forces, what must stay together, and what moving it would cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from splitkit.errors import listed
from splitkit.graph.dataflow import Dataflow, module_path, waits_for
from splitkit.plans.parts import PARENT, PartKey
from splitkit.search.plan_figures import StagePricing
from splitkit.short_repr import brief
from splitkit.studies.explanation.move_text import moved_nodes, price_text
from splitkit.studies.explanation.stage_moves import StageMove, StageMoves
from splitkit.studies.explanation.told import Section, Told
from splitkit.training.saved_values import op_of
from splitkit.units import duration, size
from splitkit.view.data.report import part_title

_NAMED = 4
_KINDS = {"placeholder": "an input", "get_attr": "an attribute", "output": "the output"}


@dataclass(frozen=True)
class NodeExplanation(Told):
    """Why a node is where it is.

    Attributes:
        node: the name of the node.
        op: what it computes.
        module: the module that computes it.
        parts: the parts that compute it, its home first; empty for what the parent holds.
        seconds: its time, backward included where the plan counts it.
        nbytes: the bytes of its value.
        allowed: the parts that may compute it if everything else stays where it is, in run order.
        fast: the stages, from 0, in which some plan that is as fast may have it, by the work before and after it;
            ``None`` where that is not known.
        reasons: what forces it, in sentences.
        moves: the moves to the part before and the part after, where they are possible.
        unit: the unit of the times.
    """

    node: str
    op: str
    module: str
    parts: tuple[PartKey, ...]
    seconds: float
    nbytes: int
    allowed: tuple[PartKey, ...]
    fast: tuple[int, int] | None
    reasons: tuple[str, ...]
    moves: tuple[StageMove, ...]
    unit: str

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; times are in ``unit``, sizes in bytes."""
        return {
            "kind": "node",
            "node": self.node,
            "op": self.op,
            "module": self.module,
            "parts": list(map(part_title, self.parts)),
            "seconds": self.seconds,
            "bytes": self.nbytes,
            "allowed": list(map(part_title, self.allowed)),
            "fast": None if self.fast is None else list(self.fast),
            "reasons": list(self.reasons),
            "moves": [move.to_dict() for move in self.moves],
            "unit": self.unit,
        }

    def sections(self) -> list[Section]:
        """Return the paragraphs."""
        where = f" of {self.module}" if self.module else ""
        place = listed([part_title(key) for key in self.parts], _NAMED) if self.parts else "the parent"
        stage = "stages" if len(self.parts) > 1 else "stage"
        time = f"; it takes {duration(self.seconds, self.unit)} and produces {size(self.nbytes)}" if self.parts else ""
        head = f"{self.node} is {self.op}{where}, in {stage if self.parts else ''} {place}{time}.".replace("  ", " ")
        return [head, *self.reasons, *map(self._move, self.moves)]

    def _move(self, move: StageMove) -> str:
        along = f", together with {moved_nodes(move)}" if len(move.nodes) > 1 else ""
        return f"Moving it to stage {part_title(move.target)}{along}: {price_text(move, self.unit)}"


def explain_node(pricing: StagePricing, moves: StageMoves | None, node: Node) -> NodeExplanation:
    """Explain the place of a node in a plan.

    Args:
        pricing: the prices by which the plan was made.
        moves: the moves of the plan; ``None`` where they are not priced.
        node: the node.
    """
    flow, request = pricing.flow, pricing.request
    asked, extra = node, []
    if node in flow.followers:
        node = flow.producer(node)
        extra = [f"It is a member of the tuple that {node.name} returns, and goes with it; what follows is about that."]
    placeable = flow.is_placeable(node)
    plan = None if moves is None else moves.plan
    parts = tuple(key for key in (plan.places.get(node, ()) if plan else ()) if key is not PARENT)
    allowed, order = _allowed(flow, moves, node) if moves is not None and placeable else ((), [])
    fast = _fast(moves, node) if moves is not None and placeable else None
    reasons = [*extra, *_kind(moves, node), *_together(moves, node), *order, *_fast_text(moves, fast)]
    own = [] if moves is None or not moves.are_stages or not placeable else _moves(moves, node)
    return NodeExplanation(
        asked.name,
        _KINDS.get(asked.op) or op_of(asked),
        module_path(asked),
        parts,
        request.seconds.get(node, 0.0),
        request.costs.nbytes(asked),
        allowed,
        fast,
        (*reasons, *_stuck(moves, node, own)),
        tuple(own),
        pricing.unit,
    )


def _kind(moves: StageMoves | None, node: Node) -> list[str]:
    """Return what the kind of a node says about its place."""
    if node.op == "placeholder":
        return ["It is an input of the graph: the parent holds it and passes it to each part that reads it."]
    if node.op == "get_attr":
        return ["It is a parameter, a buffer or a constant: each part that reads it holds it, and it costs nothing."]
    if node.op == "output":
        return ["It is the output of the graph, which the parent returns."]
    if moves is None:
        return ["Moves are not priced for this objective."]
    places = moves.plan.places.get(node, ())
    if len(places) > 1:
        return [
            "It depends only on inputs and constants and needs no gradient, so each of these parts computes its own "
            "copy instead of receiving one."
            if node in moves.shared
            else "The plan computes it in each of these parts."
        ]
    if not places or places == (PARENT,):
        return ["The plan gives it no part, so the parent computes it."]
    return []


def _together(moves: StageMoves | None, node: Node) -> list[str]:
    found = [] if moves is None else moves.together.get(node, [])
    return [f"It must be in one stage with {_names(n for n in nodes if n is not node)}: {why}." for nodes, why in found]


def _allowed(flow: Dataflow, moves: StageMoves, node: Node) -> tuple[tuple[PartKey, ...], list[str]]:
    """Return the parts that may compute a node if all else stays, and the sentence that says so."""
    plan, keys = moves.plan, moves.keys
    if not moves.is_movable(node) or not moves.are_stages:
        return tuple(key for key in plan.places.get(node, ()) if key is not PARENT), []
    at = {key: i for i, key in enumerate(keys)}
    own = at[plan.home(node)]
    group = {other for nodes, _ in moves.together.get(node, ()) for other in nodes} - {node}
    reads = [n for n in waits_for(flow, node) if moves.is_movable(n)]
    readers = [n for n in moves.readers[node] if moves.is_movable(n)]
    low = max((at[plan.home(n)] for n in reads), default=0)
    high = min((at[plan.home(n)] for n in readers), default=len(keys) - 1)
    if group:
        low = high = own
    first = [n for n in reads if at[plan.home(n)] == low]
    last = [n for n in readers if at[plan.home(n)] == high]
    allowed = tuple(keys[low : high + 1])
    says = []
    if first:
        says.append(f"it must come after {_names(first)} of stage {part_title(keys[low])}")
    if last:
        says.append(f"{_names(last)} of stage {part_title(keys[high])} must come after it")
    if group:
        return allowed, []
    if low == high:
        why = " and ".join(says) if says else "there is no other stage"
        return allowed, [f"If everything else stays in place, the order forces it there: {why}."]
    why = f" ({'; '.join(says)})" if says else ""
    span = f"stages {part_title(keys[low])} to {part_title(keys[high])}"
    return allowed, [f"The order allows {span} if everything else stays in place{why}."]


def _fast(moves: StageMoves, node: Node) -> tuple[int, int] | None:
    """Return the first and last stage in which a plan that is as fast may have a node, by the work around it."""
    pricing, count = moves.pricing, len(moves.keys)
    value = moves.figures.value
    one_each = len(moves.figures.rank_loads) == count and not moves.by_traffic
    if not moves.are_stages or not moves.orders_stages or not one_each or not value or not moves.is_movable(node):
        return None
    seconds, slack = pricing.request.seconds, 1e-9
    before = sum(seconds[n] for n in moves.reach(node, -1) if moves.is_movable(n))
    after = sum(seconds[n] for n in moves.reach(node, 1) if moves.is_movable(n))
    low = max(0, math.ceil(before / value - slack) - 1)
    high = min(count - 1, count - math.ceil(after / value - slack))
    return low, max(low, high)


def _fast_text(moves: StageMoves | None, fast: tuple[int, int] | None) -> list[str]:
    if moves is None or fast is None:
        return []
    low, high = fast
    if (low, high) == (0, len(moves.keys) - 1):
        return []
    span = f"stage {low}" if low == high else f"one of the stages {low} to {high}"
    return [
        f"Every plan of {len(moves.keys)} stages that is as fast and computes each node once has it in {span}: "
        "otherwise the work before and after it does not fit."
    ]


def _moves(moves: StageMoves, node: Node) -> list[StageMove]:
    return [move for step in (-1, 1) if (move := moves.move(node, step)) is not None]


def _stuck(moves: StageMoves | None, node: Node, found: Sequence[StageMove]) -> list[str]:
    """Return why a node of a stage cannot move to a neighbour."""
    if moves is None or not moves.are_stages or not moves.is_movable(node):
        return []
    own, says = moves.plan.home(node), []
    targets = {move.target for move in found}
    for step, what in ((-1, "it needs all of"), (1, "it is needed by all of")):
        target = moves.neighbour(own, step)
        if target is not None and target not in targets:
            says.append(f"It cannot move to stage {part_title(target)}: {what} stage {part_title(own)}.")
    return says


def _names(nodes: Iterable[Node]) -> str:
    return listed([node.name for node in nodes], _NAMED)
