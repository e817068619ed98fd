"""Notebooks are the manual: committed without outputs, and every cell runs."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from campaigns import these_first
from nbclient import NotebookClient

PRINTED = {
    "1": ("same: True", "SK203"),
    "2": ("same: True", "SK203"),
    "3": ("SK303", "measured"),
    "4": ("predicted", "measured here"),
    "5": ("same as the unsplit model: True", "SK805 the loss of microbatch"),
}
"""By number of the notebook, what it must have printed."""

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def assert_printed(path, text):
    assert all(expected in text for expected in PRINTED[path.stem[0]])


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and not cell.get("execution_count")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path, monkeypatch, capsys):
    """In a module of its own; what a cell ends in is shown as a page and as a picture, as far as it can be."""
    if path.stem[0] == "5" and torch.__version__ < "2.13":
        pytest.skip("dropout in several stages needs torch 2.13, as the notebook says")
    module = ModuleType("notebook")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, cell in enumerate(c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"):
        name = f"<cell {number} of {path.stem}>"
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(keepends=True), name)
        *body, last = ast.parse(cell.source).body
        if not isinstance(last, ast.Expr):
            body, last = [*body, last], None
        exec(compile(ast.Module(body, []), name, "exec"), module.__dict__)
        if last:
            shown(eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__))
    assert_printed(path, capsys.readouterr().out)


def shown(value):
    """What Jupyter asks of the value of a cell."""
    assert repr(value)
    for form in ("_repr_html_", "_repr_mimebundle_"):
        assert getattr(value, form, lambda: "nothing to show")()


@pytest.mark.parametrize("path", these_first(NOTEBOOKS[1:2], NOTEBOOKS[:1] + NOTEBOOKS[2:]), ids=lambda p: p.stem)
def test_every_cell_runs_in_jupyter(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the kernel: other tests run beside it
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    assert_printed(path, "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs))
