"""Puts what a decoder computes from a cache alone into the stage that reads it, so that no cache crosses a border."""

from __future__ import annotations

from torch import fx
from torch.fx import Node

from splitkit.plans.record import Plan


def beside_readers(gm: fx.GraphModule, plan: Plan, caches: frozenset[str]) -> Plan:
    """Return the plan with every node that depends on caches and constants alone in the first part that reads it.

    Args:
        gm: the captured decoder.
        plan: parts in the order of the stages.
        caches: the names of the inputs that are caches.
    """
    order = {key: i for i, key in enumerate(plan.parts)}
    alone = set[Node]()
    for node in gm.graph.nodes:
        if node.op == "get_attr" or (node.op == "placeholder" and str(node.target) in caches):
            alone.add(node)
        elif node.op.startswith("call_") and node.all_input_nodes and alone.issuperset(node.all_input_nodes):
            alone.add(node)
    moved = dict(plan.places)
    for node in reversed(gm.graph.nodes):
        readers = [moved[user][0] for user in node.users if moved.get(user)]
        if node in alone and moved.get(node) and readers:
            moved[node] = (min(readers, key=lambda key: order[key]),)
    return plan.place({node: keys for node, keys in moved.items() if keys != plan.places[node]})
