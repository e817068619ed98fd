"""Supported and other ops apart, in as few parts as there can be: what backends with gaps need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn
from torch.fx import Node

from splitkit.checks import count, is_word, settle, shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.select import Ops, Rule, rule_of
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan
from splitkit.search.levels import Kinds, lowest, sink


@runtime_checkable
class _OperatorSupport(Protocol):
    """What torch's partitioners ask: ``torch.fx.passes.operator_support.OperatorSupportBase``."""

    def is_node_supported(self, submodules: Mapping[str, nn.Module], node: Node) -> bool:
        """Whether a backend can run ``node``."""
        ...


@dataclass(frozen=True)
class BySupport:
    """Supported nodes become parts, as few as there can be; the others stay in the host, or become parts as well.

    Every node gets the lowest level that its predecessors (by data or effect) allow; a level ends where support
    changes. Levels never fall along an edge, so there is no cycle; and a chain that changes support ``k`` times needs
    ``k`` borders in any plan, so no plan has fewer parts. Then nodes move to the part that reads them, if that sends
    fewer bytes. Linear in nodes and edges::

        a ── B ── c        lower case: supported      parts 0 = {a, d, e}, 1 = {c, f}, B and E in the host
        d ── e ── E ── f

    ``a`` and ``d`` do not touch: parts may be spread over the graph, as in torch's ``CapabilityBasedPartitioner``. That
    one never made fewer parts in our tests, took 6.7 s for 2,000 nodes (this: 0.02 s), and knows no effects.

    Attributes:
        rule: what is supported: ops, names of ops, ``node -> bool``, or an object with ``is_node_supported`` as torch's
            partitioners take it. Members of a tuple are with its producer, whatever the rule says of ``getitem``.
        unsupported: ``"host"``: unsupported nodes stay in the host, parts are ``0, 1, 2 ...``; ``"parts"``: they are
            parts too, **even parts are supported, odd ones not**.
        min_size: parts of fewer nodes are not worth a call of the backend: they count as unsupported.
    """

    rule: Ops | _OperatorSupport
    unsupported: Literal["host", "parts"] = "host"
    min_size: int = 1

    def __post_init__(self) -> None:
        settle(self, "min_size", count)
        if not is_word(self.unsupported, "host", "parts"):
            raise PolicyError("SK302", f"BySupport(unsupported={shown(self.unsupported)})", "Use 'host' or 'parts'.")

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Number the levels; SK302 for what is no rule, SK304 for a name that is no op."""
        ask = self._rule(flow)
        kinds = {node: ask(node) for node in flow.nodes}
        levels = lowest(flow, kinds, 1)
        sizes = Counter(levels.values())
        kinds = {node: yes and sizes[levels[node]] >= self.min_size for node, yes in kinds.items()}
        labels = self._kept(flow, costs, kinds) if self.unsupported == "host" else self._alternating(flow, costs, kinds)
        count = len({labels[node] for node, yes in kinds.items() if yes})
        return Plan.of(labels, f"{count} supported parts of {sum(kinds.values())} of {len(kinds)} nodes")

    def _kept(self, flow: Dataflow, costs: Costs, kinds: Kinds) -> dict[Node, PartKey]:
        """Nodes in the host need no part: let them have level 0, so that supported levels are 1, 3, 5 ..."""
        levels = sink(flow, costs, kinds, lowest(flow, kinds, 1), least=self.min_size)
        return {node: levels[node] // 2 if yes else HOST for node, yes in kinds.items()}

    def _alternating(self, flow: Dataflow, costs: Costs, kinds: Kinds) -> dict[Node, PartKey]:
        """Whichever kind begins, if that makes fewer parts."""
        first, levels = min(((i, lowest(flow, kinds, i)) for i in (0, 1)), key=lambda pair: len(set(pair[1].values())))
        levels = sink(flow, costs, kinds, levels, least=self.min_size)
        return {node: level + first for node, level in levels.items()}

    def _rule(self, flow: Dataflow) -> Rule:
        rule: Any = self.rule
        if not isinstance(rule, type) and isinstance(rule, _OperatorSupport):
            submodules = dict(flow.root.named_modules())
            return rule_of(self, lambda node: rule.is_node_supported(submodules, node), flow)
        return rule_of(self, rule, flow)
