"""Policies: frozen dataclasses that decide which part computes which node."""

from splitkit.policies.around_ops import AroundOps
from splitkit.policies.at_markers import AtMarkers
from splitkit.policies.best import Best
from splitkit.policies.buckets import Buckets
from splitkit.policies.budget import Budget
from splitkit.policies.by_device import ByDevice
from splitkit.policies.by_name import ByName
from splitkit.policies.by_parameter_bytes import ByParameterBytes
from splitkit.policies.by_support import BySupport
from splitkit.policies.devices import Devices
from splitkit.policies.expert import Expert
from splitkit.policies.memory_budget import MemoryBudget
from splitkit.policies.min_cut import MinCut
from splitkit.policies.pipeline import Pipeline
from splitkit.policies.precompute import Precompute
from splitkit.policies.random import Random
from splitkit.policies.recompute_all import RecomputeAll
from splitkit.policies.remat import Remat
from splitkit.policies.round_robin import RoundRobin
from splitkit.policies.save_all import SaveAll
from splitkit.policies.split_backward import SplitBackward
from splitkit.policies.stages import Stages
from splitkit.search.recompute.plan_pool import PlanPool as PlanPool  # an argument of Budget, not a policy

__all__ = [
    "AroundOps",
    "AtMarkers",
    "Best",
    "Buckets",
    "Budget",
    "ByDevice",
    "ByName",
    "ByParameterBytes",
    "BySupport",
    "Devices",
    "Expert",
    "MemoryBudget",
    "MinCut",
    "Pipeline",
    "Precompute",
    "Random",
    "RecomputeAll",
    "Remat",
    "RoundRobin",
    "SaveAll",
    "SplitBackward",
    "Stages",
]
