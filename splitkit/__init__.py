"""splitkit: split PyTorch graphs into parts, and prove that the parts do what the whole did.

>>> import splitkit as sk
>>> gm = sk.capture(model, *inputs)
>>> split = sk.split(gm, sk.policies.Stages(4))
>>> split(*inputs)

Names load on first use, so that ``import splitkit`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitkit.shown import Shown as _Shown

if TYPE_CHECKING:
    from splitkit import costs as costs
    from splitkit import policies as policies
    from splitkit import testing as testing
    from splitkit.engine.inlining.inline import inline as inline
    from splitkit.engine.pair import Pair as Pair
    from splitkit.engine.split import Split as Split
    from splitkit.engine.split import plan as plan
    from splitkit.engine.split import split as split
    from splitkit.engine.split_module import split_module as split_module
    from splitkit.errors import CaptureError as CaptureError
    from splitkit.errors import CheckError as CheckError
    from splitkit.errors import CostError as CostError
    from splitkit.errors import CycleError as CycleError
    from splitkit.errors import FileError as FileError
    from splitkit.errors import GraphError as GraphError
    from splitkit.errors import NoPlanError as NoPlanError
    from splitkit.errors import PlanError as PlanError
    from splitkit.errors import PolicyError as PolicyError
    from splitkit.errors import ScheduleError as ScheduleError
    from splitkit.errors import SplitError as SplitError
    from splitkit.frontends.aot import partition_fn as partition_fn
    from splitkit.frontends.capture import capture as capture
    from splitkit.frontends.compile import apply as apply
    from splitkit.frontends.compile import backend as backend
    from splitkit.frontends.joint import Joint as Joint
    from splitkit.frontends.joint import capture_joint as capture_joint
    from splitkit.frontends.jointsignature import JointSignature as JointSignature
    from splitkit.graph.ambient import register_region as register_region
    from splitkit.graph.dataflow import Dataflow as Dataflow
    from splitkit.graph.dataflow import analyze as analyze
    from splitkit.graph.fakeruns import propagate as propagate
    from splitkit.memory.measure import MeasuredMemory as MeasuredMemory
    from splitkit.memory.measure import measure_memory as measure_memory
    from splitkit.memory.profile import MemoryProfile as MemoryProfile
    from splitkit.memory.profile import simulate_memory as simulate_memory
    from splitkit.pipeline.order import PipelineOrder as PipelineOrder
    from splitkit.pipeline.run import ScheduleRun as ScheduleRun
    from splitkit.pipeline.simulate import simulate_schedule as simulate_schedule
    from splitkit.pipeline.stagecosts import StageCosts as StageCosts
    from splitkit.pipeline.stageprices import stage_costs as stage_costs
    from splitkit.plans.parts import HOST as HOST
    from splitkit.plans.parts import Claim as Claim
    from splitkit.plans.parts import Part as Part
    from splitkit.plans.policy import Policy as Policy
    from splitkit.plans.record import Plan as Plan
    from splitkit.plans.rewrite import condense as condense
    from splitkit.plans.rewrite import merge as merge
    from splitkit.plans.rewrite import prune as prune
    from splitkit.plans.rewrite import refine as refine
    from splitkit.plans.rewrite import relay as relay
    from splitkit.plans.rewrite import rematerialize as rematerialize
    from splitkit.studies.frontier import Frontier as Frontier
    from splitkit.studies.sweep import sweep as sweep
    from splitkit.testing.compare import Comparison as Comparison
    from splitkit.testing.compare import compare as compare
    from splitkit.view.report import report as report

_Shown.drawer = staticmethod(lambda: import_module("splitkit.view.showing"))  # rooms below view do not know it

__version__ = "0.1.0"

_ERRORS = ("CaptureError", "CheckError", "CostError", "CycleError", "FileError", "GraphError", "NoPlanError")
_HOME = {
    "HOST": "plans.parts",
    "Claim": "plans.parts",
    "Comparison": "testing.compare",
    "Dataflow": "graph.dataflow",
    "Frontier": "studies.frontier",
    "Joint": "frontends.joint",
    "JointSignature": "frontends.jointsignature",
    "MeasuredMemory": "memory.measure",
    "MemoryProfile": "memory.profile",
    **dict.fromkeys((*_ERRORS, "PlanError", "PolicyError", "ScheduleError", "SplitError"), "errors"),
    "Pair": "engine.pair",
    "Part": "plans.parts",
    "PipelineOrder": "pipeline.order",
    "Plan": "plans.record",
    "Policy": "plans.policy",
    "ScheduleRun": "pipeline.run",
    "Split": "engine.split",
    "StageCosts": "pipeline.stagecosts",
    "analyze": "graph.dataflow",
    "apply": "frontends.compile",
    "backend": "frontends.compile",
    "capture": "frontends.capture",
    "capture_joint": "frontends.joint",
    "compare": "testing.compare",
    "condense": "plans.rewrite",
    "inline": "engine.inlining.inline",
    "measure_memory": "memory.measure",
    "merge": "plans.rewrite",
    "partition_fn": "frontends.aot",
    "plan": "engine.split",
    "propagate": "graph.fakeruns",
    "prune": "plans.rewrite",
    "refine": "plans.rewrite",
    "register_region": "graph.ambient",
    "relay": "plans.rewrite",
    "rematerialize": "plans.rewrite",
    "report": "view.report",
    "simulate_memory": "memory.profile",
    "simulate_schedule": "pipeline.simulate",
    "split": "engine.split",
    "split_module": "engine.split_module",
    "stage_costs": "pipeline.stageprices",
    "sweep": "studies.sweep",
}
_MODULES = ("costs", "policies", "testing")

__all__ = [*_HOME, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
