"""Count the bytes that a graph of a stage takes only while it runs."""

from __future__ import annotations

from itertools import accumulate

from torch import fx

from splitkit.memory.simulation import BEFORE, MemorySimulation


def graph_temporaries(graph: fx.GraphModule, outputs: int | None = None) -> int:
    """Return the most bytes alive while a graph runs, without its inputs and the attributes that it reads.

    Args:
        graph: the graph.
        outputs: how many of its outputs count, from the first one; ``None``: all. What a forward graph saves and sends
            is held long after it, and is counted there.

    Raises:
        GraphError: SK108 for a data-dependent size.
    """
    run = MemorySimulation({}, 1, lambda node: 0)
    returned = run.graph(graph, lambda node: run.input(node, "input"))
    steps = len(run.steps)
    for _, value in returned:
        run.hold(value, steps)
    apart = {
        number for _, value in returned[len(returned) if outputs is None else outputs :] for number in value.values()
    }
    change = [0] * (steps + 2)
    for number, storage in enumerate(run.storages):
        if storage.born != BEFORE and number not in apart:
            change[storage.born] += storage.nbytes
            change[min(storage.dies, steps) + 1] -= storage.nbytes
    return max((live + more for live, more in zip(accumulate(change[:steps]), run.transient, strict=True)), default=0)
