"""Stages on one device each beside stages that may stand on several: ``--json`` for machines.

For a GPT-2 with a heavy head and a uniform chain, on as many devices: the step of ``Stages(8)`` and that of
``Stages(8, replicas=(1, 2, 4))``, under 1F1B with 16 microbatches on paper, their ratio, and what both claim of the
slowest device. Prices are of training, by the roofline of an H100, in bfloat16; the weights are on the meta device. A
ring adds up the gradients of replicas once a step; memory is what an H100 has, with Adam.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import splitkit as sk
from splitkit.policies import Stages
from splitkit.testing import models

DEGREES = (1, 2, 4)
SCHEDULE, MICROBATCHES = "1f1b", 16
MEMORY = "80GiB"


class Chain(nn.Module):
    """Layers that are all alike."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) -> (batch, width)."""
        for layer in self.layers:
            x = layer(x)
        return x


def captured(name: str, *, small: bool) -> torch.fx.GraphModule:
    """The graph of a model on the meta device, in bfloat16."""
    with torch.device("meta"):
        if name == "chain":
            return sk.capture(Chain(24, 4096).bfloat16(), torch.empty(8192, 4096, dtype=torch.bfloat16))
        sizes = {"layers": 4, "width": 256, "heads": 4} if small else {"layers": 12, "width": 768, "heads": 12}
        example = models.build("gpt2", **sizes, vocab=50257, batch=8, seq=1024)
        return sk.capture(example.model.bfloat16(), *example.args, **example.kwargs)


def row(gm: torch.fx.GraphModule, devices: int, links: str, replicas: tuple[int, ...]) -> dict[str, Any]:
    """What stages of so many replicas at most come to."""
    costs = sk.costs.roofline(gm, "h100")
    policy = Stages(devices, SCHEDULE, MICROBATCHES, MEMORY, links, replicas=replicas)
    began = time.process_time()
    plan = sk.plan(gm, policy, costs)
    planning = time.process_time() - began
    stages = sk.stage_costs(gm, plan, costs)
    run = sk.simulate_schedule(stages, SCHEDULE, MICROBATCHES, links=links)
    claim = plan.claim
    assert claim is not None
    return {
        "replicas": [stage.replicas for stage in stages],
        "step": run.seconds,
        "peak": max(run.peaks),
        "bottleneck": claim.value,
        "bound": claim.bound,
        "planning": planning,
        "note": plan.note,
    }


def main() -> None:
    """Print a row for each model and links."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="how many (8)")
    parser.add_argument("--links", nargs="+", default=["nvlink4", "pcie4"], help="presets (nvlink4 pcie4)")
    parser.add_argument("--models", nargs="+", default=["gpt2", "chain"], choices=["gpt2", "chain"])
    parser.add_argument("--small", action="store_true", help="four layers of GPT-2, for a look")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args()
    degrees = tuple(d for d in DEGREES if d <= args.devices)
    rows = []
    for name in args.models:
        gm = captured(name, small=args.small)
        for links in args.links:
            one, more = (row(gm, args.devices, links, replicas) for replicas in ((1,), degrees))
            rows.append({"model": name, "links": links, "one": one, "more": more, "ratio": one["step"] / more["step"]})
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    console = Console()
    titles = ("model", "links", "step", "with replicas", "ratio", "replicas", "slowest", "bound", "peak", "CPU s")
    table = Table(*titles, title=f"{args.devices} devices, {SCHEDULE} of {MICROBATCHES} microbatches")
    for each in rows:
        one, more = each["one"], each["more"]
        table.add_row(
            each["model"],
            each["links"],
            f"{one['step'] * 1e3:.2f} ms",
            f"{more['step'] * 1e3:.2f} ms",
            f"{each['ratio']:.3f}",
            " ".join(map(str, more["replicas"])),
            f"{more['bottleneck'] * 1e3:.3f} ms",
            f"{more['bound'] * 1e3:.3f} ms",
            f"{more['peak'] / 2**30:.1f} GiB",
            f"{one['planning']:.1f} / {more['planning']:.1f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
