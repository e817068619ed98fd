"""Assert the laws that every split must obey."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.utils.checkpoint import checkpoint

from splitkit.engine.complete import check_plan, complete_plan
from splitkit.engine.split import Split
from splitkit.errors import CheckError
from splitkit.graph.dataflow import Dataflow, reads
from splitkit.graph.scope import is_state_op
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.testing.compare import compare
from splitkit.testing.differences import GRADIENT_TOLERANCE


def assert_same(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *inputs: Any,
    seed: int = 0,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> None:
    """Assert law 1: outputs, buffers and inputs are bitwise equal, gradients up to rounding. See `splitkit.compare`.

    Raises:
        CheckError: SK701, naming the tensors that differ.
    """
    compare(reference, candidate, *inputs, seed=seed, tolerance=tolerance, **kwargs).raise_if_different()


def assert_legal(flow: Dataflow, plan: Plan) -> None:
    """Assert law 4: raise a PlanError if the plan cannot be carried out correctly."""
    whole = complete_plan(flow, plan)
    check_plan(flow, whole)
    part_order(flow, whole)


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
