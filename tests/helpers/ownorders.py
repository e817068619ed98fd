"""Orders of actions as texts, and when ranks idle."""

from __future__ import annotations

from splitkit.pipeline.order import PipelineOrder, action_of


def own_order(ranks, name="custom"):
    """The order of a text for each rank: ``["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]``."""
    return PipelineOrder(name, tuple(tuple(map(action_of, row.split())) for row in ranks))


def idle_of(run):
    """Rank -> seconds in which it computes nothing: before its first action, between actions, after the last."""
    found = []
    for own in range(run.ranks):
        of = run.order.columns.rank == own
        first = float(run.starts[of].min(initial=run.seconds))
        last = float(run.ends[of].max(initial=first))
        found.append((first, max(0.0, last - first - run.busy[own]), run.seconds - last))
    return tuple(found)
