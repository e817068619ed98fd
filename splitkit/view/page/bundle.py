"""Joins the scripts of the page into one, so that opening a page fetches nothing.

The scripts are ES modules, which TypeScript checks; there is no bundler, as installing splitkit must not need node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files

from splitkit.view.colours import COLOURS

SCRIPTS = (
    "units", "totals", "elements", "canvas", "geometry", "ops", "prices", "step_facts", "crossing",
    "drawing", "take_home", "svg_context", "tooltip", "minimap", "input", "facts", "legend", "nested", "target_texts",
    "framing", "picture", "measured", "recomputed", "bands", "rank_memory", "alive", "stage_texts", "stage_drawing",
    "what_if", "stage_side", "timeline", "ladder", "staged", "step_chart", "joint", "show",
)  # fmt: skip
"""Each script imports only from earlier ones. Joined they share one scope, so no two may declare the same name."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
_INSIDE = re.compile(r"([;{,])\n\s+")  # joining these lines cannot drop a semicolon that JavaScript would insert
_INDENTED = re.compile(r"\n\s+")
_COMMENT = re.compile(r"/\*\*.*?\*/ ?", re.DOTALL)


def script(*, widget: bool = False) -> str:
    """Return the code of the page, which defines a function ``show``; with ``widget`` the module for anywidget."""
    return compact(joined(widget=widget))


def joined(*, widget: bool = False) -> str:
    """Return the same code with the spaces between its words."""
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
    return _INDENTED.sub("\n", _INSIDE.sub(r"\1", kept))


# Takes the spaces out of scripts that JavaScript does not need; what is quoted stays as it is.
#
# Only what the page's scripts have is understood: a slash behind a sign such as ``(`` or ``=`` begins a regular
# expression, any other one divides. Line ends stay, so no semicolon that JavaScript would insert is lost.


_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])*'")
_EXPRESSION = re.compile(r"/(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n])+/[a-z]*")
_TEMPLATE_TEXT = re.compile(r"(?:\\.|\$(?!\{)|[^`\\$])*(?:`|\$\{)", re.DOTALL)
_CODE = re.compile(r"[^\"'`/{}]+|[/{}`]")
_BEFORE_EXPRESSION = tuple("(,=:[!&|?{};")
# without plus and minus: "a + +b" has another meaning without its spaces
_AROUND = re.compile(r" *([,;=*<>?:&|(){}\[\]!]) *")


def compact(code: str) -> str:
    """Return code with the same tokens."""
    return "".join(text if quoted else _AROUND.sub(r"\1", text) for text, quoted in pieces(code))


def pieces(code: str) -> Iterator[tuple[str, bool]]:
    """Yield the code in pieces, and whether each is quoted: a string, the text of a template, a regular expression."""
    at, plain = 0, ""
    inside = [""]  # what surrounds the place: "`" for the text of a template, "{" for code in braces
    while at < len(code):
        quoted = _quoted(code, at, plain, inside[-1] == "`")
        found = quoted or _CODE.match(code, at)
        assert found, code[at : at + 40]
        text = found[0]
        at = found.end()
        if quoted:
            yield plain, False
            yield text, True
            plain = ""
        else:
            plain += text
        if inside[-1] == "`" or text == "}":
            if text[-1] in "`}":
                inside.pop()
            else:
                inside.append("{")
        elif text in ("{", "`"):
            inside.append(text)
    yield plain, False


def _quoted(code: str, at: int, plain: str, in_template: bool) -> re.Match[str] | None:
    """Return what is quoted at a place of the code; ``plain`` is the code before it, from the last quoted piece on."""
    if in_template:
        return _TEMPLATE_TEXT.match(code, at)
    if code[at] == "/" and plain.rstrip().endswith(_BEFORE_EXPRESSION):
        return _EXPRESSION.match(code, at)
    return _STRING.match(code, at)
