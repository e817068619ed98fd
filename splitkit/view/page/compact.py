"""Takes the spaces out of scripts that JavaScript does not need; what is quoted stays as it is.

Only what the page's scripts have is understood: a slash behind a sign such as ``(`` or ``=`` begins a regular
expression, any other one divides. Line ends stay, so no semicolon that JavaScript would insert is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

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
