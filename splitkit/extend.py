"""The authors' door: what a policy of one's own is made of; users of policies need the front door alone.

>>> from splitkit.extend import Dataflow, Plan, PolicyError, checks, module_path
"""

from splitkit import checks
from splitkit.errors import CycleError, NoPlanError, PlanError, PolicyError, SplitError
from splitkit.graph.dataflow import Dataflow, analyze, enough_nodes, module_path
from splitkit.graph.ops import declare
from splitkit.graph.select import Ops, modules_matching, rule_of
from splitkit.parts import HOST, Claim, Part, PartKey
from splitkit.plan import Plan
from splitkit.policy import Policy
from splitkit.prices import Costs
from splitkit.rewrite import condense, merge, prune, refine, relay, rematerialize

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
