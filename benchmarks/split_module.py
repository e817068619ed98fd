"""Time torch's split_module and splitkit's side by side on the same graphs and labels: ``--json`` for machines.

Everything runs in one process, the contenders in turn, garbage collected between them; medians of several rounds of
CPU time. The graphs are synthetic chains, transformers captured by torch.export and by Dynamo (narrow, with as many
nodes as wide ones), and graphs of ``symbolic_trace``: chains of Python operators, of modules, and of tuples.

all code    both generate the code of every part and of the parent
lazy        torch's default against splitkit inside torch's own ``_use_lazy_graph_module(True)``
both lazy   torch and splitkit inside ``_use_lazy_graph_module(True)``
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
import sys
import time
from collections.abc import Callable, Iterator
from itertools import chain as chain_of
from typing import Any, cast

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


class Operators(nn.Module):
    """``x = x + relu(x)``, as ``symbolic_trace`` records it: no node has a value."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Two nodes a round."""
        for _ in range(self.rounds):
            x = x + torch.relu(x)
        return x


class Arithmetic(Operators):
    """Operators, members and methods by turns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Six nodes a round."""
        h = x
        for _ in range(self.rounds):
            h = h @ x * 2 - x
            x = h[0] + x.relu()
        return x


class Tuples(Operators):
    """A tuple that grows by one member a round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Three nodes a round."""
        members = torch.chunk(x, 2)
        for i in range(self.rounds):
            members = members + (torch.relu(members[i % 2]),)  # noqa: RUF005 - an addition in the graph
        return members[-1] + members[0]


class Perceptron(nn.Module):
    """Linear layers, norms and residuals: modules are leaves of ``symbolic_trace``."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(rounds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four nodes a round."""
        for block in self.blocks:
            x = x + block(x)
        return x


_NARROW = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


def transformer(family: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """A narrow model of a family of transformers, and its inputs."""
    import transformers as t

    ids = torch.randint(3, 60, (1, 16))
    inputs: dict[str, Any] = {"input_ids": ids}
    model: nn.Module
    if family == "GPT-2":
        model = t.GPT2LMHeadModel(t.GPT2Config(**_NARROW, n_embd=32, n_layer=layers, n_head=2, n_positions=32))
    elif family == "Llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**_NARROW, **_SMALL, num_hidden_layers=layers))
    elif family == "T5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": layers, "num_heads": 2}
        model = t.T5ForConditionalGeneration(t.T5Config(**_NARROW, **sizes))
        inputs |= {"decoder_input_ids": ids, "use_cache": False}  # its decoder has a configuration of its own
    else:
        ends = {"cls_token_id": 0, "sep_token_id": 0}
        model = t.ModernBertForMaskedLM(t.ModernBertConfig(**_NARROW, **_SMALL, **ends, num_hidden_layers=layers))
    config: Any = model.config
    config.use_cache = False
    return model.eval(), inputs


def exported(model: nn.Module, inputs: dict[str, Any]) -> fx.GraphModule:
    """The module of ``torch.export``: parameters are attributes under dotted names."""
    made: Any = torch.export.export(model, (), inputs, strict=False).module()
    return cast(fx.GraphModule, made)


def seen_by_dynamo(model: nn.Module, inputs: dict[str, Any]) -> fx.GraphModule:
    """What a backend of ``torch.compile`` is given: parameters are inputs."""
    found: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, inputs: object) -> Callable[..., Any]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**inputs)
    return found[0]


def models(layers: int) -> Iterator[tuple[str, fx.GraphModule]]:
    """Captured transformers; GPT-2 four times as deep as asked as well."""
    for family, depth in (("GPT-2", 1), ("Llama", 1), ("T5", 0.5), ("ModernBERT", 1)):
        yield f"{family}, exported", exported(*transformer(family, int(layers * depth)))
    for family in ("GPT-2", "Llama"):
        yield f"{family}, Dynamo", seen_by_dynamo(*transformer(family, layers))
    yield "GPT-2, exported", exported(*transformer("GPT-2", 4 * layers))


def traced(rounds: int) -> Iterator[tuple[str, fx.GraphModule]]:
    """Graphs of ``symbolic_trace``."""
    for kind in (Operators, Arithmetic, Tuples, Perceptron):
        yield f"{kind.__name__}, traced", fx.symbolic_trace(kind(rounds))


def consecutive(gm: fx.GraphModule, parts: int) -> Label:
    """Labels of equal runs of nodes."""
    placed = [n for n in gm.graph.nodes if n.op.startswith("call_")]
    return {n: i * parts // len(placed) for i, n in enumerate(placed)}.__getitem__


_MANY = 40  # nodes of a part, where there are many parts


def graphs(
    sizes: list[int], parts: list[int], layers: int, rounds: int
) -> Iterator[tuple[str, fx.GraphModule, int, Label]]:
    """(name, graph, number of parts, labels)."""
    made = ((make.__name__, make(nodes)) for make in (chain, residual, dynamo_like) for nodes in sizes)
    captured = models(layers) if layers else ()
    for name, gm in chain_of(made, traced(rounds) if rounds else (), captured):
        placed = sum(n.op.startswith("call_") for n in gm.graph.nodes)
        for count in dict.fromkeys((*parts, max(placed // _MANY, 1))):
            yield name, gm, count, consecutive(gm, count)


def contenders(gm: fx.GraphModule, label: Label) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""

    def lazily(split: Callable[..., Any], **options: Any) -> Any:
        with _use_lazy_graph_module(True):
            return split(gm, None, label, **options)

    runs: dict[str, Callable[[], Any]] = {
        "torch": lambda: torchs.split_module(gm, None, label),
        "splitkit": lambda: sk.split_module(gm, None, label),
        "torch_lazy": lambda: lazily(torchs.split_module),
        "splitkit_lazy": lambda: lazily(sk.split_module),
        "torch_original": lambda: lazily(torchs.split_module, keep_original_order=True),
        "splitkit_original": lambda: lazily(sk.split_module, keep_original_order=True),
        "native": lambda: sk.split(gm, label, lazy=True),
    }
    if SIMPLE is not None and all(n.op not in ("get_attr", "call_module") for n in gm.graph.nodes):  # it takes none
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
        "both_lazy": ms["torch_lazy_ms"] / ms["splitkit_lazy_ms"],
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
    for ratio in ("all_code", "lazy", "both_lazy", "simple", "original"):
        if found := [row[ratio] for row in rows if ratio in row]:
            summary |= {f"{ratio}_least": min(found), f"{ratio}_median": statistics.median(found)}
            summary[f"{ratio}_most"] = max(found)
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
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--parts", type=int, nargs="+", default=[8, 16], help="besides one for every 40 nodes")
    parser.add_argument("--layers", type=int, default=64, help="of captured transformers; 0 leaves them out")
    parser.add_argument("--rounds", type=int, default=1000, help="of traced graphs; 0 leaves them out")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    for case in graphs(args.nodes, args.parts, args.layers, args.rounds):
        rows.append(measure(*case, args.repeat))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    summary = summary_of(rows)
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        show(rows, summary)


if __name__ == "__main__":
    main()
