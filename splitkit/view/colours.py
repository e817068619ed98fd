"""Gives the colours of all pictures, still and interactive: a part has the same colour in each of them."""

from __future__ import annotations

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#7f7f00")
"""The palette of Okabe and Ito (2008), which colour-blind readers can tell apart; pictures number the parts as well."""

INK, MUTED, LINE, RIBBON, BAD, PAPER = "#1c2330", "#5b6472", "#d9dee6", "#8a94a3", "#c2122b", "#ffffff"
"""Text, secondary text, rules, saved values, what exceeds a limit, and the background: those of the light page."""


def colour(part: int) -> str:
    """Return the colour of the part with that number."""
    return COLOURS[part % len(COLOURS)]


def ink_on(ground: str) -> str:
    """Return black or white, whichever is legible on a background."""
    # 0.299, 0.587, 0.114: the luma weights of ITU-R BT.601; page/scripts/canvas.js has the same rule
    red, green, blue = (int(ground[at : at + 2], 16) for at in (1, 3, 5))
    return "#10151c" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def mixed(ground: str, share: float) -> str:
    """Return a colour mixed with white; ``share`` is the colour's share."""
    parts = (round(255 - share * (255 - int(ground[at : at + 2], 16))) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)
