"""The front door: short, complete, documented, and open without torch."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import splitkit
import splitkit.extend
import splitkit.policies
import splitkit.testing

MODULES = {"costs", "errors", "extend", "policies", "runtime", "testing", "view"}
FRONT_DOOR = MODULES | {
    "CapabilityBasedPartitioner", "Frontier", "Plan", "SplitError", "analyze", "apply", "backend",
    "capture", "capture_decoder", "capture_joint", "checkpoint_context", "compare", "compare_plans", "dry_run",
    "explore", "export", "fit", "generator", "import_plan", "inline", "load", "measure_memory", "order_messages",
    "plan", "report", "serve", "simulate_memory", "simulate_schedule", "split", "split_module", "stage_costs",
    "sweep", "synthesize",
}  # fmt: skip
CONSTANTS = {"PARENT"}
"""What has no docstring that Python could show."""


NAMED = re.compile(r"(?<![\w.])splitkit(?!\.(?:toml|fish)\b)(?:\.[A-Za-z]\w*)+")
"""A name of the package with its path, in a text."""


def can_be_imported(name):
    """Whether a module has it; a function of a module's name (`splitkit.runtime.pipeline`) hides none of the module."""
    words = name.split(".")
    for end in range(len(words), 0, -1):
        try:
            found = importlib.import_module(".".join(words[:end]))
        except ImportError:
            continue
        for word in words[end:]:
            found = getattr(found, word, None)
        return found is not None or words[-1] == "PARENT"
    return False


def public(module):
    return {name for name in dir(module) if not name.startswith("_")}


def test_the_front_door_is_this_and_no_more():
    assert set(splitkit.__all__) == FRONT_DOOR
    assert public(splitkit) == FRONT_DOOR


@pytest.mark.parametrize("name", sorted(FRONT_DOOR))
def test_every_public_name_is_there_and_documented(name):
    thing = getattr(splitkit, name)
    assert name in CONSTANTS or inspect.getdoc(thing)


def test_what_an_import_loads_and_what_it_leaves_for_later():
    """The package loads no torch, and the policies load no front end; each package is there without an import.

    Splitting waits for no solver, and planning for no processes.
    """
    code = f"""if True:
        import os, sys
        import splitkit as sk
        dir(sk)
        assert not {{"torch", "numpy", "rich"}} & set(sys.modules)
        import torch
        child = os.fork()
        if child:
            import splitkit.policies
            assert not [m for m in sys.modules if m.startswith("splitkit.frontends")]
            assert all(getattr(sk, m).__name__ == "splitkit." + m for m in {sorted(MODULES)})
            assert os.waitpid(child, 0)[1] == 0
        else:
            sk.split, sk.compare, sk.simulate_memory
            assert "scipy" not in sys.modules
            sk.policies.Stages, sk.simulate_schedule
            assert "torch.distributed.pipelining" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_package_lists_what_it_has():
    for package in (splitkit.view, splitkit.extend):
        assert public(package) == {*package.__all__}


def test_names_for_authors_are_not_at_the_front():
    authors = set(splitkit.extend.__all__)
    shared = {name for name in authors & FRONT_DOOR if not name.endswith("Error")}
    assert shared == {"Plan"}
    assert {"propagate", "refine", "partition_fn", "StageCosts", "register_region"} <= authors


def test_names_in_texts_are_where_the_texts_say():
    """Each ``splitkit.name`` in a docstring or a message can be imported; a text without spaces is a key."""
    folder = Path(splitkit.__file__).parent
    missing = []
    for path in folder.rglob("*.py"):
        texts = (n.value for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Constant))
        found = {name for text in texts if isinstance(text, str) and " " in text for name in NAMED.findall(text)}
        missing += [f"{path.name}: {name}" for name in found if not can_be_imported(name)]
    assert missing == []
    assert not can_be_imported("splitkit.refine") and can_be_imported("splitkit.extend.refine")


@pytest.mark.parametrize(
    "module", [splitkit.policies, splitkit.testing, splitkit.costs, splitkit.extend, splitkit.view]
)
def test_what_a_public_module_lists_it_has(module):
    for name in module.__all__:
        assert name in CONSTANTS or inspect.getdoc(getattr(module, name)), name


def test_functions_are_not_hidden_by_modules_of_their_name():
    """No module of the package is called as a function of the front door."""
    folder = Path(splitkit.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert modules & FRONT_DOOR == MODULES


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'splt'"):
        _ = splitkit.splt


def test_type_checkers_see_the_same_names():
    tree = ast.parse(inspect.getsource(splitkit))
    guarded = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {a.asname for n in guarded.body for a in n.names}
    assert seen == FRONT_DOOR
