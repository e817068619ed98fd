"""Recompute: torch's activation budget beside splitkit's, at torch's true peak: ``--json`` for machines.

For each model, price and budget of torch's: what its partitioner recomputes and saves, and the simulated peak of its
halves; and splitkit's least recompute time within that very peak, torch's plan among the candidates. ``reach``: the
lowest peak of splitkit's, of torch's lowest, whole and above what the caller holds (weights and inputs).

Times of planning: torch's partition function against splitkit's policy and division, on one joint graph, in turn. With
``--measure`` the halves of both really run, and the peak of their live bytes stands beside the simulated one. Dropout
is off: below a budget of 1, torch draws it anew. ``training_steps.py`` has the seconds of real steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from small_nets import ResNet, UNet, loss_or_sum
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit.costs import Costs
from splitkit.engine.pair import Pair
from splitkit.policies import Remat
from splitkit.policies.budget import Budget
from splitkit.testing import models
from splitkit.testing.models import Example

BUDGETS = (1.0, 0.8, 0.5, 0.3, 0.2, 0.1, 0.0)
PRICES: dict[str, Callable[[torch.fx.GraphModule], Costs]] = {
    "flops": sk.costs.flops,
    "roofline": lambda gm: sk.costs.roofline(gm, device="a100"),
    "fused": lambda gm: sk.costs.fused(gm, device="a100"),
}


class Sum(nn.Module):
    """A net whose output is summed to a loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number."""
        return self.net(x).float().square().mean()


def _image(net: nn.Module, size: int, batch: int) -> Example:
    return Example(Sum(net), (torch.randn(batch, 3, size, size),), {})


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt2": lambda: models.build("gpt2", layers=12, batch=4, seq=512),
    "llama": lambda: models.build("llama", layers=8, batch=4, seq=512),
    "llama-32": lambda: models.build("llama", layers=32, width=256, heads=4, vocab=8000, batch=4, seq=256),
    "bert": lambda: models.build("bert", layers=12, batch=4, seq=512),
    "t5": lambda: models.build("t5", batch=8, seq=256),
    "vit": lambda: models.build("vit", layers=12, batch=16),
    "mixtral": lambda: models.build("mixtral", batch=8, seq=512),
    "resnet": lambda: _image(ResNet(64), 224, 8),
    "unet": lambda: _image(UNet(32, 4), 256, 4),
}


def recomputed(pair: Pair, costs: Costs) -> float:
    """Seconds of the nodes of forward that backward computes again.

    A node that only backward computes, although no gradient reaches it, is late and not twice: it does not count.
    """
    twice = {n.name for n in pair.forward.graph.nodes if n.op == "call_function"}
    known = {n.name: n for n in costs.gm.graph.nodes}  # type: ignore[attr-defined]
    again = [n.name for n in pair.backward.graph.nodes if n.op == "call_function" and n.name in twice]
    return sum(costs.seconds(known[name]) for name in again if name in known)


class Case:
    """A model's joint graph, and how to plan and run it."""

    def __init__(self, name: str, measure: bool) -> None:
        torch.manual_seed(0)
        self.name, self.measure, self.example = name, measure, EXAMPLES[name]()
        for module in self.example.model.modules():
            if not isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.training = False
        self.joint = sk.capture_joint(self.example.model, *self.example.args, **self.example.kwargs, loss=loss_or_sum)

    def torchs(self, budget: float, costs: Costs) -> dict[str, Any]:
        """What torch's partitioner makes of a budget."""
        with functorch_config.patch(activation_memory_budget=budget):
            start = time.perf_counter()
            pair = self.joint.partition(min_cut_rematerialization_partition)
            took = time.perf_counter() - start
        return self._figures(pair, costs, took)

    def ours(self, torchs: dict[str, Any], costs: Costs) -> dict[str, Any]:
        """What splitkit makes of the same peak, torch's plan in the pool of candidates."""
        saved = frozenset(torchs["pair"].saved)
        start = time.perf_counter()
        policy = Budget(torchs["peak"], candidates=(Remat(lambda node: node.name in saved),))
        pair = self.joint.split(policy, costs)
        took = time.perf_counter() - start
        return self._figures(pair, costs, took) | {"note": pair.plan.note if pair.plan else ""}

    def lowest(self, costs: Costs) -> int:
        """The lowest peak that splitkit reaches."""
        pair = self.joint.split(Budget("least"), costs)
        return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak

    def _figures(self, pair: Pair, costs: Costs, took: float) -> dict[str, Any]:
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        figures = {
            "recompute": recomputed(pair, costs), "saved": profile.saved, "peak": profile.peak,
            "held": profile.baseline, "seconds": took, "pair": pair,
        }  # fmt: skip
        return figures | ({"measured": self._measured(pair)} if self.measure else {})

    def _measured(self, pair: Pair) -> int:
        """The peak of live bytes of a real run."""
        primals = self.joint.primals(*self.example.args, **self.example.kwargs)
        held = list(primals)  # by the caller of a training step
        peak = sk.measure_memory(pair.run, primals, self.joint.tangents()).peak
        del held
        return peak


def rows_of(name: str, prices: list[str], budgets: tuple[float, ...], measure: bool) -> Iterator[dict[str, Any]]:
    """One row for each price and budget."""
    case = Case(name, measure)
    gm = case.joint.graph_module
    for price in prices:
        costs = PRICES[price](gm)
        theirs = [case.torchs(budget, costs) for budget in budgets]
        low, reach = min(their["peak"] for their in theirs), case.lowest(costs)
        for budget, their in zip(budgets, theirs, strict=True):
            own = case.ours(their, costs)
            yield {
                "model": name, "nodes": len(gm.graph.nodes), "price": price, "budget": budget,
                "torch": {k: v for k, v in their.items() if k != "pair"},
                "splitkit": {k: v for k, v in own.items() if k != "pair"},
                "lowest": {"torch": low, "splitkit": reach},
                "reach": reach / low, "reach above held": (reach - own["held"]) / (low - own["held"]),
            }  # fmt: skip


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and how often splitkit is worse."""
    costly = [r for r in rows if r["torch"]["recompute"] > 0]
    tolerance = 1 + 1e-9
    runs = [r[who] for r in rows for who in ("torch", "splitkit") if "measured" in r[who]]
    return {
        "rows": len(rows),
        "worse in time": sum(r["splitkit"]["recompute"] > r["torch"]["recompute"] * tolerance for r in rows),
        "worse in peak": sum(r["splitkit"]["peak"] > r["torch"]["peak"] for r in rows),
        "median recompute, of torch's": statistics.median(
            r["splitkit"]["recompute"] / r["torch"]["recompute"] for r in costly
        ) if costly else None,
        "median lowest peak, of torch's": statistics.median(r["reach"] for r in rows),
        "median lowest peak above what is held, of torch's": statistics.median(r["reach above held"] for r in rows),
        "median planning time, of torch's": statistics.median(
            r["splitkit"]["seconds"] / r["torch"]["seconds"] for r in rows
        ),
        "measured runs": len(runs),
        "worst error of the simulated peak": max((abs(r["peak"] / r["measured"] - 1) for r in runs), default=None),
        "torch version": torch.__version__,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """A table."""
    table = Table("model", "nodes", "price", "budget", "peak, MB", "torch ms", "splitkit ms", "of torch's", "its peak")
    for title in ("saved, MB", "planned in, s", "measured, MB", "lowest peak, of torch's", "above held"):
        table.add_column(title)
    for r in rows:
        their, own = r["torch"], r["splitkit"]
        ratio = own["recompute"] / their["recompute"] if their["recompute"] else float(own["recompute"] > 0)
        table.add_row(
            r["model"], str(r["nodes"]), r["price"], str(r["budget"]), f"{their['peak'] / 1e6:.1f}",
            f"{1e3 * their['recompute']:.3f}", f"{1e3 * own['recompute']:.3f}", f"{ratio:.2f}",
            f"{own['peak'] / their['peak']:.3f}", f"{their['saved'] / 1e6:.1f} / {own['saved'] / 1e6:.1f}",
            f"{their['seconds']:.2f} / {own['seconds']:.2f}",
            f"{their['measured'] / 1e6:.1f} / {own['measured'] / 1e6:.1f}" if "measured" in own else "",
            f"{r['reach']:.2f}", f"{r['reach above held']:.2f}",
        )  # fmt: skip
    Console(width=220).print(table)


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--measure", action="store_true", help="run the halves and measure their peaks")
    parser.add_argument("--models", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES))
    parser.add_argument("--prices", nargs="*", default=list(PRICES), choices=list(PRICES))
    parser.add_argument("--budgets", nargs="*", type=float, default=list(BUDGETS))
    args = parser.parse_args()
    budgets = tuple(args.budgets)
    rows = [row for name in args.models for row in rows_of(name, args.prices, budgets, args.measure)]
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary_of(rows)}))
    else:
        show(rows)
        print(summary_of(rows))


if __name__ == "__main__":
    main()
