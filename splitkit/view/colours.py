"""The colours of all pictures, still or to steer: a part has the same one everywhere."""

from __future__ import annotations

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6bb1", "#7f7f00")
"""Okabe and Ito's palette, which colour-blind readers can tell apart; with it go the numbers of the parts."""

INK, MUTED, LINE, RIBBON, BAD, PAPER = "#1c2330", "#5b6472", "#d9dee6", "#8a94a3", "#c2122b", "#ffffff"
"""Text, lesser text, rules, what is saved, what is too much, and the ground; as of the light page."""


def colour(part: int) -> str:
    """Of the part with that number."""
    return COLOURS[part % len(COLOURS)]


def ink_on(ground: str) -> str:
    """What can be read on a colour."""
    red, green, blue = (int(ground[at : at + 2], 16) for at in (1, 3, 5))
    return "#10151c" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def mixed(ground: str, share: float) -> str:
    """A colour thinned with white."""
    parts = (round(255 - share * (255 - int(ground[at : at + 2], 16))) for at in (1, 3, 5))
    return "#" + "".join(f"{part:02x}" for part in parts)
