"""The policy `AroundOps`: cut around listed ops, as piecewise compilation and CUDA graphs need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.graph.dataflow import Dataflow, waits_for
from splitkit.graph.node_selection import Ops, Rule, rule_of
from splitkit.graph.storages import value_of
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import recompute_sizes

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


@dataclass(frozen=True)
class AroundOps:
    """Make one part of consecutive listed ops, and one part of the nodes between two such parts.

    Parts are numbered in graph order and run in this order, so no read moves across a write. **Odd parts have the
    listed ops, even parts the other nodes** (see `is_listed`); there is no part 0 if a listed op comes first::

        rms qkv attn out norm moe mlp      ops = [attn, moe]
        ──0──── ─1── ──2───── ─3─ ─4─

    Nodes that only allocate memory do not get a part of their own. They join the part before the listed ops, so that a
    buffer which attention fills keeps the address that a CUDA graph recorded; or they join the listed ops if their
    inputs are not ready in the part before. A ``torch.Size`` never crosses: each part recomputes it from the tensor.

    The rule is vLLM's ``split_graph`` (vllm/compilation/backends.py) and TensorRT-LLM's piecewise optimizer.

    Attributes:
        ops: ops, names of ops, or a rule ``node -> bool``; see `splitkit.graph.node_selection.Ops`. Ops that the graph
            does not have are not errors: such lists are written for many models.
    """

    ops: Ops

    @staticmethod
    def is_listed(key: PartKey) -> bool:
        """Return whether part ``key`` of such a plan has listed ops."""
        return isinstance(key, int) and key % 2 == 1

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan whose parts are ints.

        Raises:
            PolicyError: SK302 for an object that is not an op, SK304 for a name that is not one.
        """
        labels = _number(flow, rule_of(self, self.ops, flow))
        listed = sum(map(self.is_listed, set(labels.values())))
        return recompute_sizes(flow, Plan.of(labels, note=f"cut around {listed} runs of listed ops"))


def _number(flow: Dataflow, listed: Rule) -> dict[Node, int]:
    runs = [(is_listed, list(run)) for is_listed, run in groupby(flow.nodes, listed)]
    idle = [not is_listed and all(map(_only_allocates, run)) for is_listed, run in runs]
    first = part = int(bool(runs) and (runs[0][0] or (idle[0] and len(runs) > 1)))
    labels: dict[Node, int] = {}
    for (is_listed, run), empty in zip(runs, idle, strict=True):
        if not empty:
            part += is_listed != part % 2
        for node in run:
            early = empty and part > first and _is_ready(flow, node, labels, part - 1)
            labels[node] = part - early
    return labels


def _is_ready(flow: Dataflow, node: Node, labels: Mapping[Node, int], part: int) -> bool:
    return all(labels[n] <= part for n in waits_for(flow, node))


def _only_allocates(node: Node) -> bool:
    """Return whether a node allocates memory, or computes the size of an allocation."""
    value = value_of(node)
    if isinstance(value, int | torch.SymInt | torch.Size):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op != "call_module" and str(name).partition(".")[0] in _ALLOCATIONS
