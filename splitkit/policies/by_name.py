"""The policy `ByName`: put modules into parts by patterns of their paths, as people split by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitkit.checks import are_texts, shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_selection import modules_matching
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class ByName:
    """Put each node into the part of the first pattern that matches its module path or that of an enclosing module.

    ``ByName({"transformer.wte": 0, "transformer.h.[0-5]": 0, "transformer.h.*": 1, "lm_head": 1})``. A node that no
    pattern matches stays in the parent.

    Attributes:
        parts: shell-style pattern (``*``, ``?``, ``[0-5]``) of a dotted module path -> part.
    """

    parts: Mapping[str, PartKey]

    def __post_init__(self) -> None:
        parts: object = self.parts
        if not isinstance(parts, Mapping) or not are_texts(parts.keys()):
            text = f"ByName: parts is {shown(parts)}"
            raise PolicyError("SK302", text, "Map patterns of module paths to parts: {'transformer.h.*': 1}.")

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return the plan; SK304 for a pattern that matches no module."""
        found = modules_matching(self.parts, flow.nodes)
        places = {node: self.parts[pattern] for node, pattern in found.items()}
        return Plan.of(places, note=f"{len(set(self.parts.values()))} parts by module path")
