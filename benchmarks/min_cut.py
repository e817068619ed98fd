"""The minimum cut of joint graphs: splitkit's solver against ``networkx.minimum_cut``: ``--json`` for machines.

cut        one cut of the network behind `MinCut`, by both; networkx is given its graph ready made
frontier   all corners of the hull of (saved bytes, recompute seconds), by splitkit
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import numpy as np
from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.search.recompute.pareto_cuts import CutNetwork, Hull
from splitkit.solvers.min_cut import INFINITE, Network, min_cut
from splitkit.testing import models
from splitkit.training.choices import Savings, savings

PRICE = 1e11
ROUNDS = 5
SMALL = {"width": 64, "heads": 2, "vocab": 101, "seq": 64}
CASES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt2, 12 layers": ("gpt2", {"layers": 12, "width": 768, "vocab": 50257, "batch": 2, "seq": 64}),
    "llama, 8 layers": ("llama", {"layers": 8}),
    "llama, 32 layers": ("llama", {"layers": 32}),
    "llama, 84 narrow layers": ("llama", {"layers": 84, **SMALL}),
}


def problem_of(name: str, sizes: dict[str, int]) -> Savings:
    """What a model may save, at the prices of an A100."""
    example = models.build(name, **sizes)
    joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
    return savings(joint.flow, sk.costs.roofline(joint.graph_module, "a100"))


def as_networkx(network: Network) -> nx.DiGraph:
    """The same network; parallel edges are added up, infinite ones have no capacity."""
    graph = nx.DiGraph()
    edges = zip(network.tails.tolist(), network.heads.tolist(), network.capacities.tolist(), strict=True)
    for tail, head, capacity in edges:
        known = graph.get_edge_data(tail, head, {"capacity": 0})
        if "capacity" in known:
            graph.remove_edges_from([(tail, head)])
            graph.add_edge(tail, head, **({} if capacity == INFINITE else {"capacity": known["capacity"] + capacity}))
    return graph


def timed(run: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The median of the seconds, and the last result."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), result


def rows(cases: dict[str, tuple[str, dict[str, int]]]) -> Iterator[dict[str, Any]]:
    """One row a model."""
    for title, (name, sizes) in cases.items():
        problem = problem_of(name, sizes)
        network = CutNetwork.of(problem, problem.nbytes.astype(np.float64), problem.fixed).network(PRICE)
        graph = as_networkx(network)
        ours, cut = timed(lambda network=network: min_cut(network), ROUNDS)
        theirs, value = timed(lambda graph=graph: nx.minimum_cut_value(graph, 0, 1), 1)
        whole, hull = timed(lambda problem=problem: Hull(problem), ROUNDS)
        yield {
            "network": title,
            "vertices": network.size,
            "edges": len(network.tails),
            "seconds": ours,
            "networkx_seconds": theirs,
            "ratio": theirs / ours,
            "same_value": cut.value == value,
            "corners": len(hull.corners),
            "frontier_seconds": whole,
        }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed."""
    large = [row["ratio"] for row in found if row["vertices"] >= 10_000]
    return {
        "same_value": all(row["same_value"] for row in found),
        "median_ratio": statistics.median(row["ratio"] for row in found),
        "ratio_from_10000_vertices": min(large, default=None),
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", help="only networks whose name contains this")
    options = parser.parse_args()
    found = list(rows({title: case for title, case in CASES.items() if (options.only or "") in title}))
    data = {"rows": found, "summary": summary(found)}
    if options.json:
        print(json.dumps(data, indent=1))
        return
    table = Table()
    for title in found[0]:
        table.add_column(title, no_wrap=True)
    for row in found:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=200).print(table, data["summary"])


if __name__ == "__main__":
    main()
