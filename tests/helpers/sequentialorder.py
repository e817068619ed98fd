"""Check refusals by brute force: run the parts of a refused plan in every order until one gives correct results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

from torch import fx
from torch.fx import Node

from splitkit.engine.codegen.emit import Style, emit
from splitkit.engine.complete import complete_plan
from splitkit.engine.subgraphs import Subgraph, extract_subgraphs
from splitkit.errors import CycleError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.part_order import ParentStep, step_needs
from splitkit.plans.parts import PARENT
from splitkit.plans.record import Plan

_MOST_ORDERS = 120  # all orders of five independent parts; not tuned


def runs_in_some_order(flow: Dataflow, plan: Plan, is_right: Callable[[fx.GraphModule], bool]) -> bool | None:
    """Return whether the parts, each run as a whole, can run in an order that gives the results of the graph.

    Orders that respect data dependencies are run one by one, ignoring effects, until one gives correct results.

    Args:
        flow: facts about the graph.
        plan: a plan that was refused.
        is_right: returns whether a module gives the results of the graph.

    Returns:
        ``None`` if none of the first 120 orders is correct and there are more.
    """
    by_data = replace(flow, after=type(flow.after)())
    whole = complete_plan(by_data, plan)
    try:
        steps = extract_subgraphs(by_data, whole)
    except CycleError:
        return False
    for tried, order in enumerate(_orders(steps, step_needs(by_data, whole))):
        if tried == _MOST_ORDERS:
            return None
        module = emit(flow, whole, order, Style()).module
        with redirect_stderr(StringIO()):  # fx prints the traceback of what a graph raises
            if is_right(module):
                return True
    return False


def _orders(
    steps: Sequence[Subgraph | Node], needs: Mapping[ParentStep, Mapping[ParentStep, object]]
) -> Iterator[tuple[Subgraph | Node, ...]]:
    """Yield each order in which every step follows the steps that it needs, with inputs first and the output last."""
    keyed: dict[ParentStep, Subgraph | Node] = {(PARENT, s) if isinstance(s, Node) else (s.key, None): s for s in steps}
    first = [k for k, s in keyed.items() if isinstance(s, Node) and s.op == "placeholder"]
    last = [k for k, s in keyed.items() if isinstance(s, Node) and s.op == "output"]
    moving = [k for k in keyed if k not in first and k not in last]

    def extend(done: list[ParentStep]) -> Iterator[list[ParentStep]]:
        if len(done) == len(moving):
            yield done
        for step in moving:
            if step not in done and all(n in done or n not in moving for n in needs.get(step, ())):
                yield from extend([*done, step])

    for order in extend([]):
        yield tuple(keyed[k] for k in (*first, *order, *last))
