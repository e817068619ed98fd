"""Rules for plans of graphs with opaque code, which may rebind attributes and change ambient state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.ops.ambient_calls import may_change_modes
from splitkit.graph.scope import Scope, region_kind
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan


def hoist_rebindable_reads(flow: Dataflow, places: dict[Node, tuple[PartKey, ...]]) -> None:
    """Let the parent read attributes that opaque code may rebind before a part that uses them begins.

    A part reads such an attribute itself if no other part runs opaque code between the read and its uses.

    Args:
        flow: facts about the graph.
        places: the parts of every node; modified in place.
    """
    if not flow.bindings.reads:
        return
    segments = _OpaqueSegments(flow, places)
    for node in flow.bindings.reads:
        keys = places[node]
        if any(key is not PARENT and segments.other_between(node, key) for key in keys):
            places[node] = (PARENT,)


class _OpaqueSegments:
    """Maximal sequences of opaque nodes that run in one part."""

    def __init__(self, flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]]) -> None:
        self.flow, self.places = flow, places
        opaque = flow.bindings.opaque
        self.number = {node: i for i, node in enumerate(opaque)}
        # start[i]: the index of the first opaque node in the segment of node i
        self.start = [0] * len(opaque)
        for i, (before, node) in enumerate(pairwise(opaque), start=1):
            self.start[i] = self.start[i - 1] if places[before] == places[node] else i
        self.before: dict[Node, int] = {}  # node -> how many opaque nodes come before it
        count = 0
        for node in flow.scope:
            self.before[node] = count
            count += node in self.number

    def other_between(self, read: Node, key: PartKey) -> bool:
        """Whether opaque code of another part runs between the read of an attribute and its uses in part ``key``."""
        users = (u for u in read.users if key in self.places.get(u, ()))
        first, end = self.before[read], max((self.before[u] for u in users), default=0)
        if end <= first:
            return False
        # All opaque code between the read and the last use must lie in one segment, and that must belong to `key`.
        return self.start[end - 1] > first or self.places[self.flow.bindings.opaque[end - 1]] != (key,)


def check_opaque(flow: Dataflow, plan: Plan) -> None:
    """Raise an error for a plan in which opaque code would not have the effects that it has in the graph.

    Raises:
        PlanError: SK217 for a region whose state opaque code may change and that several parts would open; SK218 for
            opaque code that may rebind attributes of the graph module itself.
    """
    by = flow.bindings.of_root
    if by is not None:
        raise PlanError(
            "SK218",
            f"{by.name} can reach the graph module itself and may rebind its attributes, of which each part has "
            "its own",
            "Keep the attributes that it changes in a submodule, or declare its effects with splitkit.extend.declare.",
            [by],
        )
    if any(e.ambient for e in flow.effects.values()):
        _check_regions(flow, plan)


def _check_regions(flow: Dataflow, plan: Plan) -> None:
    """Raise SK217 for a region that opaque code may have changed: another part would open it in its original state."""
    # region or setting in force -> the first node that may have changed its state
    left: dict[object, Node] = {}
    for node, scope in flow.scope.items():
        if node.op in ("placeholder", "get_attr"):
            continue
        now = _in_force(flow.final if node.op == "output" else scope)
        left = {kept: by for kept, by in left.items() if kept in now} if left else left
        for by in {left[kept]: None for kept in now if kept in left}:
            keys = plan.places[by]
            if plan.places[node] != keys or PARENT in keys or node.op == "output":
                raise _region_refused(node, by)
        if may_change_modes(node, flow.effects[node]):
            left.update((kept, node) for kept in now if kept not in left)


def _in_force(scope: Scope) -> Iterable[object]:
    regions = (enter for enter in scope.regions if region_kind(enter).name != "record_function")
    return dict.fromkeys((*regions, *scope.settings))


def _region_refused(node: Node, by: Node) -> PlanError:
    what = "the graph ends" if node.op == "output" else f"{node.name} runs"
    return PlanError(
        "SK217",
        f"{what} in a region or mode that was opened before {by.name}, which may have changed the ambient state; "
        "another part would open it again in its original state",
        f"Put {by.name} and all nodes after it in the region into one part, or declare its effects with "
        "splitkit.extend.declare.",
        [by, node],
    )
