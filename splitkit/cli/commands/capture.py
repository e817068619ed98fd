"""``splitkit capture``: captures a model as a graph and describes it."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import source
from splitkit.cli.common import prepare
from splitkit.cli.outcome import Lines, Outcome, seconds_text
from splitkit.errors import listed
from splitkit.units import quantity, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from torch import fx

    from splitkit.graph.dataflow import Dataflow

TOP = 10
"""The number of ops in the table."""
SHOWN = 3
"""The number of nodes named per reason for which nodes run only once."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit capture``."""
    work = prepare(source.from_args(args.model, args))
    data = {"model": work.source.to_dict(), **summary(work.gm)}
    data["seconds"] = work.clock.seconds
    return Outcome(data, _text(data))


def summary(gm: fx.GraphModule) -> dict[str, Any]:
    """Return a summary of a graph as data."""
    from splitkit._torch import target_name

    flow = sk.analyze(gm)
    ops = Counter(target_name(n) for n in flow.index if n.op.startswith("call_"))
    once: dict[str, list[str]] = {}
    for node, reason in flow.once.items():
        once.setdefault(reason, []).append(node.name)
    return {
        "nodes": {"all": len(flow.index), "placeable": len(flow.nodes), **Counter(n.op for n in flow.index)},
        "ops": dict(ops.most_common()),
        "parameters": sum(p.numel() for p in gm.parameters()),
        "parameter_bytes": sum(p.nbytes for p in gm.parameters()),
        "buffers": len(list(gm.buffers())),
        "flops": _flops(gm, flow),
        "regions": _regions(flow),
        "dynamic": _dynamic(flow),
        "once": once,
    }


def _flops(gm: fx.GraphModule, flow: Dataflow) -> float | None:
    prices = sk.costs.default(gm)
    return sum(prices.flops(n) for n in flow.nodes) if isinstance(prices, sk.costs.Flops) else None


def _regions(flow: Dataflow) -> dict[str, int]:
    """Return kind of region -> the number of nodes in such regions."""
    from splitkit.graph.scope import region_kind

    inside: Counter[str] = Counter()
    for node in flow.nodes:
        scope = flow.scope[node]
        inside.update({region_kind(enter).name for enter in scope.regions})
        inside.update(["no_grad"] if scope.grad is False else ["enable_grad"] if scope.grad else [])
    return dict(inside)


def _dynamic(flow: Dataflow) -> dict[str, str]:
    """Return the varying sizes of inputs: ``input_ids.shape[0]`` -> its symbol."""
    import torch

    from splitkit.cli.commands.split import size_data

    return {
        f"{node.name}.shape[{dim}]": name
        for node in flow.index
        if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        for dim, size in enumerate(node.meta["val"].shape)
        if isinstance(name := size_data(size), str)
    }


def _text(data: dict[str, Any]) -> Lines:
    kinds = ", ".join(f"{name} {number}" for name, number in data["nodes"].items() if name != "all")
    rows = {
        "nodes": f"{data['nodes']['all']} ({kinds})",
        "parameters": f"{quantity(data['parameters'])} ({size(data['parameter_bytes'])})",
        "buffers": data["buffers"],
        "FLOPs": "unknown: the graph carries no sizes" if data["flops"] is None else quantity(data["flops"]),
        "regions": ", ".join(f"{kind} ({number} nodes)" for kind, number in data["regions"].items()) or "none",
        "dynamic sizes": ", ".join(f"{place} = {name}" for place, name in data["dynamic"].items()) or "none",
        "run only once": "nothing",
        "captured in": seconds_text(data["seconds"]["capture"]),
    }
    if data["once"]:
        rows["run only once"] = "; ".join(f"{reason}: {listed(names, SHOWN)}" for reason, names in data["once"].items())
    counts = list(data["ops"].items())
    title = f"ops ({len(counts)} kinds, the first {TOP})" if len(counts) > TOP else "ops"
    return [facts(rows), "", table(("op", "nodes"), counts[:TOP], ("nodes",), title)]
