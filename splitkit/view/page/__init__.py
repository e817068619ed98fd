"""Makes the interactive picture: one HTML file without dependencies that needs no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from splitkit.view.page.bundle import script


def style() -> str:
    """Return the style sheet of the page."""
    return files(__package__).joinpath("page.css").read_text("utf-8")


def page(data: Mapping[str, Any]) -> str:
    """Return a complete page.

    Args:
        data: what `splitkit.view.data.ladder.LadderView.to_dict` or
            `splitkit.view.data.joint_ladder.HalvesView.to_dict` returns.
    """
    # names come from models: "<" is the only character that can end the script element around the data
    data_text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    whole = "html,body{margin:0;height:100%}.sk{--h:100vh;border:0!important;border-radius:0!important}"
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><title>{escape(str(data["title"]))} · splitkit</title>'
    head += f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    head += f'<meta name="viewport" content="width=device-width"><style>{style()}{whole}</style>'
    start = 'JSON.parse(document.getElementById("splitkit-data").textContent)'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body>'
        f'<script type="application/json" id="splitkit-data">{data_text}</script>'
        f"<script>{script()}\nwindow.splitkit = show(document.body, {start});</script></body></html>"
    )
