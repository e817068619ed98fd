"""splitkit splits PyTorch models into parts, and checks that the parts compute what the whole model computes.

>>> import splitkit as sk
>>> gm = sk.capture(model, *inputs)
>>> split = sk.split(gm, sk.policies.Stages(4))
>>> split(*inputs)

`splitkit.policies` decides which part computes what, `splitkit.costs` prices nodes, and `splitkit.runtime` runs a split
on several devices or ranks. `splitkit.view` draws pictures and pages, `splitkit.testing` compares modules,
`splitkit.errors` has the errors, and `splitkit.extend` is for policies, plans, schedules and regions of your own. All
names load on first use, so ``import splitkit`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from splitkit.display import Shown as _Shown
from splitkit.late_policies import LatePolicies as _LatePolicies

if TYPE_CHECKING:
    from splitkit import costs as costs
    from splitkit import errors as errors
    from splitkit import extend as extend
    from splitkit import policies as policies
    from splitkit import runtime as runtime
    from splitkit import testing as testing
    from splitkit import view as view
    from splitkit.engine.inline import inline as inline
    from splitkit.engine.split import plan as plan
    from splitkit.engine.split import split as split
    from splitkit.engine.split import split_module as split_module
    from splitkit.errors import SplitError as SplitError
    from splitkit.exports.export import export as export
    from splitkit.exports.import_plan import import_plan as import_plan
    from splitkit.frontends.capability_partitioner import CapabilityBasedPartitioner as CapabilityBasedPartitioner
    from splitkit.frontends.capture_decoder import capture_decoder as capture_decoder
    from splitkit.frontends.checkpoint_context import checkpoint_context as checkpoint_context
    from splitkit.frontends.checkpoint_context import dry_run as dry_run
    from splitkit.frontends.compile.compile import apply as apply
    from splitkit.frontends.compile.compile import backend as backend
    from splitkit.frontends.joint_capture import capture as capture
    from splitkit.frontends.joint_capture import capture_joint as capture_joint
    from splitkit.graph.dataflow import analyze as analyze
    from splitkit.memory.measurement import measure_memory as measure_memory
    from splitkit.memory.profile import simulate_memory as simulate_memory
    from splitkit.pipeline.order_messages import order_messages as order_messages
    from splitkit.pipeline.simulate import simulate_schedule as simulate_schedule
    from splitkit.pipeline.stage_prices import stage_costs as stage_costs
    from splitkit.pipeline.synthesize import synthesize as synthesize
    from splitkit.plans.record import Plan as Plan
    from splitkit.runtime.folder.load_weights import load as load
    from splitkit.runtime.generation.generator import serve as serve
    from splitkit.runtime.generation.local_generator import generator as generator
    from splitkit.studies.explanation.explain import compare_plans as compare_plans
    from splitkit.studies.explore import explore as explore
    from splitkit.studies.fit.fit import fit as fit
    from splitkit.studies.frontier import Frontier as Frontier
    from splitkit.studies.sweep import sweep as sweep
    from splitkit.testing.compare import compare as compare
    from splitkit.view.data.report import report as report

_LatePolicies.is_schedule = staticmethod(lambda name: import_module("splitkit.pipeline.schedules").is_built_in(name))
_LatePolicies.budget = staticmethod(lambda: import_module("splitkit.policies.budget").Budget)  # it imports HiGHS
_Shown.drawer = staticmethod(lambda: import_module("splitkit.view.renderers"))  # lower layers cannot import view
_Shown.explainer = staticmethod(lambda: import_module("splitkit.studies.explanation.explain").explain)  # nor studies

__version__ = "0.1.0"

_HOME = {
    "CapabilityBasedPartitioner": "frontends.capability_partitioner",
    "Frontier": "studies.frontier",
    "Plan": "plans.record",
    "SplitError": "errors",
    "analyze": "graph.dataflow",
    "apply": "frontends.compile.compile",
    "backend": "frontends.compile.compile",
    "capture": "frontends.joint_capture",
    "capture_decoder": "frontends.capture_decoder",
    "capture_joint": "frontends.joint_capture",
    "checkpoint_context": "frontends.checkpoint_context",
    "compare": "testing.compare",
    "compare_plans": "studies.explanation.explain",
    "dry_run": "frontends.checkpoint_context",
    "explore": "studies.explore",
    "export": "exports.export",
    "fit": "studies.fit.fit",
    "generator": "runtime.generation.local_generator",
    "import_plan": "exports.import_plan",
    "inline": "engine.inline",
    "load": "runtime.folder.load_weights",
    "measure_memory": "memory.measurement",
    "order_messages": "pipeline.order_messages",
    "plan": "engine.split",
    "report": "view.data.report",
    "serve": "runtime.generation.generator",
    "simulate_memory": "memory.profile",
    "simulate_schedule": "pipeline.simulate",
    "split": "engine.split",
    "split_module": "engine.split",
    "stage_costs": "pipeline.stage_prices",
    "sweep": "studies.sweep",
    "synthesize": "pipeline.synthesize",
}
_MODULES = ("costs", "errors", "extend", "policies", "runtime", "testing", "view")

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
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
