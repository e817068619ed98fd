"""The front door: short, complete, documented, and open without torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import splitkit
import splitkit.extend
import splitkit.policies
import splitkit.testing

FRONT_DOOR = {
    "CaptureError", "CheckError", "Claim", "Comparison", "CostError", "CycleError", "Dataflow", "FileError",
    "GraphError", "HOST", "PipelineOrder", "ScheduleError", "ScheduleRun", "StageCosts", "simulate_schedule",
    "stage_costs", "sweep",
    "Frontier", "Joint", "JointSignature", "MeasuredMemory", "MemoryProfile", "Pair", "apply", "backend",
    "capture_joint", "measure_memory", "partition_fn", "propagate", "simulate_memory",
    "NoPlanError", "Part", "Plan", "PlanError", "Policy", "PolicyError", "Split", "SplitError",
    "analyze", "capture", "compare", "condense", "inline", "merge", "plan", "prune", "refine", "register_region",
    "relay", "rematerialize", "report", "split", "split_module", "costs", "policies", "testing",
}  # fmt: skip


def test_the_front_door_is_this_and_no_more():
    assert set(splitkit.__all__) == FRONT_DOOR
    assert set(dir(splitkit)) >= FRONT_DOOR


@pytest.mark.parametrize("name", sorted(FRONT_DOOR))
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(splitkit, name)
    assert name == "HOST" or inspect.getdoc(thing)


@pytest.mark.parametrize("module", [splitkit.policies, splitkit.testing, splitkit.costs, splitkit.extend])
def test_what_a_public_module_lists_it_has(module):
    for name in module.__all__:
        assert name in ("HOST", "Ops", "PartKey") or inspect.getdoc(getattr(module, name)), name


def test_functions_are_not_hidden_by_modules_of_their_name():
    """No module of the package is called as a function of the front door."""
    from pathlib import Path

    folder = Path(splitkit.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules & FRONT_DOOR == {"costs", "policies", "testing"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'splt'"):
        _ = splitkit.splt


def test_type_checkers_see_the_same_names():
    import ast

    tree = ast.parse(inspect.getsource(splitkit))
    guarded = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {a.asname for n in guarded.body for a in n.names}
    assert seen == FRONT_DOOR


def test_importing_splitkit_does_not_import_torch():
    code = "import sys, splitkit; dir(splitkit); assert not {'torch', 'numpy', 'rich'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
