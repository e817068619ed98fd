"""Makes the pages that ``splitkit view`` and ``--view`` write.

The renderers import torch, so they are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from splitkit.errors import SplitError
from splitkit.files import suffix_of
from splitkit.units import size

if TYPE_CHECKING:
    from splitkit.plans.record import Plan


def drawn(path: str, shown: object, fields: Mapping[str, Any] | None = None, **options: Any) -> str:
    """Return the interactive page of an object, or its still picture for a file that ends in ``.svg``."""
    from splitkit.view.renderers import html, svg

    return svg(shown, **options) if suffix_of(path) == ".svg" else html(shown, fields=fields, **options)


def plan_page(plan: Plan, **options: Any) -> str:
    """Return the interactive page of a plan; if it cannot be drawn, a still page with the reason."""
    from splitkit.view.renderers import fallback_html, picture_html, pictured

    picture = pictured(plan, **options)
    try:
        return picture_html(picture)
    except SplitError as error:
        return fallback_html(picture, error)


def still_pages(title: str, shown: Mapping[str, object]) -> str:
    """Return one page of still pictures.

    Args:
        title: the title of the page.
        shown: heading -> the object to draw below it.
    """
    from splitkit.view.page.html import still_page
    from splitkit.view.renderers import pictured

    return still_page(title, "".join(pictured(one).inside(heading) for heading, one in shown.items()))


def wrote(path: str, text: str) -> str:
    """Return the line that reports a written page."""
    return f"wrote {path} ({size(len(text.encode()))}); open it in a browser"
