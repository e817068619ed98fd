"""Notebooks are the manual: stored executed, and every cell gives what is stored."""

from __future__ import annotations

import ast
import linecache
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from campaigns import these_first
from IPython.core.formatters import DisplayFormatter
from launch import command
from storednotebooks import NOTEBOOKS, PACKAGES, WIDGET, Fields, code_cells, executed, given, read, varies, versions

PRINTED = {
    "1": ("same: True", "SK203"),
    "2": ("same: True", "SK203"),
    "3": ("SK303", "measured"),
    "4": ("predicted", "measured here"),
    "5": ("same as the unsplit model: True", "SK805 the loss of microbatch"),
    "6": ("page.html", "same: True"),
    "7": ("same: True", "SK203"),
    "8": ("does not fit", "same as the unsplit model: True", "the model knows tokens from 0 to 511"),
    "9": ("SK303", "gradients equal: True", "same as the unsplit model: True"),
    "10": ("all-reduces", "same as the unsplit model: True"),
}
"""By number of the notebook, what it must have printed."""

PICTURES = {"1": 1, "2": 2, "3": 3, "4": 3, "5": 1, "6": 6, "7": 1, "8": 1, "9": 1, "10": 1}
"""By number of the notebook, how many pictures are the least to look at."""

ANEW = "python tests/tools/storednotebooks.py stores them anew"
OF_THIS_MACHINE = re.compile(r"/(?:work|tmp|home|root|Users|var)/|\bat 0x[0-9a-f]{6,}|\x1b\[|Warning\b")


def number(path):
    return path.stem.partition("-")[0]


IN_JUPYTER = [path for path in NOTEBOOKS if number(path) == "7"]
"""What always runs there, and not a second time here: the shortest."""

OTHERS = [path for path in NOTEBOOKS if path not in IN_JUPYTER]


def assert_printed(path, text):
    assert all(expected in text for expected in PRINTED[number(path)])


def require(path):
    """Skip what this environment cannot do."""
    if number(path) == "5" and torch.__version__ < "2.13":
        pytest.skip("dropout in several stages needs torch 2.13, as the notebook says")
    if number(path) == "6" and not find_spec("anywidget"):
        pytest.skip("the widget needs anywidget, as the notebook says")


def test_they_are_numbered_without_gaps_or_doubles():
    assert [number(path) for path in NOTEBOOKS] == [str(i) for i in range(1, len(PRINTED) + 1)]


def test_they_are_stored_as_the_pinned_packages_have_it():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)", (Path(__file__).parents[2] / "constraints.txt").read_text(), re.M))
    for path in NOTEBOOKS:
        assert read(path).metadata.get("splitkit") == {name: pinned[name] for name in PACKAGES}, ANEW


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_executed_and_tells_nothing_of_the_machine(path):
    assert path.stat().st_size < 450_000
    pictures = 0
    for count, cell in enumerate(code_cells(read(path)), 1):
        assert cell.execution_count == count and "execution" not in cell.metadata, ANEW
        found = given(cell.outputs)
        pictures += "<svg" in found.get("text/html", "") or "a frame" in found.get("text/html", "")
        assert not {"stderr", WIDGET} & set(found) and not any(o.output_type == "error" for o in cell.outputs)
        told = OF_THIS_MACHINE.search("\n".join(found.values()))
        assert not told, f"{told} in {cell.source}"
    assert pictures >= PICTURES[number(path)]


@pytest.mark.parametrize("path", these_first(OTHERS[:1], [*OTHERS[1:], *IN_JUPYTER]), ids=lambda p: p.stem)
def test_every_cell_gives_what_is_stored(path, monkeypatch, capsys):
    """In a module of its own; what a cell ends in is shown as Jupyter shows it.

    A command that it starts runs here, with forks for its ranks; the campaign of Jupyter starts it as it is written.
    """
    require(path)
    monkeypatch.setattr(subprocess, "run", lambda words, **_: command(*words[words.index("splitkit") + 1 :]))
    notebook, module, printed = read(path), ModuleType("__main__"), ""
    monkeypatch.setitem(sys.modules, "__main__", module)
    for count, cell in enumerate(code_cells(notebook)):
        found = shown(run(cell.source, f"<cell {count} of {path.stem}>", module))
        text = capsys.readouterr().out
        printed += text
        if notebook.metadata.get("splitkit") == versions() and not varies(cell):
            made = given([Fields(name="stdout", text=text), Fields(data=found)])
            assert made == given(cell.outputs), ANEW
    assert_printed(path, printed)


def run(source, name, module):
    """Run a cell; its value, if it ends in one."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body, last = [*body, last], None
    exec(compile(ast.Module(body, []), name, "exec"), module.__dict__)
    return eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__) if last else None


def shown(value):
    """What Jupyter makes of the value of a cell."""
    return {} if value is None else DisplayFormatter().format(value)[0]


@pytest.mark.parametrize("path", these_first(IN_JUPYTER, OTHERS), ids=lambda p: p.stem)
def test_every_cell_runs_in_jupyter_without_a_warning(path, monkeypatch):
    """And gives there what is stored."""
    require(path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the kernel: other tests run beside it
    outputs = [given(cell.outputs) for cell in code_cells(executed(path))]
    assert_printed(path, "".join(found.get("stdout", "") for found in outputs))
    if read(path).metadata.get("splitkit") == versions():
        for cell, found in zip(code_cells(read(path)), outputs, strict=True):
            assert varies(cell) or found == given(cell.outputs), ANEW
    if find_spec("ipywidgets"):  # comes with anywidget; without it tqdm, which transformers imports, warns in a kernel
        assert not [found["stderr"] for found in outputs if "stderr" in found]
