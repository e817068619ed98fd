"""The notebooks as they are stored: executed, so that they can be read where nothing runs.

``python tests/tools/storednotebooks.py [NUMBER ...]`` executes them anew, all or those, and stores what they give. Do
so after a change of a notebook, or of what it shows. A cell whose output differs from machine to machine has the tag
``varies``.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbformat import NotebookNode

NOTEBOOKS = sorted(
    (Path(__file__).parents[2] / "notebooks").glob("*.ipynb"), key=lambda path: int(path.stem.partition("-")[0])
)
PACKAGES = ("torch", "transformers")
"""On whose versions the outputs depend: nodes have other names under another one."""

WIDGET = "application/vnd.jupyter.widget-view+json"
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


class Fields(dict[str, Any]):
    """What stands in a notebook, by name; as `nbformat.NotebookNode`, which takes seconds to import."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def read(path: Path) -> Fields:
    """A notebook as it is stored; `the_format` reads and checks it for a kernel."""

    def joined(pairs: list[tuple[str, Any]]) -> Fields:
        """Text that stands there line by line, as one."""
        lines = {"source", "text", *(name for name, _ in pairs if "/" in name)}
        return Fields((k, "".join(v) if k in lines and isinstance(v, list) else v) for k, v in pairs)

    return json.loads(path.read_text(), object_pairs_hook=joined)


def the_format() -> ModuleType:
    """The package `nbformat`, without the grammar of addresses, which takes 5 s to build and which no notebook has."""
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import nbformat

    return nbformat


def code_cells(notebook: Fields | NotebookNode) -> list[Any]:
    """Its cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def varies(cell: Fields | NotebookNode) -> bool:
    """Whether the output differs from machine to machine."""
    return "varies" in cell.metadata.get("tags", ())


def versions() -> dict[str, str]:
    """Those installed, without what says how they were built."""
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def executed(path: Path) -> NotebookNode:
    """A notebook with all that it gives in a kernel of its own."""
    notebook = the_format().read(path, as_version=4)
    from nbclient import NotebookClient  # behind the format, which it imports

    resources = {"metadata": {"path": path.parent}}
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources, record_timing=False, store_widget_state=False
    ).execute()
    return notebook


def given(outputs: list[Any]) -> dict[str, str]:
    """What a cell prints, and its value by form; a frame and a widget only as text, as both hold code of the page."""
    found = {name: "".join(o.text for o in outputs if o.get("name") == name) for name in ("stdout", "stderr")}
    for output in outputs:
        found |= output.get("data", {})
    if "<iframe" in found.get("text/html", ""):
        found["text/html"], found["text/plain"] = "a frame", re.sub("of .*iB:", "", found["text/plain"])
    return {form: text for form, text in found.items() if text and form != WIDGET}


def stored(notebook: NotebookNode) -> NotebookNode:
    """A notebook as it is kept: nothing in it tells of the time, the place or the process of its execution."""
    notebook.metadata = the_format().NotebookNode(
        kernelspec=_KERNEL, language_info={"name": "python"}, splitkit=versions()
    )
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
            the_format().write(stored(executed(path)), path)
            print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
