"""Notebooks are the manual: committed without outputs, and every cell runs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

PRINTED = {
    "1": ("same: True", "SK203"),
    "2": ("same: True", "SK203"),
    "3": ("SK303", "measured"),
    "4": ("predicted", "measured here"),
}
"""By number of the notebook, what it must have printed."""

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_without_outputs(path):
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and not cell.get("execution_count")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_cell_runs(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the kernel: other tests run beside it
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    printed = "".join(o.get("text", "") for c in notebook.cells if c.cell_type == "code" for o in c.outputs)
    assert all(text in printed for text in PRINTED[path.stem[0]])
