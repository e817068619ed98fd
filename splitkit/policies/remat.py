"""Selective recompute by rule: keep what is listed, compute the rest again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Node

from splitkit.checks import are_texts, shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.select import Ops, modules_matching, rule_of
from splitkit.plans.record import Plan
from splitkit.training.checkpoints import recomputed
from splitkit.training.flow import FORWARD, JointFlow, as_joint, homes, recompute


@dataclass(frozen=True)
class Remat:
    """Backward computes again all of forward but what is kept, or only what lies in some modules.

    ``Remat(["aten.mm", "aten.addmm"])`` keeps the outputs of matrix products. Megatron's selective recompute, which
    computes again the core of attention and saves everything else (Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models"), is ``Remat(["aten.mm", "aten.addmm"], modules="*.attn")``; full
    recompute of every block that saves its inputs is ``Remat(modules="transformer.h.*")``.

    Inputs are always kept, and so is what may not be computed twice.

    Attributes:
        keep: ops whose outputs are saved; ops, names of ops, or a rule ``node -> bool``
            (`splitkit.graph.select.Ops`).
        modules: shell-style patterns of module paths; only what runs in these modules, or below, is computed again.
            All by default.
    """

    keep: Ops = ()
    modules: str | Collection[str] = "*"

    def __post_init__(self) -> None:
        modules: object = self.modules
        patterns = (modules,) if isinstance(modules, str) else modules
        if not are_texts(patterns) or not len(patterns):
            raise PolicyError(
                "SK302",
                f"Remat has modules={shown(modules)}, which are no patterns of module paths",
                "Give 'transformer.h.*' or a list of such; '*' is all of them, and SaveAll() computes nothing again.",
            )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``"forward"`` and ``"backward"``; SK302 for a graph that is no joint graph, SK304 for a pattern
        that matches no module, and for a name that is no op.
        """
        joint = as_joint(self, flow)
        plan, kept = homes(joint), rule_of(self, self.keep, joint)
        if self.modules == "*":
            return recompute(joint, plan, [n for n in joint.nodes if kept(n)])
        inside = self._inside(joint, plan)
        return recomputed(joint, plan, [n for n in inside if not kept(n)])

    def _inside(self, flow: JointFlow, plan: Plan) -> list[Node]:
        """Forward's nodes that run in the modules which the patterns name."""
        patterns = (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        return list(modules_matching(patterns, [n for n in flow.nodes if plan[n] == (FORWARD,)]))
