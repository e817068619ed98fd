"""The laws as assertions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit.compare import GRADIENT_TOLERANCE, compare
from splitkit.complete import check, complete
from splitkit.dataflow import Dataflow, reads
from splitkit.errors import CheckError
from splitkit.order import part_order
from splitkit.plan import HOST, PartKey, Plan
from splitkit.scope import is_state_op
from splitkit.split import Split


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
