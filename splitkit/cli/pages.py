"""The pages that ``splitkit view`` and ``--view`` write. What draws them waits for torch, and is imported late."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from splitkit.errors import SplitError
from splitkit.units import size

if TYPE_CHECKING:
    from splitkit.plans.record import Plan


def plan_page(plan: Plan, **options: Any) -> str:
    """The page of a plan to steer; where that is refused, a still one with the reason."""
    from splitkit.view.pictures import pictured
    from splitkit.view.showing import html_of, without_ladder

    picture = pictured(plan, **options)
    try:
        return html_of(picture)
    except SplitError as error:
        return without_ladder(picture, error)


def still_pages(title: str, shown: Mapping[str, object]) -> str:
    """One page of still pictures: heading -> an object that shows itself."""
    from splitkit.view.html import fragment, still_page
    from splitkit.view.pictures import pictured

    parts = []
    for heading, one in shown.items():
        picture = pictured(one)
        parts.append(fragment(picture.svg(), picture.tables(), picture.notes, heading=heading))
    return still_page(title, "".join(parts))


def wrote(path: str, text: str) -> str:
    """What is said of a page that is written."""
    return f"wrote {path} ({size(len(text.encode()))}); open it in a browser"
