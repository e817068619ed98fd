"""An oracle for refusals: could the parts of a refused plan run in some order, one after the other, and be right?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO

from torch import fx
from torch.fx import Node

from splitkit.engine.complete import complete
from splitkit.engine.cut import Subgraph, cut
from splitkit.engine.emit import emit
from splitkit.engine.names import Style
from splitkit.errors import CycleError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.order import Unit, unit_needs
from splitkit.plans.parts import HOST
from splitkit.plans.record import Plan

_MOST_ORDERS = 120


def runs_in_some_order(flow: Dataflow, plan: Plan, is_right: Callable[[fx.GraphModule], bool]) -> bool | None:
    """Whether the parts, each in one go, can run in an order that gives what the graph gives.

    Orders that respect data are run one by one, without regard to effects, until one is right.

    Args:
        flow: facts about the graph.
        plan: a plan that was refused.
        is_right: whether a module does what the graph does.

    Returns:
        ``None`` if none of the first 120 orders is right, and there are more.
    """
    by_data = replace(flow, after=type(flow.after)())
    whole = complete(by_data, plan)
    try:
        units = cut(by_data, whole)
    except CycleError:
        return False
    for tried, order in enumerate(_orders(units, unit_needs(by_data, whole))):
        if tried == _MOST_ORDERS:
            return None
        module = emit(flow, whole, order, Style()).module
        with redirect_stderr(StringIO()):  # fx prints the traceback of what a graph raises
            if is_right(module):
                return True
    return False


def _orders(
    units: Sequence[Subgraph | Node], needs: Mapping[Unit, Mapping[Unit, object]]
) -> Iterator[tuple[Subgraph | Node, ...]]:
    """Every order in which each unit comes after those that it needs; inputs stay first, and the output last."""
    keyed: dict[Unit, Subgraph | Node] = {(HOST, u) if isinstance(u, Node) else (u.key, None): u for u in units}
    first = [k for k, u in keyed.items() if isinstance(u, Node) and u.op == "placeholder"]
    last = [k for k, u in keyed.items() if isinstance(u, Node) and u.op == "output"]
    moving = [k for k in keyed if k not in first and k not in last]

    def extend(done: list[Unit]) -> Iterator[list[Unit]]:
        if len(done) == len(moving):
            yield done
        for unit in moving:
            if unit not in done and all(n in done or n not in moving for n in needs.get(unit, ())):
                yield from extend([*done, unit])

    for order in extend([]):
        yield tuple(keyed[k] for k in (*first, *order, *last))
