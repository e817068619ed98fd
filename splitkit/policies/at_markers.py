"""The policy `AtMarkers`: cut at nodes that people put into a model, or at borders of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow, module_path, reads
from splitkit.graph.node_selection import Ops, no_module, rule_of
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan

Marker = Ops | Mapping[str, Any]
"""Ops or a rule, or the ``split_spec`` of `torch.distributed.pipelining`: module path -> ``"beginning"`` or ``"end"``
(or torch's ``SplitPoint``)."""


@dataclass(frozen=True)
class AtMarkers:
    """Begin a new part at each marker; no part is empty. Parts are ``0, 1, 2 ...`` in graph order.

    A marker that computes a value is the first node of its part. A marker without inputs and readers (``pipe_split()``)
    stays in the parent, so that no part has to remove it; several markers in a row begin a single part. State ops can
    be markers too, although they are not placed: a rule for ``_set_grad_enabled`` cuts where the grad mode is set::

        embed  h.0  |  h.1  |  |  head        AtMarkers("pippy::_pipe_split"), where | is a marker, or
        ────0─────     ─1─        ─2──        AtMarkers({"h.0": "end", "h.1": "end"})

    The rules are those of export's ``sequential_split`` and of ``torch.distributed.pipelining.pipeline``.

    Attributes:
        marker: ops, names of ops, a rule ``node -> bool`` that is called for every node but inputs, attributes and the
            output, or a mapping from module paths to ``"beginning"`` or ``"end"``. A module that is called several
            times is cut at each call, but not between consecutive calls.
    """

    marker: Marker

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with a part per marker.

        Raises:
            PolicyError: SK302 for an object that is not a marker, SK304 for a module that the graph does not have or a
                name that is not an op.
        """
        begins = _borders(self.marker, flow) if isinstance(self.marker, Mapping) else _marked(self, self.marker, flow)
        labels: dict[Node, PartKey] = {}
        part = 0
        is_begun, is_due = False, False
        for node in flow.index:
            is_marker = begins(node)
            is_due |= is_marker and is_begun
            if not flow.is_placeable(node):
                continue
            if is_marker and not reads(node) and not node.users:
                labels[node] = PARENT
                continue
            part += is_due
            is_begun, is_due = True, False
            labels[node] = part
        return Plan.of(labels, note=f"{part + 1} parts between markers")


def _marked(policy: AtMarkers, ops: Ops, flow: Dataflow) -> Callable[[Node], bool]:
    rule = rule_of(policy, ops, flow)
    return lambda node: node.op not in ("placeholder", "get_attr", "output") and rule(node)


def _borders(spec: Mapping[str, Any], flow: Dataflow) -> Callable[[Node], bool]:
    """Return a rule for the first node of each visit of a module, or the first node after it."""
    paths = {node: module_path(node) for node in flow.nodes}
    marked: set[Node] = set()
    for path, side in spec.items():
        is_beginning = _is_beginning(path, side)
        inside = {p: p == path or p.startswith(f"{path}.") for p in dict.fromkeys(paths.values())}
        if not any(inside.values()):
            raise _no_module(path, paths.values())
        before = False
        for node, at in paths.items():
            if inside[at] != before and inside[at] == is_beginning:
                marked.add(node)
            before = inside[at]
    return marked.__contains__


def _is_beginning(path: str, side: object) -> bool:
    name = str(getattr(side, "name", side)).lower()
    if name not in ("beginning", "end"):
        raise PolicyError("SK302", f"AtMarkers: {path!r} is to be cut at {side!r}", "Use 'beginning' or 'end'.", [path])
    return name == "beginning"


def _no_module(path: str, paths: Any) -> PolicyError:
    known = list(dict.fromkeys(".".join(p.split(".")[:i]) for p in paths if p for i in range(1, p.count(".") + 2)))
    return no_module(f"the graph has no module {path!r}", path, known)
