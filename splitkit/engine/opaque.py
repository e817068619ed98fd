"""What parts may do with opaque code: read attributes that it may bind anew, and share its regions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.scope import Scope, region_kind
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan


def read_in_time(flow: Dataflow, places: dict[Node, tuple[PartKey, ...]]) -> None:
    """Let the host read an attribute that opaque code may bind anew before a part of its readers begins.

    A part reads it itself where no other part runs opaque code between the read and what uses it.

    Args:
        flow: facts about the graph.
        places: a place for every node; changed in place.
    """
    if not flow.bindings.reads:
        return
    runs = _Runs(flow, places)
    for node in flow.bindings.reads:
        keys = places[node]
        if any(key is not HOST and runs.other_between(node, key) for key in keys):
            places[node] = (HOST,)


class _Runs:
    """Opaque nodes that follow one another in one part."""

    def __init__(self, flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]]) -> None:
        self.flow, self.places = flow, places
        opaque = flow.bindings.opaque
        self.number = {node: i for i, node in enumerate(opaque)}
        self.start = [0] * len(opaque)
        for i, (before, node) in enumerate(pairwise(opaque), start=1):
            self.start[i] = self.start[i - 1] if places[before] == places[node] else i
        self.before: dict[Node, int] = {}  # node -> how many opaque nodes come before it
        count = 0
        for node in flow.scope:
            self.before[node] = count
            count += node in self.number

    def other_between(self, read: Node, key: PartKey) -> bool:
        """Whether opaque code of another part comes between an attribute and its users in the part ``key``."""
        users = (u for u in read.users if key in self.places.get(u, ()))
        first, end = self.before[read], max((self.before[u] for u in users), default=0)
        if end <= first:
            return False
        return self.start[end - 1] > first or self.places[self.flow.bindings.opaque[end - 1]] != (key,)


def check_opaque(flow: Dataflow, plan: Plan) -> None:
    """Refuse a plan in which opaque code would not do what it does in the graph.

    Raises:
        PlanError: SK217 for a region that opaque code may leave in another state, and that several parts would open;
            SK218 for opaque code that may bind attributes of the graph module itself.
    """
    by = flow.bindings.of_root
    if by is not None:
        raise PlanError(
            "SK218",
            f"{by.name} can get at the graph module itself and may bind its attributes anew, of which each part has "
            "its own",
            "Keep what it changes in a submodule, or say what it does with splitkit.extend.declare.",
            [by],
        )
    if any(e.ambient for e in flow.effects.values()):
        _check_regions(flow, plan)


def _check_regions(flow: Dataflow, plan: Plan) -> None:
    """A region is opened again in each part, in the state of its enter: not in that in which opaque code left it."""
    left: dict[
        object, Node
    ] = {}  # region or setting that is in force -> the first node that may have changed its state
    for node, scope in flow.scope.items():
        if node.op in ("placeholder", "get_attr"):
            continue
        now = _in_force(flow.final if node.op == "output" else scope)
        left = {kept: by for kept, by in left.items() if kept in now} if left else left
        for by in {left[kept]: None for kept in now if kept in left}:
            keys = plan.places[by]
            if plan.places[node] != keys or HOST in keys or node.op == "output":
                raise _region_refused(node, by)
        if flow.effects[node].ambient:
            left.update((kept, node) for kept in now if kept not in left)


def _in_force(scope: Scope) -> Iterable[object]:
    regions = (enter for enter in scope.regions if region_kind(enter).name != "record_function")
    return dict.fromkeys((*regions, *scope.settings))


def _region_refused(node: Node, by: Node) -> PlanError:
    what = "the graph ends" if node.op == "output" else f"{node.name} runs"
    return PlanError(
        "SK217",
        f"{what} in a region or mode that was opened before {by.name}, which may have changed the ambient state; "
        "another part would open it again, as it was before",
        f"Give {by.name} and all that follows it in the region one part, or say what it does with "
        "splitkit.extend.declare.",
        [by, node],
    )
