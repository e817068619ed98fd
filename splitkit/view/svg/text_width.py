"""Estimates the width of text without a browser.

The widths are those of DejaVu Sans, which is among the widest screen fonts: what fits by it fits in other fonts too.
"""

from __future__ import annotations

_FIRST = 32
_WIDTHS = (
    *(318, 401, 460, 838, 636, 950, 780, 275, 390, 390, 500, 838, 318, 361, 318, 337),
    *(636, 636, 636, 636, 636, 636, 636, 636, 636, 636, 337, 337, 838, 838, 838, 531),
    *(1000, 684, 686, 698, 770, 632, 575, 775, 752, 295, 295, 656, 557, 863, 748, 787),
    *(603, 787, 695, 635, 611, 732, 684, 989, 685, 611, 685, 390, 337, 390, 838, 500),
    *(500, 613, 635, 550, 635, 615, 352, 635, 634, 278, 278, 579, 278, 974, 634, 612),
    *(635, 635, 411, 521, 392, 634, 592, 818, 592, 592, 525, 636, 337, 636, 838),
)
"""The widths of the characters from space to tilde, in thousandths of the font size."""
_BOLD = 1.13
"""How much wider bold text is."""
_OTHER = 1000
"""The width assumed for all other characters."""


def width(text: str, size: float = 11, bold: bool = False) -> float:
    """Return the most pixels that a text takes."""
    thousandths = sum(_WIDTHS[at] if 0 <= (at := ord(letter) - _FIRST) < len(_WIDTHS) else _OTHER for letter in text)
    return thousandths * size / 1000 * (_BOLD if bold else 1)


def shortened(text: str, room: float, size: float = 11, bold: bool = False, *, end: bool = False) -> str:
    """Shorten a text with an ellipsis so that it fits; return ``""`` if not even one letter does.

    Args:
        text: the text.
        room: the pixels that it may take.
        size: the font size.
        bold: whether the font is bold.
        end: whether to keep the end, which matters more in the path of a module.
    """
    if width(text, size, bold) <= room:
        return text
    room -= width("…", size, bold)
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        kept = text[-middle:] if end else text[:middle]
        low, high = (middle, high) if width(kept, size, bold) <= room else (low, middle - 1)
    if not low:
        return ""
    return f"…{text[-low:]}" if end else f"{text[:low]}…"
