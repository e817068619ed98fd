"""Real training steps on the CPU: torch's activation budget beside splitkit's, at equal peak; ``--json`` for machines.

eager     the halves that each makes of one joint graph, run operator by operator. Prices are measured times of ops;
          splitkit plans within the simulated peak of torch's halves. Peaks are of live bytes, measured.
inductor  ``torch.compile`` with torch's partitioner, and with ``splitkit.backend(policy, inner="inductor")``, where the
          policy plans within the peak that torch's halves of the very same joint graph have, or within less until
          the measured peak is no higher. Prices are fused; peaks are what the allocator gave out.

Each takes its steps in turn with the other, after one to warm up; the least time of each counts. Dropout is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from recompute import Sum
from rich.console import Console
from rich.table import Table
from small_nets import ResNet, loss_or_sum
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit.costs import Costs
from splitkit.engine.pair import Pair
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan
from splitkit.policies import Remat
from splitkit.policies.budget import Budget
from splitkit.testing import models
from splitkit.testing.models import Example
from splitkit.training.flow import as_joint

Step = Callable[[], object]
TRIES = 4
BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.1)
EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: models.build("gpt2", layers=4, width=256, heads=4, vocab=8000, batch=4, seq=256),
    "llama": lambda: models.build("llama", layers=4, width=256, heads=4, vocab=8000, batch=4, seq=256),
    "resnet": lambda: Example(Sum(ResNet(32)), (torch.randn(8, 3, 128, 128),), {}),
}


@dataclass(frozen=True)
class AtTorchsPeak:
    """Plans within the peak that torch's partitioner has at a budget, on the graph that it is given.

    Attributes:
        budget: ``activation_memory_budget``.
        share: of that peak.
    """

    budget: float
    share: float = 1.0

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Let torch divide a copy, and plan within that."""
        joint = as_joint(self, flow)
        graph = torch.fx.Graph()
        output = graph.graph_copy(joint.graph, {})
        graph.output(output)
        graph.output_node().meta = dict(joint.graph.output_node().meta)
        gm = torch.fx.GraphModule(joint.root, graph)
        inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder")]
        with functorch_config.patch(activation_memory_budget=self.budget):
            halves = min_cut_rematerialization_partition(gm, inputs, num_fwd_outputs=joint.forward_outputs)
        pair = Pair.of(*halves, joint.forward_outputs)
        peak = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak
        saved = frozenset(pair.saved)
        return Budget(int(self.share * peak), candidates=(Remat(lambda node: node.name in saved),)).assign(flow, costs)


def still(example: Example) -> Example:
    """Without dropout."""
    for module in example.model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
    return example


def in_turn(steps: dict[str, Step], repeat: int) -> dict[str, float]:
    """The least seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeat):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return {name: min(found) for name, found in seconds.items()}


def eager(example: Example, budgets: list[float], repeat: int) -> list[dict[str, Any]]:
    """The halves, run by torch's interpreter."""
    joint = sk.capture_joint(example.model, *example.args, **example.kwargs, loss=loss_or_sum)
    inputs = [*joint.primals(*example.args, **example.kwargs), *joint.tangents()]
    costs = sk.costs.measured(joint.graph_module, inputs)

    def runner(pair: Pair) -> Step:
        return lambda: pair.run(joint.primals(*example.args, **example.kwargs), joint.tangents())

    rows = []
    for budget in budgets:
        with functorch_config.patch(activation_memory_budget=budget):
            theirs = joint.partition(min_cut_rematerialization_partition)
        steps = {"torch": runner(theirs), "splitkit": runner(joint.split(AtTorchsPeak(budget), costs))}
        peaks = {name: sk.measure_memory(step).peak for name, step in steps.items()}
        rows.append({"budget": budget, "seconds": in_turn(steps, repeat), "peak": peaks})
    return rows


def inductor(example: Example, budgets: list[float], repeat: int) -> list[dict[str, Any]]:
    """The halves, compiled."""
    model = example.model

    def stepper(compiled: Callable[..., Any]) -> Step:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            found = compiled(*example.args, **example.kwargs)
            (found if isinstance(found, torch.Tensor) else found.loss).backward()

        step()
        return step

    def peak_of(step: Step) -> int:
        model.zero_grad(set_to_none=True)
        return sk.measure_memory(step, allocator=True).allocator_peaks["cpu"]

    rows = []
    for budget in budgets:
        torch._dynamo.reset()
        with functorch_config.patch(activation_memory_budget=budget):
            theirs = stepper(torch.compile(model))
        target, share = peak_of(theirs), 1.0
        for _ in range(TRIES):
            policy = AtTorchsPeak(budget, share)
            try:
                ours = stepper(torch.compile(model, backend=sk.backend(policy, inner="inductor")))
            except BackendCompilerFailed:  # no plan within that
                break
            peak = peak_of(ours)
            if peak <= target * 1.005:
                break
            share *= target / peak
        steps = {"torch": theirs, "splitkit": ours}
        peaks = {"torch": target, "splitkit": peak}
        rows.append({"budget": budget, "share": share, "seconds": in_turn(steps, repeat), "peak": peaks})
    return rows


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of splitkit's share of torch's seconds and peak, by what ran the halves."""
    found: dict[str, Any] = {"torch version": torch.__version__, "threads": torch.get_num_threads()}
    for inner in dict.fromkeys(r["inner"] for r in rows):
        for what in ("seconds", "peak"):
            shares = [r[what]["splitkit"] / r[what]["torch"] for r in rows if r["inner"] == inner]
            found[f"{inner}, median {what}, of torch's"] = statistics.median(shares)
    return found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--models", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--inner", nargs="*", default=["eager", "inductor"], choices=["eager", "inductor"])
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS))
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.models:
        for inner in args.inner:
            torch.manual_seed(0)
            example, take = still(EXAMPLES[name]()), {"eager": eager, "inductor": inductor}[inner]
            rows += [{"model": name, "inner": inner, **row} for row in take(example, args.budgets, args.repeat)]
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary_of(rows)}))
        return
    table = Table("model", "inner", "budget", "torch s", "splitkit s", "of torch's", "torch MB", "splitkit MB")
    for r in rows:
        seconds, peak = r["seconds"], r["peak"]
        table.add_row(
            r["model"], r["inner"], str(r["budget"]), f"{seconds['torch']:.3f}", f"{seconds['splitkit']:.3f}",
            f"{seconds['splitkit'] / seconds['torch']:.2f}", f"{peak['torch'] / 1e6:.1f}",
            f"{peak['splitkit'] / 1e6:.1f}",
        )  # fmt: skip
    Console(width=140).print(table)
    print(summary_of(rows))


if __name__ == "__main__":
    main()
