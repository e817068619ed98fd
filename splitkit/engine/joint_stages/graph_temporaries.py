"""Count the bytes that a graph of a stage takes only while it runs."""

from __future__ import annotations

from torch import fx

from splitkit.memory.profile import simulate_memory
from splitkit.memory.simulation import BEFORE, HELD


def graph_temporaries(graph: fx.GraphModule, *, outputs: bool) -> int:
    """Return the most bytes alive while a graph runs, without its inputs and the attributes that it reads.

    Args:
        graph: the graph.
        outputs: whether its outputs count, too; what a forward graph returns is held long after it and counted there.

    Raises:
        GraphError: SK108 for a data-dependent size.
    """
    profile = simulate_memory(graph)
    live = list(profile.timeline)
    for storage in profile.buffers:
        if storage.born == BEFORE or (storage.dies == HELD and not outputs):
            for step in range(max(0, storage.born), min(len(live), storage.dies + 1)):
                live[step] -= storage.nbytes
    return max(live, default=0)
