"""Orders of actions as texts."""

from __future__ import annotations

from splitkit.pipeline.order import PipelineOrder, action_of


def own_order(ranks, name="custom"):
    """The order of a text for each rank: ``["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]``."""
    return PipelineOrder(name, tuple(tuple(map(action_of, row.split())) for row in ranks))
