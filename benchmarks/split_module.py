"""Time torch's split_module and splitkit's side by side on the same graphs and labels: ``--json`` for machines.

Everything runs in one process, the contenders in turn, garbage collected between them; medians of several rounds.

all code    both generate the code of every part and of the parent
lazy        torch's default against splitkit inside torch's own ``_use_lazy_graph_module(True)``
simple      torch's fast ``split_module_simple`` (lazy too, without regions, attributes or modules) against the same
original    both lazy, with ``keep_original_order=True``, for which torch's time is quadratic in inputs
call        what a part costs to call by its parent, beyond calling ``part.forward`` in a loop
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.fx import Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.passes import split_module as torchs

import splitkit as sk

SIMPLE = getattr(torchs, "split_module_simple", None)  # not in torch 2.11
Label = Callable[[Node], int]


def chain(nodes: int) -> fx.GraphModule:
    """relu after relu."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(nodes):
        x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    return fx.GraphModule(nn.Module(), graph)


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


def llama(layers: int = 32) -> fx.GraphModule:
    """A narrow Llama of many layers as Dynamo sees it."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2
    )
    config.use_cache = False
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch.compile(LlamaModel(config).eval(), backend=backend)(torch.zeros(1, 8, dtype=torch.long))
    return found[0]


def consecutive(gm: fx.GraphModule, parts: int) -> Label:
    """Labels of equal runs of nodes."""
    placed = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    return {n: i * parts // len(placed) for i, n in enumerate(placed)}.__getitem__


def at_attention(gm: fx.GraphModule) -> Label:
    """A part for each attention, and one for what lies between."""
    labels: dict[Node, int] = {}
    part = 0
    for node in gm.graph.nodes:
        if node.op.startswith("call_"):
            apart = "scaled_dot_product_attention" in str(node.target)
            part += apart
            labels[node] = part
            part += apart
    return labels.__getitem__


def graphs(sizes: list[int], parts: list[int], layers: int) -> Iterator[tuple[str, fx.GraphModule, int, Label]]:
    """(name, graph, number of parts, labels)."""
    for make in (chain, residual, dynamo_like):
        for nodes in sizes:
            gm = make(nodes)
            yield from ((make.__name__, gm, count, consecutive(gm, count)) for count in parts if count <= nodes)
    if layers:
        gm = llama(layers)
        label = at_attention(gm)
        count = len({label(n) for n in gm.graph.nodes if n.op.startswith("call_")})
        yield f"Llama of {layers} layers", gm, count, label


def contenders(gm: fx.GraphModule, label: Label) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""

    def lazily(split: Callable[..., Any], **options: Any) -> Any:
        with _use_lazy_graph_module(True):
            return split(gm, None, label, **options)

    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: torchs.split_module(gm, None, label),
        "splitkit": lambda: sk.split_module(gm, None, label),
        "splitkit_lazy": lambda: lazily(sk.split_module),
        "torch_original": lambda: lazily(torchs.split_module, keep_original_order=True),
        "splitkit_original": lambda: lazily(sk.split_module, keep_original_order=True),
        "native": lambda: sk.split(gm, label, lazy=True),
    }
    if SIMPLE is not None:
        runs["simple"] = lambda: SIMPLE(gm, {n: label(n) for n in gm.graph.nodes if n.op.startswith("call_")})
    return runs


def seconds(run: Callable[[], Any]) -> float:
    """One run's time, by a clock that other processes do not move."""
    gc.collect()
    start = time.thread_time()
    run()
    return time.thread_time() - start


def measure(name: str, gm: fx.GraphModule, parts: int, label: Label, repeat: int) -> dict[str, Any]:
    """One row: medians in ms, and ratios."""
    runs = contenders(gm, label)
    times: dict[str, list[float]] = {contender: [] for contender in runs}
    for _ in range(repeat):
        for contender, run in runs.items():
            times[contender].append(seconds(run))
    ms = {f"{contender}_ms": statistics.median(t) * 1e3 for contender, t in times.items()}
    nodes = len(gm.graph.nodes)
    return {
        "graph": name,
        "nodes": nodes,
        "parts": parts,
        **ms,
        "us_per_node": ms["splitkit_lazy_ms"] / nodes * 1e3,
        "all_code": ms["torch_ms"] / ms["splitkit_ms"],
        "lazy": ms["torch_ms"] / ms["splitkit_lazy_ms"],
        "original": ms["torch_original_ms"] / ms["splitkit_original_ms"],
        **({"simple": ms["simple_ms"] / ms["splitkit_lazy_ms"]} if "simple_ms" in ms else {}),
    }


def call_cost(split: Callable[..., fx.GraphModule], parts: int = 64, calls: int = 300, repeat: int = 7) -> float:
    """us a part: the split model's ``forward`` less a loop over the parts' ``forward``; the op is a Python negation."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(parts):
        x = graph.call_function(operator.neg, (x,))
    graph.output(x)
    gm = fx.GraphModule(nn.Module(), graph)
    made = split(gm, None, consecutive(gm, parts))
    forwards = [child.forward for child in made.children()]

    def loop(value: int) -> int:
        for forward in forwards:
            value = forward(value)
        return value

    def whole(run: Callable[[int], int]) -> float:
        return seconds(lambda: [run(1) for _ in range(calls)])

    made(1)
    best = min(whole(made.forward) for _ in range(repeat)) - min(whole(loop) for _ in range(repeat))
    return best / calls / parts * 1e6


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst and the middle of each ratio, how time grows with size, and the cost of a call."""
    summary: dict[str, Any] = {}
    for ratio in ("all_code", "lazy", "simple", "original"):
        if found := [row[ratio] for row in rows if ratio in row]:
            summary |= {f"{ratio}_least": min(found), f"{ratio}_median": statistics.median(found)}
    by_size = {n: [r["us_per_node"] for r in rows if r["nodes"] == n] for n in sorted({r["nodes"] for r in rows})}
    summary["us_per_node"] = {n: statistics.median(found) for n, found in by_size.items()}
    summary["call_us"] = {"torch": call_cost(torchs.split_module), "splitkit": call_cost(sk.split_module)}
    return summary


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the table and the summary."""
    columns = [c for c in rows[0] if c not in ("graph", "nodes", "parts")]
    table = Table("graph", "nodes", "parts", *columns)
    for row in rows:
        table.add_row(row["graph"], str(row["nodes"]), str(row["parts"]), *(f"{row.get(c, 0):.2f}" for c in columns))
    console = Console(width=max(Console().width, 200))
    console.print(table)
    console.print_json(json.dumps(summary))


def main() -> None:
    """Run all graphs and print a table, or with ``--json`` one object with rows and a summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000, 30_000])
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 16, 256])
    parser.add_argument("--layers", type=int, default=32, help="of the Llama; 0 leaves it out")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(*case, args.repeat) for case in graphs(args.nodes, args.parts, args.layers)]
    summary = summary_of(rows)
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        show(rows, summary)


if __name__ == "__main__":
    main()
