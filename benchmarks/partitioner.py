"""Time torch's CapabilityBasedPartitioner and splitkit's on the same graphs and rules: ``--json`` for machines.

Both run in one process, in turn, on CPU time: construction with ``propose_partitions``, then ``fuse_partitions``.
Torch's time grows with the square to the cube of the number of nodes, so torch runs only where an extrapolation from
its run on a smaller graph of the same kind says that it ends within ``--patience`` seconds (a minute).

Each round of these graphs is a block of a network; the rule leaves out one op of a block.

blocks     x = x + softmax(linear(norm(x))): a partition per block
branches   four independent towers of blocks, which share the partitions
skips      blocks whose values are all read again at the end, as in a U-Net
writes     blocks that also write to a buffer in place (torch ignores that)
llama      transformers' Llama, captured by splitkit
"""

from __future__ import annotations

import argparse
import gc
import json
import operator
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn
from torch.fx import Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner as TorchPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase, create_op_support

import splitkit as sk

SIZES = (500, 1_000, 2_000, 3_000, 10_000, 30_000, 100_000)


class Builder:
    """A graph that grows block by block."""

    def __init__(self) -> None:
        self.graph, self.root = fx.Graph(), nn.Module()
        self.root.register_buffer("state", torch.zeros(1))
        self.x = self.graph.placeholder("x")

    def block(self, x: Node) -> Node:
        """Four nodes; softmax is the one that a backend lacks."""
        call = self.graph.call_function
        h = call(torch.tanh, (x,))
        h = call(torch.sin, (h,))
        h = call(torch.softmax, (h,), {"dim": 0})
        return call(operator.add, (x, h))

    def module(self, output: Any) -> fx.GraphModule:
        self.graph.output(output)
        return fx.GraphModule(self.root, self.graph)


def blocks(nodes: int) -> fx.GraphModule:
    """One tower."""
    builder = Builder()
    x = builder.x
    for _ in range(nodes // 4):
        x = builder.block(x)
    return builder.module(x)


def branches(nodes: int) -> fx.GraphModule:
    """Four towers, one block of each after the other."""
    builder = Builder()
    towers = [builder.x] * 4
    for _ in range(nodes // 16):
        towers = [builder.block(x) for x in towers]
    return builder.module(tuple(towers))


def skips(nodes: int) -> fx.GraphModule:
    """A tower down, and one up that reads the values of the first, the last of them first."""
    builder = Builder()
    x, values = builder.x, []
    for _ in range(nodes // 9):
        x = builder.block(x)
        values.append(x)
    for value in reversed(values):
        x = builder.graph.call_function(operator.add, (builder.block(x), value))
    return builder.module(x)


def writes(nodes: int) -> fx.GraphModule:
    """One tower; every block adds one to a buffer and reads it."""
    builder = Builder()
    x, state = builder.x, builder.graph.get_attr("state")
    for _ in range(nodes // 6):
        builder.graph.call_method("add_", (state, 1))
        x = builder.graph.call_function(operator.add, (builder.block(x), state))
    return builder.module(x)


def llama(nodes: int) -> fx.GraphModule:
    """A Llama with about so many nodes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2,
        num_hidden_layers=max(1, nodes // 66), use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return sk.capture(LlamaForCausalLM(config).eval(), input_ids=torch.zeros(1, 8, dtype=torch.long))


KINDS: dict[str, Callable[[int], fx.GraphModule]] = {f.__name__: f for f in (blocks, branches, skips, writes, llama)}


def lacks_softmax(_: object, node: Node) -> bool:
    """A backend that runs every call but softmax."""
    return node.op.startswith("call_") and "softmax" not in str(node.target) + node.name


def timed(
    partitioner: type, make: Callable[[], fx.GraphModule], support: OperatorSupportBase, **options: Any
) -> dict[str, Any]:
    """Seconds to propose and to fuse, the number of partitions, and the nodes of the graph."""
    gm = make()
    nodes = len(gm.graph.nodes)
    fuse = nodes <= options.pop("fuse")
    gc.collect()
    start = time.process_time()
    asked = partitioner(gm, support, allows_single_node_partition=True, **options)
    partitions = asked.propose_partitions()
    proposed = fused = time.process_time()
    if fuse:
        asked.fuse_partitions(partitions)
        fused = time.process_time()
    return {
        "nodes": nodes,
        "propose": proposed - start,
        "fuse": fused - proposed if fuse else None,
        "partitions": len(partitions),
    }


def rows(kinds: list[str], most: int, fuse: int, patience: float) -> list[dict[str, Any]]:
    """One row per kind, size and value of ``skip_horizontal_fusion``."""
    support = create_op_support(lacks_softmax)
    found = []
    for kind in kinds:
        for skip in (False, True):
            options: dict[str, Any] = {"fuse": fuse} | ({"skip_horizontal_fusion": True} if skip else {})
            before: dict[str, Any] | None = None
            for size in SIZES:
                if size > most or (kind == "llama" and size > 10_000):
                    continue
                make = lambda kind=kind, size=size: KINDS[kind](size)  # noqa: E731
                ours = timed(sk.CapabilityBasedPartitioner, make, support, **options)
                row: dict[str, Any] = {
                    "graph": kind,
                    "skip": skip,
                    "nodes": ours["nodes"],
                    "splitkit": ours,
                    "torch": None,
                    "ratio": None,
                    "of propose": None,
                }
                if before is None or total(before) * (size / before["size"]) ** 3 < patience:
                    torchs = timed(TorchPartitioner, make, support, **options)
                    before = {**torchs, "size": size}
                    ratios = {"ratio": total(torchs) / total(ours), "of propose": torchs["propose"] / ours["propose"]}
                    row |= {"torch": torchs, **ratios}
                found.append(row)
                print(row, file=sys.stderr, flush=True)
    return found


def total(times: dict[str, Any]) -> float:
    """Seconds in all."""
    return float(times["propose"] + (times["fuse"] or 0.0))


def main() -> None:
    """Print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=KINDS, action="append", help="graphs to time; all by default")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="the most nodes")
    parser.add_argument("--fuse", type=int, default=SIZES[-1] * 2, help="the most nodes of graphs that are fused")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of torch at most, by extrapolation")
    given = parser.parse_args()
    found = rows(given.only or [*KINDS], given.most, given.fuse, given.patience)
    ratios = [row["ratio"] for row in found if row["ratio"]]
    summary = {"torch": torch.__version__, "least ratio": min(ratios), "largest ratio": max(ratios)}
    if given.json:
        print(json.dumps({"rows": found, "summary": summary}))
        return
    table = Table(
        "graph", "skip", "nodes", "parts", "propose", "fuse", "torch: parts", "propose", "fuse", "ratio: propose", "all"
    )
    for row in found:
        ours, torchs = row["splitkit"], row["torch"]
        cells = [
            f"{ours['partitions']}",
            f"{ours['propose']:.2f}",
            "" if ours["fuse"] is None else f"{ours['fuse']:.2f}",
        ]
        cells += (
            [
                f"{torchs['partitions']}",
                f"{torchs['propose']:.2f}",
                f"{torchs['fuse']:.2f}",
                f"{row['of propose']:.0f}",
                f"{row['ratio']:.1f}",
            ]
            if torchs
            else [""] * 5
        )
        table.add_row(row["graph"], "yes" if row["skip"] else "no", str(row["nodes"]), *cells)
    Console().print(table)
    print(summary)


if __name__ == "__main__":
    main()
