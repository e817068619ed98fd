"""The authors' door: what a policy of one's own is made of; users of policies need the front door alone.

>>> from splitkit.extend import Costs, Dataflow, Plan, PolicyError, checks, module_path

Facts are methods of `Dataflow`, and of nodes and tensors ``module_path``, ``readers_of``, ``given_back``, ``is_small``,
``storage_key``, ``start_of``, ``storage_bytes``, ``tensor_bytes``. Texts show bytes by ``size``. An error is
``NoPlanError("SK303", reason, remedy, [node])``; a claim ``replace(plan, claim=Claim("parts", 3, 3, "greedy", 0))``.
"""

from splitkit import checks
from splitkit.errors import CycleError, NoPlanError, PlanError, PolicyError, SplitError
from splitkit.graph.dataflow import Dataflow, analyze, enough_nodes, given_back, module_path, readers_of
from splitkit.graph.ops import declare
from splitkit.graph.select import Ops, modules_matching, rule_of
from splitkit.graph.sizes import storage_bytes, tensor_bytes
from splitkit.graph.storages import start_of, storage_key
from splitkit.plans.localize import is_small
from splitkit.plans.parts import HOST, Claim, Part, PartKey
from splitkit.plans.policy import Policy
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import condense, merge, prune, refine, relay, rematerialize
from splitkit.prices import Costs
from splitkit.units import size

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
    "given_back",
    "is_small",
    "merge",
    "module_path",
    "modules_matching",
    "prune",
    "readers_of",
    "refine",
    "relay",
    "rematerialize",
    "rule_of",
    "size",
    "start_of",
    "storage_bytes",
    "storage_key",
    "tensor_bytes",
]
