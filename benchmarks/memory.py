"""Simulated memory beside real runs and beside Inductor's estimator: ``--json`` for machines.

reality   peak of live bytes, in one table: forward (no_grad), and forward + backward as AOTAutograd's default partition
          has them; what splitkit simulates, what a run on the CPU measures, and what Inductor's ``get_peak_memory``
          estimates on the same graphs. That raises TypeError (torch 2.13, 2.15) and ignores the CPU; both are mended
          here, in a copy. ``allocator``: the peak of what the allocator really gave out, workspace of kernels included,
          and how far the simulation is off when ``costs.measured(...).workspace`` tells it about them.
speed     seconds of both on graphs of growing size, in one process, in turn; the best of several rounds.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import math
import operator
import time
from collections.abc import Callable, Iterator
from typing import Any

import estimator
import torch
from rich.console import Console
from rich.table import Table
from small_nets import NETS, loss_or_sum
from torch import fx, nn
from torch._functorch.partitioners import default_partition
from torch._inductor.fx_passes import memory_estimator as inductors
from torch._subclasses.fake_tensor import FakeTensorMode

import splitkit as sk
from splitkit.engine.pair import Pair
from splitkit.frontends.joint_capture import capture_joint
from splitkit.memory.measurement import MeasuredMemory
from splitkit.memory.profile import MemoryProfile
from splitkit.testing import models

ATEN = torch.ops.aten


def mended() -> dict[str, Any]:
    """Inductor's estimator without its fault, and with the CPU counted."""
    source = inspect.getsource(inductors).replace(
        "next(iter(reversed(fwd_graph.nodes)))[-1]", "fwd_graph.output_node()"
    )
    source = source.replace('return device.type != "cpu"', "return True").replace(
        'if storage_key.device.type != "cpu":', "if True:"
    )
    scope: dict[str, Any] = {"__name__": "mended"}
    exec(compile(source, "mended", "exec"), scope)
    return scope


def examples(layers: int) -> Iterator[tuple[str, models.Example]]:
    """The built-in models with few layers, and the nets."""
    for name in models.NAMES:
        yield name, models.build(name, layers=layers)
    for name, make in NETS.items():
        yield name, make()


def reality(name: str, example: models.Example, peer: dict[str, Any], workspace: bool) -> Iterator[dict[str, Any]]:
    """A row for forward, and one for forward + backward."""
    gm = sk.capture(example.model, *example.args, **example.kwargs)
    with torch.no_grad():
        measured = sk.measure_memory(gm, *example.args, allocator=True, **example.kwargs)
    row = compared(name, "forward", sk.simulate_memory(gm), measured)
    row["inductor"] = max(peer["build_memory_profile"](gm.graph, lambda n: n.op not in ("placeholder", "get_attr")))
    if workspace:
        inputs = example.args or dict(example.kwargs)
        costs = sk.costs.measured(gm, inputs, min_run_time=0.001)
        row["with workspace"] = sk.simulate_memory(gm, workspace=costs.workspace).peak
    yield row

    joint = capture_joint(example.model, *example.args, **example.kwargs, loss=loss_or_sum)
    pair = joint.partition(default_partition)
    for half in (pair.forward, pair.backward):  # torch leaves nodes that nobody reads
        half.graph.eliminate_dead_code()
        half.recompile()
    primals, tangents = joint.primals(*example.args, **example.kwargs), joint.tangents()
    profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    held = list(primals)
    row = compared(name, "forward + backward", profile, sk.measure_memory(pair.run, primals, tangents, allocator=True))
    row["inductor"] = peer["get_peak_memory"](pair.forward.graph, pair.backward.graph)
    if workspace:
        known = workspace_of(pair, list(held), joint.tangents())
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs, workspace=known)
        row["with workspace"] = profile.peak
    yield row


def workspace_of(pair: Pair, primals: list[Any], tangents: list[Any]) -> Callable[[fx.Node], int]:
    """What the kernels of both halves take, measured."""
    forward = sk.costs.measured(pair.forward, primals, min_run_time=0.001)
    made = pair.forward(*primals)[pair.outputs :]
    count = len(pair.saved)
    given = [*made[count:], *made[:count], *tangents]
    backward = sk.costs.measured(pair.backward, given, min_run_time=0.001)
    return lambda node: (forward if node.graph is pair.forward.graph else backward).workspace(node)


def compared(name: str, what: str, profile: MemoryProfile, measured: MeasuredMemory) -> dict[str, Any]:
    """Predicted and measured, in bytes."""
    return {
        "model": name, "what": what, "nodes": len(profile.steps), "simulated": profile.peak, "measured": measured.peak,
        "allocator": measured.allocator_peak, "error": profile.peak / measured.peak - 1,
    }  # fmt: skip


def mixed(nodes: int) -> fx.GraphModule:
    """Adds with long skips, views, in-place ops and tuples, on the values that AOTAutograd would give them."""
    graph, skips = fx.Graph(), list[fx.Node]()
    with FakeTensorMode():

        def call(op: Any, *args: Any) -> fx.Node:
            node = graph.call_function(op, args)
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]))
            return node

        x = graph.placeholder("primals_1")
        x.meta["val"] = torch.empty(64, 64)
        while len(graph.nodes) < nodes:
            kind = len(graph.nodes) % 5
            if kind == 0:
                x = call(ATEN.add.Tensor, x, skips.pop(0)) if len(skips) > 40 else call(ATEN.relu.default, x)
            elif kind == 1:
                x = call(ATEN.view.default, call(ATEN.t.default, call(ATEN.mm.default, x, x)), [64, 64])
            elif kind == 2:
                x = call(ATEN.mul_.Tensor, call(ATEN.sin.default, x), 2.0)
            elif kind == 3:
                both = graph.call_function(ATEN.split.Tensor, (x, 32))
                both.meta["val"] = ATEN.split.Tensor(x.meta["val"], 32)
                halves = [graph.call_function(operator.getitem, (both, i)) for i in range(2)]
                for i, half in enumerate(halves):
                    half.meta["val"] = both.meta["val"][i]
                x = graph.call_function(ATEN.cat.default, (halves,))
                x.meta["val"] = ATEN.cat.default([h.meta["val"] for h in halves])
            else:
                skips.append(x)
                x = call(ATEN.cos.default, x)
    graph.output((x,))
    return fx.GraphModule(nn.Module(), graph)


def best(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of the fastest of several calls, the garbage collected before."""
    took = math.inf
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        call()
        took = min(took, time.process_time() - start)
    return took


def speed(nodes: int, rounds: int, peer: dict[str, Any]) -> dict[str, Any]:
    """A row: both on one graph."""
    gm = mixed(nodes)
    own = best(lambda: sk.simulate_memory(gm), rounds)
    other = best(lambda: peer["build_memory_profile"](gm.graph, lambda n: n.op != "placeholder"), rounds)
    estimate = best(lambda: estimator.build_memory_profile(gm.graph, lambda n: n.op != "placeholder"), rounds)
    count = len(gm.graph.nodes)
    return {
        "nodes": count, "splitkit": own, "inductor": other, "ratio": other / own, "us a node": own / count * 1e6,
        "estimator": estimate,
    }  # fmt: skip


def percent(estimated: float, real: float) -> str:
    """How far off."""
    return "exact" if estimated == real else f"{100 * (estimated / real - 1):+.2f} %"


def show(rows: list[dict[str, Any]], timed: list[dict[str, Any]]) -> None:
    """Two tables."""
    console = Console(width=150)
    table = Table(
        "model", "what", "nodes", "measured", "simulated", "Inductor's", "allocator", "simulated with workspace"
    )
    for row in rows:
        extra = percent(row["with workspace"], row["allocator"]) if "with workspace" in row else ""
        table.add_row(
            row["model"], row["what"], str(row["nodes"]), f"{row['measured']:,}",
            percent(row["simulated"], row["measured"]), percent(row["inductor"], row["measured"]),
            percent(row["simulated"], row["allocator"]), extra,
        )  # fmt: skip
    console.print(table)
    table = Table("nodes", "splitkit, s", "Inductor, s", "Inductor / splitkit", "us a node", "the same estimate, s")
    for row in timed:
        table.add_row(
            f"{row['nodes']:,}", f"{row['splitkit']:.3f}", f"{row['inductor']:.3f}", f"{row['ratio']:.2f}",
            f"{row['us a node']:.1f}", f"{row['estimator']:.3f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--layers", type=int, default=2, help="layers of the models")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1_000, 3_000, 10_000, 30_000, 100_000])
    parser.add_argument("--repeat", type=int, default=3, help="rounds; the best counts")
    parser.add_argument("--no-workspace", action="store_true", help="do not measure the workspace of kernels")
    args = parser.parse_args()
    torch.manual_seed(0)
    peer, rows = mended(), list[dict[str, Any]]()
    for name, example in examples(args.layers) if args.layers else ():
        rows += reality(name, example, peer, not args.no_workspace)
    timed = [speed(nodes, args.repeat, peer) for nodes in args.nodes]
    summary = {
        "largest error": max((abs(row["error"]) for row in rows), default=None),
        "exact": sum(row["error"] == 0 for row in rows),
        "rows": len(rows),
        "us a node": [row["us a node"] for row in timed],
        "torch": torch.__version__,
    }
    if args.json:
        print(json.dumps({"rows": rows + timed, "summary": summary}))
    else:
        show(rows, timed)
        print(summary)


if __name__ == "__main__":
    main()
