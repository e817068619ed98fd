"""The public API for writing policies, plans, schedules and regions of your own; to use policies, import ``splitkit``.

>>> from splitkit.extend import Costs, Dataflow, NoPlanError, Plan, checks, module_path

Facts are methods of `Dataflow` (`splitkit.analyze` makes one), and of nodes ``module_path``, ``readers_of`` and
``storage_bytes``. ``size`` formats bytes. An error is ``NoPlanError("SK303", reason, remedy, [node])``, the others are
in `splitkit.errors`; a claim is ``replace(plan, claim=Claim("parts", 3, 3, "greedy", 0))``.

`refine`, `merge`, `prune`, `relay`, `rematerialize` and `checkpointed` turn one plan into another. `propagate` adds
sizes to a graph that has none, `declare` says what an op of your own does, and `register_region` says what opens and
closes a mode of your own. `StageCosts` and `PipelineOrder` describe your own stages and schedules for
`splitkit.simulate_schedule`. `partition_fn` is for code that calls AOTAutograd itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitkit import checks
from splitkit.errors import NoPlanError
from splitkit.graph.ambient import register_region
from splitkit.graph.dataflow import Dataflow, module_path, readers_of
from splitkit.graph.fake_runs import propagate
from splitkit.graph.node_values import cache_bytes, storage_bytes
from splitkit.graph.ops import declare
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.schedule import Schedule
from splitkit.pipeline.schedules import register_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.plans.parts import PARENT, Claim, Part
from splitkit.plans.record import Plan, checkpointed
from splitkit.plans.rewrite import merge, prune, refine, relay, rematerialize
from splitkit.prices import Costs
from splitkit.training.stage_plan import stage_plan
from splitkit.units import size

if TYPE_CHECKING:
    from splitkit.exports.onnx_stages import annotate_onnx as annotate_onnx
    from splitkit.frontends.aot import partition_fn as partition_fn

__all__ = [
    "PARENT",
    "Action",
    "Claim",
    "Costs",
    "Dataflow",
    "NoPlanError",
    "Part",
    "PipelineOrder",
    "Plan",
    "Schedule",
    "StageCosts",
    "annotate_onnx",
    "cache_bytes",
    "checkpointed",
    "checks",
    "declare",
    "merge",
    "module_path",
    "partition_fn",
    "propagate",
    "prune",
    "readers_of",
    "refine",
    "register_region",
    "register_schedule",
    "relay",
    "rematerialize",
    "size",
    "stage_plan",
    "storage_bytes",
]


def __getattr__(name: str) -> Any:
    """Load names of higher packages on first use, since policies import this module and need none of them."""
    homes = {"partition_fn": "splitkit.frontends.aot", "annotate_onnx": "splitkit.exports.onnx_stages"}
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
