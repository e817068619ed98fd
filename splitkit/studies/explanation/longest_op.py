"""Finds the op that no cut divides and that takes longest, and from how many stages on more stages are useless."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from splitkit.graph.dataflow import module_path
from splitkit.search.placement_model import PlacementModel
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.training.saved_values import op_of

_ROUNDING = 1e-9


@dataclass(frozen=True)
class LongestOp:
    """An op, or ops that must be in one stage, whose time is a lower bound on the slowest stage of every plan.

    Attributes:
        node: the name of the node; of several, the one that takes longest.
        op: what it computes.
        module: the module that computes it.
        nodes: how many nodes must be in one stage.
        seconds: their time together.
        share: their share of all work.
        least: with fewer stages, the slowest stage of every plan takes longer than this op.
        enough: with so many stages, the slowest takes no longer than this op, so more are useless; ``None`` if
            transfers take time, as more stages may then be slower or faster.
    """

    node: str
    op: str
    module: str
    nodes: int
    seconds: float
    share: float
    least: int
    enough: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def longest_op(pricing: StagePricing, figures: StageFigures) -> LongestOp | None:
    """Return the longest unit of a graph; ``None`` if nothing takes time.

    Args:
        pricing: the prices.
        figures: those of a plan, which may reach the time of that unit with fewer stages than an order of the graph.
    """
    request = pricing.request
    model = PlacementModel(request.flow, request.prices, [request.seconds], together=request.inseparable)
    work = model.seconds[0].tolist()
    total, most = sum(work), max(work, default=0.0)
    if not most:
        return None
    unit = work.index(most)
    node = max(model.members[unit], key=lambda node: request.seconds[node])
    enough = None
    if request.links is None and not pricing.replicated:
        enough = _stages_along(work, most)
        ranks = len(figures.rank_loads)
        if ranks == len(figures.loads) and figures.value <= most * (1 + _ROUNDING):
            enough = min(enough, ranks)
    return LongestOp(
        node.name,
        op_of(node),
        module_path(node),
        len(model.members[unit]),
        most,
        most / total,
        max(1, math.ceil(total / most - _ROUNDING)),
        enough,
    )


def _stages_along(work: list[float], most: float) -> int:
    """Return the fewest stages along the order of the units of which none takes longer than ``most``."""
    count, load = 1, 0.0
    for seconds in work:
        if load + seconds > most * (1 + _ROUNDING):
            count, load = count + 1, 0.0
        load += seconds
    return count
