"""The notebooks as they are stored: executed, so that they can be read where nothing runs.

``python tests/storednotebooks.py [NUMBER ...]`` executes them anew, all or those, and stores what they give. Do so
after a change of a notebook, or of what it shows. A cell whose output differs from machine to machine has the tag
``varies``.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
PACKAGES = ("torch", "transformers")
"""On whose versions the outputs depend: nodes have other names under another one."""

WIDGET = "application/vnd.jupyter.widget-view+json"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def read(path: Path) -> NotebookNode:
    """A notebook."""
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """Its cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def varies(cell: NotebookNode) -> bool:
    """Whether the output differs from machine to machine."""
    return "varies" in cell.metadata.get("tags", ())


def versions() -> dict[str, str]:
    """Those installed, without what says how they were built."""
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def executed(path: Path) -> NotebookNode:
    """A notebook with all that it gives in a kernel of its own."""
    notebook = read(path)
    resources = {"metadata": {"path": path.parent}}
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, record_timing=False, store_widget_state=False
    ).execute()
    return notebook


def given(outputs: list[NotebookNode]) -> dict[str, str]:
    """What a cell prints, and its value by form; a frame and a widget only as text, as both hold code of the page."""
    found = {name: "".join(o.text for o in outputs if o.get("name") == name) for name in ("stdout", "stderr")}
    for output in outputs:
        found |= output.get("data", {})
    if "<iframe" in found.get("text/html", ""):
        found["text/html"], found["text/plain"] = "a frame", re.sub("of .*iB:", "", found["text/plain"])
    return {form: text for form, text in found.items() if text and form != WIDGET}


def stored(notebook: NotebookNode) -> NotebookNode:
    """A notebook as it is kept: nothing in it tells of the time, the place or the process of its execution."""
    notebook.metadata = NotebookNode(kernelspec=_KERNEL, language_info={"name": "python"}, splitkit=versions())
    for number, cell in enumerate(code_cells(notebook), 1):
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        cell.outputs = _joined(cell.outputs)
        for output in cell.outputs:
            if "execution_count" in output:
                output.execution_count = number
            output.get("data", {}).pop(WIDGET, None)  # lives in the kernel that made it
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Text that came in several pieces as one."""
    found: list[NotebookNode] = []
    for output in outputs:
        if found and output.get("name") and found[-1].get("name") == output.name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def main(numbers: list[str]) -> None:
    for path in NOTEBOOKS:
        if not numbers or path.stem.partition("-")[0] in numbers:
            nbformat.write(stored(executed(path)), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
