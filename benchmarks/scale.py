"""Placement of large synthetic graphs (`graphs`), beside simple rules and the proven bound: ``--json`` for machines.

Every graph is placed as stages on equal devices. The load of a stage is its work and the cost of each value that it
sends or receives; a row has the greatest load, the bound that no placement is below, the gap between them and the
time, and how many times greater the load is that other rules give along the order in which the nodes are written:

greedy           each stage takes nodes as long as its work stays within the mean; the last takes the rest
block partition  stages of work that differs by no more than the greatest node (Bárány and Grinberg), as torchgpipe does
equal counts     each stage has as many nodes

Besides, ``MemoryBudget`` cuts a real graph of the last size and of the kind "layered" for training: how many parts, at
least how many, and the CPU seconds, those of finding the facts included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import graphs
import numpy as np
from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.policies import MemoryBudget
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.solution import faults, loads
from splitkit.solvers.placement.stages.contiguous import contiguous


def greedy(work: Floats, count: int) -> Ints:
    """(count + 1,) where stages begin and end: a stage closes before it exceeds the mean."""
    mean = work.sum() / count * (1 + 1e-12)
    total = np.concatenate([[0.0], np.cumsum(work)])
    cuts = [0]
    for _ in range(count - 1):
        cuts.append(max(cuts[-1], int(np.searchsorted(total, total[cuts[-1]] + mean, side="right")) - 1))
    return np.array([*cuts, len(work)])


def block_partition(work: Floats, count: int) -> Ints:
    """(count + 1,) where stages begin and end: no two differ in work by more than the greatest node has.

    "Block partitions of sequences", I. Bárány and V. S. Grinberg, Israel J. Math. 206 (2015): as long as the largest
    block and the smallest differ by more, the smallest block that is nearest to the largest takes a node from its
    neighbour on that side.
    """
    total = np.concatenate([[0.0], np.cumsum(work / work.max())])
    cuts = equal_counts(work, count)
    blocks = np.diff(total[cuts])
    while True:
        largest = int(blocks.argmax())
        giver = -1
        while giver != largest:
            smallest = blocks.min()
            if blocks[largest] <= smallest + 1:
                return cuts
            those = np.flatnonzero(blocks == smallest)
            taker = int(those[np.abs(those - largest).argmin()])
            giver = taker - 1 if largest < taker else taker + 1
            cut = max(taker, giver)
            cuts[cut] += 1 if giver > taker else -1
            for block in (taker, giver):
                blocks[block] = total[cuts[block + 1]] - total[cuts[block]]


def equal_counts(work: Floats, count: int) -> Ints:
    """(count + 1,) where stages begin and end: as many nodes in each."""
    return np.arange(count + 1) * len(work) // count


RULES: dict[str, Callable[[Floats, int], Ints]] = {
    "greedy": greedy,
    "block partition": block_partition,
    "equal counts": equal_counts,
}


def by_rule(problem: Problem, rule: str) -> float:
    """The greatest load of the stages that a rule makes along the numbers of the nodes."""
    cuts = RULES[rule](problem.seconds[0], len(problem.devices))
    device = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    wrong = faults(problem, device, tuple(np.unique(device).tolist()))
    assert not wrong, wrong
    return float(loads(problem, device).max())


def row(kind: str, nodes: int, devices: int) -> dict[str, Any]:
    """Place one graph."""
    problem = graphs.problem(kind, nodes, devices)
    start = time.monotonic()
    found = contiguous(problem)
    took = time.monotonic() - start
    return {
        "kind": kind,
        "nodes": problem.units,
        "edges": len(problem.edges),
        "devices": devices,
        "value": found.value,
        "bound": found.bound,
        "gap": found.gap,
        "seconds": took,
        "solver": found.solver,
        "ratios": {rule: by_rule(problem, rule) / found.value for rule in RULES},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed."""
    return {
        "graphs": len(rows),
        "mean_gap": float(np.mean([r["gap"] for r in rows])),
        "largest_gap": max(r["gap"] for r in rows),
        "longest_seconds": {str(n): max(r["seconds"] for r in rows if r["nodes"] == n) for n in _sizes(rows)},
        "ratios": {rule: float(np.exp(np.mean([np.log(r["ratios"][rule]) for r in rows]))) for rule in RULES},
        "least_ratios": {rule: min(r["ratios"][rule] for r in rows) for rule in RULES},
    }


def memory_row(count: int, share: float) -> dict[str, Any]:
    """Cut one graph for memory, each part within a share of what adam's training of the whole takes, about."""
    gm = graphs.module("layered", count)
    trained = 16 * sum(p.numel() for p in gm.parameters())
    values = sum(node.meta["val"].nbytes for node in gm.graph.nodes if node.op == "call_function")
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    start = time.process_time()
    plan = MemoryBudget(int(share * (trained + values))).assign(flow, costs)
    assert plan.claim is not None
    return {
        "nodes": count,
        "parts": plan.claim.value,
        "bound": plan.claim.bound,
        "cpu_seconds": time.process_time() - start,
        "note": plan.note,
    }


def _sizes(rows: list[dict[str, Any]]) -> list[int]:
    return sorted({r["nodes"] for r in rows})


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1000, 10_000, 100_000], help="nodes of the graphs")
    parser.add_argument("--devices", nargs="+", type=int, default=[2, 8, 64])
    parser.add_argument("--kinds", nargs="+", choices=sorted(graphs.KINDS), default=list(graphs.KINDS))
    parser.add_argument("--share", type=float, default=0.07, help="of the memory of training, for each part")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = [row(kind, n, d) for n in options.sizes for kind in options.kinds for d in options.devices]
    data = {"rows": rows, "summary": summary(rows), "memory": memory_row(options.sizes[-1], options.share)}
    if options.json:
        print(json.dumps(data, indent=1))
        return
    table = Table()
    columns = ["kind", "nodes", "devices", "value", "bound", "gap", "seconds", "solver"]
    for title in [*columns, *RULES]:
        table.add_column(title)
    for found in rows:
        cells = [found[title] for title in columns]
        cells += [found["ratios"][rule] for rule in RULES]
        table.add_row(*("" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
    Console(width=200).print(table, data["summary"], data["memory"])


if __name__ == "__main__":
    main()
