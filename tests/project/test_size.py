"""The library may shrink; each number below is the most allowed, and raising one needs a line that says why."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import splitkit
from splitkit.cli.parser import make_parser

PACKAGE = Path(splitkit.__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
PUBLIC = ("splitkit", *(f"splitkit.{name}" for name in ("costs", "extend", "policies", "runtime", "testing", "view")))

MOST = {
    "lines of Python": 97_164,  # `doctor --device`, which tries a GPU (1,200); models sharded over ranks (1,250);
    # readers of a plan that take its request, and what torch keeps of messages (91); what strangers met (73);
    # readers that count what waits on the host, notes that say on which side they err, exact peaks of ranks (127)
    "files of Python": 393,  # four more: of models sharded over ranks, and their mesh on the command line
    "lines of the page": 3_999,  # marks of collectives on the timeline (13)
    "public names": 134,
    "names at the front": 40,
    "options of commands": 289,  # three more: two of doctor (the device, the file), and `plan --mesh`
    "words of pages": 30_520,  # `doctor --device`; the page on sharded models (840)
}


def sizes() -> dict[str, int]:
    """Today's numbers."""
    python = [path.read_text("utf-8") for path in PACKAGE.rglob("*.py")]
    page = [path.read_text("utf-8") for ending in ("js", "css", "ts") for path in PACKAGE.rglob(f"*.{ending}")]
    names = {module: importlib.import_module(module).__all__ for module in PUBLIC}
    return {
        "lines of Python": sum(text.count("\n") for text in python),
        "files of Python": len(python),
        "lines of the page": sum(text.count("\n") for text in page),
        "public names": sum(map(len, names.values())),
        "names at the front": len(names["splitkit"]),
        "options of commands": sum(
            sum(bool(action.option_strings) for action in command._actions) - 1  # --help
            for command in make_parser().commands().values()
        ),
        "words of pages": sum(len(re.findall(r"\S+", path.read_text("utf-8"))) for path in DOCS.glob("*.md")),
    }


@pytest.mark.parametrize("what", MOST)
def test_the_library_does_not_grow(what):
    assert sizes()[what] <= MOST[what], f"{what}: delete as much elsewhere, or raise the number and say why beside it"
