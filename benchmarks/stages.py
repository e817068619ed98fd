"""Stages of real models beside the rules of other tools, at the same prices: ``--json`` for machines.

For each model, number of stages and setting, splitkit's plan and those of `rules`, judged alike: the seconds of the
most loaded stage (``bottleneck``), and the step of 1F1B with 16 microbatches on paper (``step``); of rules as ratios to
splitkit's (for machines also the ``peak`` of the fullest rank). Prices are of training, by the roofline of an H100, in
bfloat16; the weights are on the meta device.

work    ``Stages(n)``: the work alone counts
links   ``Stages(n, links="nvlink4")``: a stage also pays for what it sends and receives, once
1f1b    ``Stages(n, schedule="1f1b", microbatches=16, links="nvlink4")``: gradients come back; the step decides ties

A rule that sends masks and tables from stage to stage is charged for that, or for computing them in each stage that
reads them, whichever is less. With ``--measure`` models are smaller, in float32, prices are measured times of ops on
this CPU in steps of forward and backward, and the parts of each plan really run, forward and backward, part by part:
the best of several rounds, all plans in turn, where a quick part runs several times a round. Both are seconds of the
processor, on one thread; ``sum`` is what the prices of all parts promise over what they took. Dropout is off.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from recompute import Sum
from rich.console import Console
from rich.table import Table
from rules import RULES
from small_nets import UNet
from torch import nn
from torch.utils import _pytree as pytree

import splitkit as sk
from splitkit.costs import Costs, Links
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.testing import models
from splitkit.testing.models import Example

MICROBATCHES = 16
LINK = "nvlink4"
NEAR = 1e-6
"""Relative: what differs by less is equal."""
APART = 0.05
"""Relative: predictions that differ by more should be in the order of what is measured."""
SHORTEST = 0.01
"""Seconds that a part runs in a round, again and again: a guest's clock stands still while it settles stolen time."""
Sizes = Mapping[str, int]

LARGE: Mapping[str, Sizes] = {
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "batch": 8, "seq": 1024},
    "llama": {"layers": 16, "width": 2048, "heads": 32, "vocab": 128256, "batch": 1, "seq": 2048},
    "t5": {"layers": 12, "width": 768, "heads": 12, "vocab": 32128, "batch": 8, "seq": 512},
    "mixtral": {"layers": 16, "width": 1024, "heads": 16, "experts": 8, "vocab": 32000, "batch": 2, "seq": 1024},
    "vit": {"layers": 24, "width": 1024, "heads": 16, "batch": 32},
    "unet": {"width": 64, "levels": 4, "batch": 8, "image": 256},
}
SMALL: Mapping[str, Sizes] = {
    "gpt2": {"layers": 12, "width": 256, "heads": 4, "vocab": 50257, "batch": 2, "seq": 128},
    "llama": {"layers": 8, "width": 256, "heads": 4, "vocab": 32000, "batch": 2, "seq": 128},
    "t5": {"layers": 4, "width": 256, "heads": 4, "vocab": 32128, "batch": 2, "seq": 128},
    "mixtral": {"layers": 6, "width": 256, "heads": 4, "experts": 4, "vocab": 8000, "batch": 2, "seq": 128},
    "vit": {"layers": 12, "width": 192, "heads": 3, "batch": 4},
    "unet": {"width": 16, "levels": 4, "batch": 2, "image": 128},
}


@dataclass(frozen=True)
class Setting:
    """What counts.

    Attributes:
        policy: number of stages -> splitkit's policy.
        links: the preset between stages, ``None``: values cross for nothing.
        training: whether gradients cross too.
    """

    policy: Callable[[int], Stages]
    links: str | None
    training: bool


SETTINGS: Mapping[str, Setting] = {
    "work": Setting(Stages, None, False),
    "links": Setting(lambda n: Stages(n, links=LINK), LINK, False),
    "1f1b": Setting(lambda n: Stages(n, schedule="1f1b", microbatches=MICROBATCHES, links=LINK), LINK, True),
}


def build(name: str, sizes: Sizes) -> Example:
    """A model without dropout."""
    if name == "unet":
        image = torch.randn(sizes["batch"], 3, sizes["image"], sizes["image"])
        example = Example(Sum(UNet(sizes["width"], sizes["levels"])), (image,), {})
    else:
        example = models.build(name, **sizes)
    example.model.eval()
    return example


def on_paper(name: str, sizes: Sizes) -> Example:
    """The same in bfloat16, on the meta device."""
    with torch.device("meta"):
        example = build(name, sizes)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, (example.args, example.kwargs)
    )
    return Example(example.model.bfloat16(), args, kwargs)


class Case:
    """A model's graph and its prices, and the judge of plans."""

    def __init__(self, example: Example, measure: bool) -> None:
        self.example = example
        self.gm = sk.capture(example.model, *example.args, **example.kwargs)
        if measure:
            given = example.args or dict(example.kwargs)
            with patch.object(time, "perf_counter", time.process_time):  # others may use the processor meanwhile
                self.costs: Costs = sk.costs.measured(self.gm, given, min_run_time=0.05, backward=True)
        else:
            self.costs = sk.costs.training(sk.costs.roofline(self.gm, "h100"))
        self.flow = sk.analyze(self.gm)
        seconds = {node: self.costs.seconds(node) for node in self.flow.nodes}
        self._sending = PlacementModel(self.flow, self.costs, [seconds])
        self._copying = PlacementModel(self.flow, self.costs, [seconds], repeat=True)
        self._prices = StagePrices(self.flow, self.costs, "adam", activations(self.gm))

    def planned(self, policy: Any) -> tuple[Plan, float]:
        """A plan that was checked, and the seconds that it took."""
        start = time.perf_counter()
        plan = sk.plan(self.gm, policy, self.costs)
        return plan, time.perf_counter() - start

    def with_copies(self, plan: Plan, count: int) -> Plan:
        """The plan with masks and tables in each stage that reads them."""
        device = np.array([plan.home(unit) for unit in self._copying.units], np.int64)
        return Plan.of(self._copying.labels(device, range(count)))

    def figures(self, plan: Plan, count: int, setting: Setting) -> dict[str, Any]:
        """Seconds of the most loaded stage and of the step; bytes of the fullest rank."""
        links = None if setting.links is None else Links.preset(setting.links)
        travel = None if links is None else TransferTimes.over(links, range(count), training=setting.training)
        loads = self._sending.loads(plan, range(count), [0] * count, travel)
        stages = self._prices.of(plan)
        run = sk.simulate_schedule(stages, "1f1b", MICROBATCHES, links=links)
        return {
            "bottleneck": float(loads.max()), "step": run.seconds, "peak": max(run.peaks),
            "loads": loads.tolist(), "parts": len(stages),
        }  # fmt: skip

    def figures_of_rule(self, plan: Plan, count: int, setting: Setting) -> dict[str, Any]:
        """The same, with or without copies, whichever is better."""
        both = [self.figures(plan, count, setting)]
        if setting.links is not None:
            both.append(self.figures(self.with_copies(plan, count), count, setting))
        return min(both, key=lambda found: found["bottleneck"])


def rules_of(case: Case, count: int) -> Iterator[tuple[str, Plan | None, float | str]]:
    """Name, plan and seconds of each rule; no plan and the reason where it has none."""
    for name, rule in RULES.items():
        start = time.perf_counter()
        try:
            plan, _ = case.planned(rule(case.flow, case.example.model, count, case.costs))
        except SplitError as error:
            yield name, None, str(error)
        else:
            yield name, plan, time.perf_counter() - start


def row(case: Case, count: int, setting: Setting, measured_rounds: int) -> dict[str, Any]:
    """Splitkit's plan and the others'."""
    plan, seconds = case.planned(setting.policy(count))
    own = case.figures(plan, count, setting)
    assert plan.claim is not None
    own |= {"planned in": seconds, "gap": plan.claim.gap, "solver": plan.claim.solver}
    plans, rules = {"splitkit": plan}, dict[str, Any]()
    for name, other, took in rules_of(case, count):
        if other is None:
            rules[name] = {"none": took}
            continue
        plans[name] = other
        rules[name] = case.figures_of_rule(other, count, setting) | {"planned in": took}
        rules[name] |= {key + " ratio": rules[name][key] / own[key] for key in ("bottleneck", "step", "peak")}
    if measured_rounds:
        found = measured(case, plans, measured_rounds)
        own["measured"] = found["splitkit"]
        own["sum"] = sum(map(case.costs.seconds, case.flow.nodes)) / sum(found["splitkit"])
        for name in plans.keys() - {"splitkit"}:
            rules[name] |= {
                "measured": found[name],
                "measured ratio": max(found[name]) / max(found["splitkit"]),
            }
    return {"splitkit": own, "rules": rules}


def measured(case: Case, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[float]]:
    """Seconds of forward and backward of each part of each plan, as they run."""
    runners = {name: _runners(case, plan) for name, plan in plans.items()}
    best = {name: [math.inf] * len(parts) for name, parts in runners.items()}
    for _ in range(rounds):
        for name, parts in runners.items():
            for i, run in enumerate(parts):
                best[name][i] = min(best[name][i], run())
    return best


def _runners(case: Case, plan: Plan) -> list[Callable[[], float]]:
    """For each part what runs it for a while, and returns the seconds of one run."""
    split = sk.split(case.gm, plan, costs=case.costs)
    taken: dict[nn.Module, tuple[Any, ...]] = {}
    hooks = [
        part.register_forward_pre_hook(lambda part, args: taken.__setitem__(part, args))
        for part in split.parts.values()
    ]
    split(*case.example.args, **case.example.kwargs)
    for hook in hooks:
        hook.remove()
    return [_runner(split, key, taken[part]) for key, part in split.parts.items()]


def _runner(split: Split, key: Any, taken: tuple[Any, ...]) -> Callable[[], float]:
    part, cut = split.parts[key], split.subgraphs[key]
    inside = set(cut.nodes)
    # the gradient comes from other parts, and begins at the loss: nobody gives one for the logits
    handed = [any(u.op != "output" and u not in inside for u in value.users) for value in cut.outputs]
    tangents = dict[int, torch.Tensor]()

    def once() -> float:
        given = [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in taken]
        part.zero_grad(set_to_none=True)
        start = time.process_time()
        made = pytree.tree_leaves(part(*given))
        graded = [
            (i, t)
            for i, (t, on) in enumerate(zip(made, handed, strict=True))
            if isinstance(t, torch.Tensor) and t.requires_grad and (on or t.numel() == 1)
        ]
        if graded:
            tangents.update({i: torch.ones_like(t) for i, t in graded if i not in tangents})
            torch.autograd.backward([t for _, t in graded], [tangents[i] for i, _ in graded])
        return time.process_time() - start

    def often() -> float:
        once()  # a rank runs no other part in between, and has its memory from the run before
        spent, runs = 0.0, 0
        while spent < SHORTEST:
            spent, runs = spent + once(), runs + 1
        return spent / runs

    once()  # makes code and tangents
    return often


def rows_of(name: str, sizes: Sizes, counts: list[int], settings: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    """One row for each number of stages and setting."""
    case = Case(build(name, sizes) if rounds else on_paper(name, sizes), bool(rounds))
    for count in counts:
        for setting in settings:
            head = {
                "model": name, "sizes": dict(sizes), "nodes": len(case.flow.nodes),
                "price": getattr(case.costs, "note", ""), "stages": count, "setting": setting,
            }  # fmt: skip
            yield head | row(case, count, SETTINGS[setting], rounds)


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of each rule, how often one is better than splitkit, and whether measured times are in their order."""
    pairs = [(r, name, rule) for r in rows for name, rule in r["rules"].items() if "bottleneck" in rule]
    found: dict[str, Any] = {}
    for setting in dict.fromkeys(r["setting"] for r in rows):
        for rule in RULES:
            for what in ("bottleneck", "step", "peak", "measured"):
                ratios = [o[f"{what} ratio"] for r, n, o in pairs
                          if (r["setting"], n) == (setting, rule) and f"{what} ratio" in o]  # fmt: skip
                if ratios:
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    found.setdefault(setting, {}).setdefault(rule, {})[what] = {
                        "least": min(ratios), "geometric mean": mean, "most": max(ratios)
                    }  # fmt: skip
    return {
        "rows": len(rows),
        "ratios": found,
        "better than splitkit in bottleneck": _better(pairs, "bottleneck"),
        "better than splitkit in step": _better(pairs, "step"),
        "largest gap": max(r["splitkit"]["gap"] for r in rows),
        "longest planning": max(r["splitkit"]["planned in"] for r in rows),
        **_agreement(rows),
        "torch version": torch.__version__,
    }


def _better(pairs: list[tuple[dict[str, Any], str, dict[str, Any]]], what: str) -> list[str]:
    return [
        f"{r['model']}, {r['stages']} stages, {r['setting']}: {name} {rule[f'{what} ratio']:.4f}"
        for r, name, rule in pairs
        if rule[f"{what} ratio"] < 1 - NEAR
    ]


def _agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prices over what ran, and of the pairs of plans that are predicted to differ those measured in that order."""
    same, apart = 0, 0
    for r in rows:
        plans = [p for p in (r["splitkit"], *r["rules"].values()) if "measured" in p]
        for a, b in combinations(sorted(plans, key=lambda p: p["bottleneck"]), 2):
            if b["bottleneck"] > a["bottleneck"] * (1 + APART):
                apart += 1
                same += max(b["measured"]) > max(a["measured"])
    sums = [r["splitkit"]["sum"] for r in rows if "sum" in r["splitkit"]]
    held = {"sums of prices over what ran": [min(sums), max(sums)]} if sums else {}
    return held | ({"pairs predicted apart": apart, "measured in that order": same} if apart else {})


def show(rows: list[dict[str, Any]], sizes: Mapping[str, Sizes]) -> None:
    """A table."""
    console = Console(width=200)
    table = Table("model", "nodes", "stages", "setting", "slowest, ms", "gap", "solver", "planned in, s", "step, ms")
    for name in RULES:
        table.add_column(name)
    for r in rows:
        own = r["splitkit"]
        slowest = f"{1e3 * own['bottleneck']:.3f}"
        slowest += f" (ran {1e3 * max(own['measured']):.3f}, sum {own['sum']:.2f})" if "measured" in own else ""
        table.add_row(
            r["model"], str(r["nodes"]), str(r["stages"]), r["setting"], slowest, f"{own['gap']:.2%}", own["solver"],
            f"{own['planned in']:.2f}", f"{1e3 * own['step']:.2f}", *(_cell(rule) for rule in r["rules"].values()),
        )  # fmt: skip
    console.print(table)
    console.print(
        "Rules: bottleneck / step (/ bottleneck as it ran), as ratios to splitkit's; how many stages have work."
    )
    for name in dict.fromkeys(r["model"] for r in rows):
        console.print(f"{name}: {', '.join(f'{key} {size}' for key, size in sizes[name].items())}")


def _cell(rule: dict[str, Any]) -> str:
    if "none" in rule:
        return "-"
    keys = [f"{what} ratio" for what in ("bottleneck", "step", "measured")]
    used = f" ({rule['parts']} used)" if rule["parts"] < len(rule["loads"]) else ""
    return " / ".join(f"{rule[key]:.3f}" for key in keys if key in rule) + used


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--measure", action="store_true", help="measured prices of smaller models; run the parts")
    parser.add_argument("--models", nargs="*", default=list(LARGE), choices=list(LARGE))
    parser.add_argument("--stages", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), help="all; with --measure work")
    parser.add_argument("--rounds", type=int, default=8, help="of --measure; the best counts")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = SMALL if args.measure else LARGE
    settings = args.settings or (["work"] if args.measure else list(SETTINGS))
    rounds = 0
    if args.measure:
        torch.set_num_threads(1)
        rounds = args.rounds
    rows = [row for name in args.models for row in rows_of(name, sizes[name], args.stages, settings, rounds)]
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary_of(rows)}))
    else:
        show(rows, sizes)
        Console(width=200).print(summary_of(rows))


if __name__ == "__main__":
    main()
