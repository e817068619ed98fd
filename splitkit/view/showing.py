"""Draws what shows itself: what `splitkit.shown.Shown` asks for, the front door tells it of this module."""

from __future__ import annotations

from typing import Any

from splitkit.errors import SplitError, ViewError
from splitkit.view.html import FramedPage, fragment, still_page
from splitkit.view.ladder import LadderView
from splitkit.view.page import page
from splitkit.view.pictures import Picture, pictured

_MOST = 6000
"""Nodes beyond which a plan is not priced and drawn unasked."""

_MOST_PARTS = 120
"""Parts beyond which a picture, which has a band for each, is too tall to be put into a notebook unasked."""


def bundle(shown: object) -> dict[str, str]:
    """Text and a still picture. What cannot be drawn is text with a note why: showing a value never fails."""
    text = str(shown)
    try:
        picture = pictured(shown)
    except SplitError as error:
        return {"text/plain": text, "text/html": fragment(_lines(text), [], [_why(error)])}
    notes = [*picture.notes]
    svg = _still(picture, notes)
    try:
        tables = list(picture.tables()) if picture.nodes <= _MOST else []
    except SplitError as error:
        tables = []
        notes.append(_why(error))
    return {"text/plain": text, "text/html": fragment(svg if svg or tables else _lines(text), tables, notes)}


def _still(picture: Picture, notes: list[str]) -> str:
    """The still picture or another one, empty if there is none; why goes to the notes."""
    for count, most, what in ((picture.nodes, _MOST, "nodes"), (picture.parts, _MOST_PARTS, "parts")):
        if count > most:
            notes.append(f"{count} {what} are not drawn unasked: .view() and .to_svg(path) draw them.")
            return ""
    for draw in filter(None, (picture.svg, picture.instead)):
        try:
            return draw()
        except SplitError as error:
            notes.append(_why(error))
    return ""


def _why(error: SplitError) -> str:
    return f"No picture: {error.reason}. {error.remedy}"


def _lines(text: str) -> str:
    from splitkit.view.drawing import escaped

    return f'<pre style="margin:4px 8px">{escaped(text)}</pre>'


def svg(shown: object, **options: Any) -> str:
    """The still picture."""
    return pictured(shown, **options).svg()


def html(shown: object, **options: Any) -> str:
    """A page: of a plan one to steer, of all else a still picture with tables."""
    return html_of(pictured(shown, **options))


def html_of(picture: Picture) -> str:
    """The page of a picture."""
    if picture.ladder is not None:
        return page(picture.ladder().to_dict())
    return still_page(picture.title, fragment(picture.svg(), picture.tables(), picture.notes))


def without_ladder(picture: Picture, error: SplitError) -> str:
    """A still page of a plan that is no ladder, which says why."""
    svg = picture.instead() if picture.instead else ""
    return still_page(picture.title, fragment(svg, picture.tables(), [_why(error)]))


def view(shown: object, *, height: int | None = None, live: bool = False, **options: Any) -> Any:
    """The page in a frame, or a widget."""
    picture = pictured(shown, **options)
    if not live:
        return FramedPage(html_of(picture), height or (720 if picture.ladder else 560))
    ladder = picture.ladder and picture.ladder()
    if not isinstance(ladder, LadderView):
        raise ViewError(
            "SK901", f"a {type(shown).__name__} has nothing to steer", "live=True is for plans and splits; use .view()."
        )
    try:
        from splitkit.view.livewidget import LadderWidget
    except ModuleNotFoundError as error:
        reason = f"view(live=True) needs the package {error.name}"
        raise ViewError("SK902", reason, "pip install anywidget; .view() needs no package.") from error
    return LadderWidget(ladder, height or 720)
