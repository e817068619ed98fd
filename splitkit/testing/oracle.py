"""The laws as assertions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import fx
from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit.engine.complete import check, complete
from splitkit.engine.inlining.inline import inline
from splitkit.engine.split import Split
from splitkit.errors import CheckError
from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.scope import is_state_op
from splitkit.plans.order import part_order
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan
from splitkit.testing.compare import GRADIENT_TOLERANCE, compare


def assert_same(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *inputs: Any,
    seed: int = 0,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> None:
    """Law 1: outputs, buffers and inputs bitwise, gradients to rounding. See `splitkit.compare`.

    Raises:
        CheckError: SK701, naming the tensors that differ.
    """
    compare(reference, candidate, *inputs, seed=seed, tolerance=tolerance, **kwargs).raise_if_different()


def assert_legal(flow: Dataflow, plan: Plan) -> None:
    """Law 4: raise the PlanError that says why the plan cannot be right, if it cannot."""
    whole = complete(flow, plan)
    check(flow, whole)
    part_order(flow, whole)


def assert_emitted_as_planned(split: Split) -> None:
    """Laws 2 and 3: every node is emitted once for each of its places, and nothing runs before what it waits for.

    Raises:
        CheckError: SK701, naming the nodes.
    """
    when = _moments(split)
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
    """What `splitkit.inline` makes of a split is the original, node by node, with the same parameters and buffers.

    Raises:
        CheckError: SK701, with the first node that differs.
    """
    original, again = split.flow.root, inline(split)
    before, after = _picture(original), _picture(again)
    for one, other in zip_longest(before, after):
        if one != other:
            raise CheckError("SK701", f"inline gives {other} instead of {one}")
    if _tensors(original) != _tensors(again) or original.training != again.training:
        raise CheckError("SK701", f"inline gives the tensors {list(_tensors(again))}, not {list(_tensors(original))}")


def _picture(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """All there is to each node. Values of meta are compared as objects: inlining hands them on."""
    return [
        (n.name, n.op, n.target, repr((n.args, n.kwargs)), n.type, {field: id(v) for field, v in n.meta.items()})
        for n in gm.graph.nodes
    ]


def _tensors(gm: fx.GraphModule) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in gm.state_dict(keep_vars=True).items()]


def _moments(split: Split) -> dict[tuple[Node, PartKey], tuple[int, int]]:
    """When each copy runs: the step of the parent, then the position in the part. Counted in the emitted graphs."""
    steps = {n: i for i, n in enumerate(split.module.graph.nodes)}
    calls = {str(n.target): i for n, i in steps.items() if n.op == "call_module"}
    calls |= {str(n.args[0].target): i for n, i in steps.items() if n.target is checkpoint}
    names = {id(child): name for name, child in split.module.named_children()}
    when = {(node, HOST): (steps[copy], 0) for node, copy in split.copies[HOST].items()}
    for key, part in split.parts.items():
        inside = {n: i for i, n in enumerate(part.graph.nodes)}
        computed = [n for n in inside if n.op.startswith("call_") and not is_state_op(n)]
        if len(computed) != sum(n.op != "get_attr" for n in split.copies[key]):
            raise CheckError("SK701", f"part {key!r} computes nodes that are not in the plan: {computed}")
        step = calls[names[id(part)]]
        when |= {(node, key): (step, inside[copy]) for node, copy in split.copies[key].items()}
    return when
