"""Objects that show themselves: as text, a still picture, a page to steer. Who draws comes in by the front door."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from splitkit.files import PathLike


class Shown:
    """What shows itself.

    In a notebook the value of a cell is a still picture (SVG) with a table, without any script, so that it is there too
    where nothing runs: in nbviewer, in an e-mail, in a notebook that is not trusted. `view` is the page to steer,
    `to_html` and `to_svg` write both to files. What else they take is said by each class.

    Attributes:
        drawer: gives the module that draws. The front door sets it, as rooms know only those below them.
    """

    drawer: ClassVar[Callable[[], Any]]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Text and a still picture, for Jupyter and marimo."""
        bundle: dict[str, str] = Shown.drawer().bundle(self)
        return bundle

    def view(self, *, height: int | None = None, live: bool = False, **options: Any) -> Any:
        """A picture to look into, for the last line of a cell: the page that `to_html` writes, in a frame.

        Args:
            height: pixels.
            live: of a plan or a split: a widget that plans anew in Python when the number of stages is changed, and
                whose ``plan`` is the plan as it was dragged. It needs ``pip install anywidget``.
            options: what the class says.

        Raises:
            ViewError: SK901 for what cannot be drawn, SK902 where the package for live views is missing.
        """
        return Shown.drawer().view(self, height=height, live=live, **options)

    def to_html(self, path: PathLike, **options: Any) -> None:
        """Write a page that needs nothing but a browser.

        Raises:
            ViewError: SK901 for what cannot be drawn.
            FileError: SK504 if it cannot be written; what was there is left as it was.
        """
        self._write(path, Shown.drawer().html(self, **options))

    def to_svg(self, path: PathLike, **options: Any) -> None:
        """Write the still picture; errors as of `to_html`."""
        self._write(path, Shown.drawer().svg(self, **options))

    @staticmethod
    def _write(path: PathLike, text: str) -> None:
        from splitkit import files  # here, so that ``import splitkit`` stays fast

        try:
            files.write(path, text)
        except (OSError, ValueError) as error:
            raise files.refusal(path, error) from error


class ShownOverTime(Shown):
    """What shows itself and has an axis of time."""

    def to_chrome_trace(self) -> dict[str, Any]:
        """The times in the Trace Event Format."""
        raise NotImplementedError

    def to_trace(self, path: PathLike) -> None:
        """Write `to_chrome_trace` as JSON, which opens in Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

        Raises:
            FileError: SK504 if it cannot be written.
        """
        import json

        self._write(path, json.dumps(self.to_chrome_trace()))
