"""Where the texts of a still picture are, for tests that none lies on another."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

from splitkit.view.svg.drawing import width

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture):
    """(text, left, top, right, bottom) of each text."""
    root = ET.fromstring(picture)
    found = []
    for text in root.iter(f"{SVG}text"):
        x, y, size = (float(text.get(name)) for name in ("x", "y", "font-size"))
        wide = width(text.text, size, text.get("font-weight") == "600")
        left = x - wide * {None: 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor")]
        found.append((text.text, left, y - 0.8 * size, left + wide, y + 0.22 * size))
    return found


def overlaps(picture):
    """Pairs of texts that lie on each other."""
    return [
        (a[0], b[0])
        for a, b in combinations(texts_of(picture), 2)
        if a[1] < b[3] - 0.5 and b[1] < a[3] - 0.5 and a[2] < b[4] - 0.5 and b[2] < a[4] - 0.5
    ]


def outside(picture):
    """Texts that reach over the edges."""
    wide, high = map(float, ET.fromstring(picture).get("viewBox").split()[2:])
    return [text for text, left, top, right, bottom in texts_of(picture) if left < 0 or right > wide or bottom > high]
