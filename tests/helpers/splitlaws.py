"""Assert that a split was emitted as planned, and that it can be put together again."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit.engine.inline import inline
from splitkit.engine.split import Split
from splitkit.errors import CheckError
from splitkit.graph.dataflow import reads
from splitkit.graph.scope import is_state_op
from splitkit.plans.parts import PARENT, PartKey


def assert_emitted_as_planned(split: Split) -> None:
    """Assert laws 2 and 3: each node is emitted once in each of its parts, and runs after everything it depends on.

    Raises:
        CheckError: SK701, naming the nodes.
    """
    when = _run_positions(split)
    planned = {(node, key) for node, keys in split.plan.items() for key in keys}
    if when.keys() != planned:
        raise CheckError("SK701", f"not emitted as planned: {sorted(map(str, when.keys() ^ planned))}")
    for node, key in planned:
        before = [(r, split.plan.source(r, key)) for r in reads(node)]
        before += [(e, k) for e in split.flow.after.get(node, ()) for k in split.plan[e]]
        early = [str(b) for b in before if not when[b] < when[node, key]]
        if early:
            raise CheckError("SK701", f"{node} in part {key!r} runs before {early}")


def assert_inlines(split: Split) -> None:
    """Assert that `splitkit.inline` restores the original graph, node by node, with its parameters and buffers.

    Raises:
        CheckError: SK701, with the first node that differs.
    """
    original, again = split.flow.root, inline(split)
    before, after = _node_records(original), _node_records(again)
    for one, other in zip_longest(before, after):
        if one != other:
            raise CheckError("SK701", f"inline gives {other} instead of {one}")
    if _tensors(original) != _tensors(again) or original.training != again.training:
        raise CheckError("SK701", f"inline gives the tensors {list(_tensors(again))}, not {list(_tensors(original))}")


def _node_records(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Return all fields of each node. Values of meta go by identity, since inlining passes them on."""
    return [
        (n.name, n.op, n.target, repr((n.args, n.kwargs)), n.type, {field: id(v) for field, v in n.meta.items()})
        for n in gm.graph.nodes
    ]


def _tensors(gm: fx.GraphModule) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in gm.state_dict(keep_vars=True).items()]


def _run_positions(split: Split) -> dict[tuple[Node, PartKey], tuple[int, int]]:
    """Return (node, part) -> (step of the parent, position in the part), counted in the emitted graphs."""
    steps = {n: i for i, n in enumerate(split.module.graph.nodes)}
    calls = {str(n.target): i for n, i in steps.items() if n.op == "call_module"}
    calls |= {str(n.args[0].target): i for n, i in steps.items() if n.target is checkpoint}
    names = {id(child): name for name, child in split.module.named_children()}
    when = {(node, PARENT): (steps[copy], 0) for node, copy in split.copies[PARENT].items()}
    for key, part in split.parts.items():
        inside = {n: i for i, n in enumerate(part.graph.nodes)}
        computed = [n for n in inside if n.op.startswith("call_") and not is_state_op(n)]
        if len(computed) != sum(n.op != "get_attr" for n in split.copies[key]):
            raise CheckError("SK701", f"part {key!r} computes nodes that are not in the plan: {computed}")
        # a part's nodes run together, at the step of the parent that calls it
        step = calls[names[id(part)]]
        when |= {(node, key): (step, inside[copy]) for node, copy in split.copies[key].items()}
    return when
