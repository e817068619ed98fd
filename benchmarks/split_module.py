"""Time torch's split_module and splitkit's side by side on the same graphs and labels: ``--json`` for machines.

Both make all code. Medians of several runs, one after the other in turn, garbage collected between them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.split_module import split_module as torch_split_module

import splitkit as sk


def residual(nodes: int) -> fx.GraphModule:
    """relu, add, relu, add ...: every add reads the value before last."""
    graph = fx.Graph()
    before = x = graph.placeholder("x")
    for i in range(nodes):
        step = graph.call_function(torch.add, (x, before)) if i % 2 else graph.call_function(torch.relu, (x,))
        before, x = x, step
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


def dynamo_like(nodes: int) -> fx.GraphModule:
    """One parameter placeholder for every four nodes, as a Dynamo backend sees a model."""
    graph = fx.Graph()
    parameters = [graph.placeholder(f"p{i}") for i in range(nodes // 4)]
    x = graph.placeholder("x")
    for i in range(nodes):
        x = (
            graph.call_function(torch.add, (x, parameters[i // 4]))
            if i % 4 == 0
            else graph.call_function(torch.relu, (x,))
        )
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


def consecutive(gm: fx.GraphModule, parts: int) -> Callable[[Node], int]:
    """Labels of equal runs of nodes."""
    placed = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    label = {n: i * parts // len(placed) for i, n in enumerate(placed)}
    return label.__getitem__


def seconds(run: Callable[[], Any]) -> float:
    """One run's time."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measure(name: str, gm: fx.GraphModule, parts: int, repeat: int) -> dict[str, Any]:
    """One row: medians of both, and the ratio."""
    label = consecutive(gm, parts)
    torchs, ours, plans = [], [], []
    for _ in range(repeat):
        torchs.append(seconds(lambda: torch_split_module(gm, None, label)))
        ours.append(seconds(lambda: sk.split_module(gm, None, label)))
        plans.append(seconds(lambda: sk.plan(gm, label, sk.costs.unit(gm))))
    row = {
        "graph": name,
        "nodes": len(gm.graph.nodes),
        "parts": parts,
        "torch_ms": statistics.median(torchs) * 1e3,
        "splitkit_ms": statistics.median(ours) * 1e3,
        "analysis_ms": statistics.median(plans) * 1e3,
    }
    return {**row, "torch_over_splitkit": row["torch_ms"] / row["splitkit_ms"]}


def main() -> None:
    """Run all graphs and print a table, or with ``--json`` one object with rows and a summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 16, 256])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        measure(make.__name__, make(nodes), parts, args.repeat)
        for make in (residual, dynamo_like)
        for nodes in args.nodes
        for parts in args.parts
    ]
    summary = {"median_torch_over_splitkit": statistics.median(r["torch_over_splitkit"] for r in rows)}
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
        return
    for row in rows:
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    print(f"median ratio torch / splitkit: {summary['median_torch_over_splitkit']:.2f}")


if __name__ == "__main__":
    main()
