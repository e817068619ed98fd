"""The interactive picture as one HTML file, without dependencies and without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from splitkit.view.colours import COLOURS


def script(*, widget: bool = False) -> str:
    """The code of the picture: a class ``Ladder``, with the colours of all pictures; or the module of a widget."""
    code = f'"use strict";\nconst COLOURS = {json.dumps(COLOURS)};\n{_file("page.js")}'
    return _dense(f"{code}\n{_file('widget.js')}" if widget else code)


def _dense(code: str) -> str:
    """Without what only those read who change it: indentation, and lines that are a comment."""
    lines = (line.strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(("//", "/**")))


def style() -> str:
    """How it looks."""
    return _file("page.css")


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def page(data: Mapping[str, Any], *, height: int | None = None) -> str:
    """A page that stands alone.

    Args:
        data: what `splitkit.view.ladder.LadderView.to_dict` or `splitkit.view.halves.HalvesView.to_dict` gives.
        height: pixels; that of the window if ``None``.
    """
    # "<" can end the element that the data stands in; nothing else can
    told = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    options = json.dumps({"height": height})
    whole = (
        "" if height else "html,body{margin:0;height:100%}.sk{--h:100vh;border:0!important;border-radius:0!important}"
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><title>{escape(str(data["title"]))} · splitkit</title>'
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f'<meta name="viewport" content="width=device-width"><style>{style()}{whole}</style>'
    start = 'JSON.parse(document.getElementById("splitkit-data").textContent)'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>'
        f'<script type="application/json" id="splitkit-data">{told}</script>'
        f"<script>{script()}\nwindow.splitkit = show(document.body, {start}, {options});</script></body></html>"
    )
