"""The authors' door: what a policy of one's own is made of; users of policies need the front door alone.

>>> from splitkit.extend import Dataflow, Plan, PolicyError, checks, module_path
"""

from splitkit import checks
from splitkit.errors import CycleError, NoPlanError, PlanError, PolicyError, SplitError
from splitkit.graph.dataflow import Dataflow, analyze, enough_nodes, module_path
from splitkit.graph.ops import declare
from splitkit.graph.select import Ops, modules_matching, rule_of
from splitkit.plans.parts import HOST, Claim, Part, PartKey
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, merge, prune, refine, relay, rematerialize
from splitkit.prices import Costs

__all__ = [
    "HOST",
    "Claim",
    "Costs",
    "CycleError",
    "Dataflow",
    "NoPlanError",
    "Ops",
    "Part",
    "PartKey",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "SplitError",
    "analyze",
    "checks",
    "condense",
    "declare",
    "enough_nodes",
    "merge",
    "module_path",
    "modules_matching",
    "prune",
    "refine",
    "relay",
    "rematerialize",
    "rule_of",
]
