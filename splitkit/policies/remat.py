"""The policy `Remat`: selective recompute by rule."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import Node

from splitkit.checks import are_texts, shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.node_selection import Ops, modules_matching, rule_of
from splitkit.plans.record import Plan
from splitkit.training.flow import FORWARD, JointFlow, as_joint, recompute, save_all_plan
from splitkit.training.peaks import recompute_in_backward


@dataclass(frozen=True)
class Remat:
    """Recompute all of forward except what is kept, or only the nodes of some modules.

    ``Remat(["aten.mm", "aten.addmm"])`` keeps the outputs of matrix products. Megatron's selective recompute, which
    recomputes the core of attention and saves everything else (Korthikanti et al. 2022, "Reducing Activation
    Recomputation in Large Transformer Models"), is ``Remat(["aten.mm", "aten.addmm"], modules="*.attn")``; full
    activation checkpointing, in which every block saves only its inputs, is ``Remat(modules="transformer.h.*")``.

    Inputs are always saved, and so are values that may not be computed twice.

    Attributes:
        keep: the ops whose outputs are saved: ops, names of ops, or a rule ``node -> bool``
            (`splitkit.graph.node_selection.Ops`).
        modules: shell-style patterns of module paths; only nodes in these modules, or below, are recomputed.
            All modules by default.
    """

    keep: Ops = ()
    modules: str | Collection[str] = "*"

    def __post_init__(self) -> None:
        modules: object = self.modules
        patterns = (modules,) if isinstance(modules, str) else modules
        if not are_texts(patterns) or not len(patterns):
            raise PolicyError(
                "SK302",
                f"Remat has modules={shown(modules)}, which are not patterns of module paths",
                "Give 'transformer.h.*' or a list of such patterns; '*' matches all, and SaveAll() recomputes nothing.",
            )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``"forward"`` and ``"backward"``; SK302 for a graph that is not a joint graph,
        SK304 for a pattern that matches no module or a name that is not an op.
        """
        joint = as_joint(self, flow)
        plan, kept = save_all_plan(joint), rule_of(self, self.keep, joint)
        if self.modules == "*":
            return recompute(joint, plan, [n for n in joint.nodes if kept(n)])
        inside = self._inside(joint, plan)
        return recompute_in_backward(joint, plan, [n for n in inside if not kept(n)])

    def _inside(self, flow: JointFlow, plan: Plan) -> list[Node]:
        """Return the nodes of forward in the modules that the patterns match."""
        patterns = (self.modules,) if isinstance(self.modules, str) else tuple(self.modules)
        return list(modules_matching(patterns, [n for n in flow.nodes if plan[n] == (FORWARD,)]))
