"""Joins the scripts of the page into one, so that opening a page fetches nothing.

The scripts are ES modules, which TypeScript checks; there is no bundler, as installing splitkit must not need node.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files

from splitkit.view.svg.drawing import COLOURS

SCRIPTS = (
    "units", "totals", "elements", "canvas", "ops", "prices", "step_facts", "crossing", "drawing", "take_home",
    "svg_context", "input", "facts", "nested", "framing", "picture", "measured", "bands", "rank_memory", "alive",
    "what_if", "stage_side", "timeline", "ladder", "staged", "step_chart", "joint", "show",
)  # fmt: skip
"""Each script imports only from earlier ones. Joined they share one scope, so no two may declare the same name."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
_INSIDE = re.compile(r"([;{,])\n\s+")  # joining these lines cannot drop a semicolon that JavaScript would insert
_INDENTED = re.compile(r"\n\s+")
_COMMENT = re.compile(r"/\*\*.*?\*/ ?", re.DOTALL)
# a string, or a sign with the spaces around it; without plus and minus: "a + +b" has another meaning without its spaces
_AROUND = re.compile(r'("(?:\\.|[^"\\])*")| *([,;=*<>?:&|(){}\[\]!]) *')


def script(*, widget: bool = False) -> str:
    """Return the code of the page, which defines a function ``show``; with ``widget`` the module for anywidget."""
    names = (*SCRIPTS, "widget") if widget else SCRIPTS
    return "\n".join(['"use strict";', f"const COLOURS = {json.dumps(COLOURS)};", *map(_joined, names)])


def source(name: str) -> str:
    """Return a script as it was written, an ES module."""
    return files(__package__).joinpath("scripts", f"{name}.js").read_text("utf-8")


def _joined(name: str) -> str:
    """Return a script without imports, exports, comments and indentation, which would make every page larger."""
    code = _COMMENT.sub("", _EXPORT.sub("", _IMPORT.sub("", source(name))))
    lines = (line.rstrip() for line in code.splitlines())
    kept = "\n".join(line for line in lines if line and not line.lstrip().startswith("//"))
    return "\n".join(map(spaceless, _INDENTED.sub("\n", _INSIDE.sub(r"\1", kept)).split("\n")))


def spaceless(line: str) -> str:
    """Return a line without the spaces that JavaScript does not need; one that quotes otherwise than by ``"`` stays."""
    return line if {*line} & {"`", "'", "/"} else _AROUND.sub(r"\1\2", line)
