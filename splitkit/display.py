"""The base classes of objects that render themselves: as text, as a still picture, as an interactive page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from splitkit.files import PathLike


class Shown:
    """The base class of objects that render themselves.

    In a notebook the value of a cell is a still picture (SVG) with a table. It has no scripts, so it also shows where
    scripts do not run: in nbviewer, in an e-mail, in an untrusted notebook. `view` shows the interactive page,
    `to_html` writes the page and `to_svg` the picture. The options of a picture are keywords of all three.

    Attributes:
        drawer: gives the module that draws. ``splitkit/__init__.py`` sets it, as packages know only those below them.
        explainer: gives the function that explains a plan; it is set likewise.
    """

    drawer: ClassVar[Callable[[], Any]]
    explainer: ClassVar[Callable[[], Any]]

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Return text and a still picture, for Jupyter and marimo."""
        bundle: dict[str, str] = Shown.drawer().bundle(self)
        return bundle

    def view(self, *, height: int | None = None) -> Any:
        """Return the page that `to_html` writes, in a frame, for the last line of a cell.

        Args:
            height: pixels of the frame.

        Raises:
            ViewError: SK901 if it cannot be drawn.
        """
        return self._framed(height)

    def to_html(self, path: PathLike) -> None:
        """Write a page that needs only a browser, or the still picture to a file that ends in ``.svg``.

        Raises:
            ViewError: SK901 if it cannot be drawn.
            FileError: SK504 if the file cannot be written; an existing file stays as it was.
        """
        self._write_html(path)

    def to_svg(self, path: PathLike) -> None:
        """Write the still picture; it raises the errors of `to_html`."""
        self._write_svg(path)

    def _framed(self, height: int | None, live: bool = False, **options: object) -> Any:
        return Shown.drawer().view(self, height=height, live=live, **options)

    def _write_html(self, path: PathLike, **options: object) -> None:
        from splitkit import files  # here, so that ``import splitkit`` stays fast
        from splitkit.errors import ViewError

        if (suffix := files.suffix_of(path)) in files.PICTURES and suffix != ".svg":
            reason = f"to_html writes a page, and {path} is not the name of one"
            raise ViewError("SK901", reason, "Name it page.html; or page.svg for a still picture.")
        draw = Shown.drawer().svg if suffix == ".svg" else Shown.drawer().html
        self._write(path, draw(self, **options))

    def _write_svg(self, path: PathLike, **options: object) -> None:
        self._write(path, Shown.drawer().svg(self, **options))

    @staticmethod
    def _write(path: PathLike, text: str) -> None:
        from splitkit import files  # here, so that ``import splitkit`` stays fast

        files.save_text(path, text)


class ShownOverTime(Shown):
    """The base class of objects whose picture shows bytes over time."""

    def view(self, *, height: int | None = None, memory: float | str | None = None) -> Any:
        """Return a page with the picture and its tables, in a frame, for the last line of a cell.

        Args:
            height: pixels of the frame.
            memory: the bytes of each device (``"80GiB"``); they are a line in the picture, and everything above it is
                red.

        Raises:
            ViewError: SK901 if it cannot be drawn.
        """
        return self._framed(height, memory=memory)

    def to_html(self, path: PathLike, *, memory: float | str | None = None) -> None:
        """Write the page, or the still picture to a file that ends in ``.svg``; ``memory`` as for `view`.

        Raises:
            ViewError: SK901 if it cannot be drawn.
            FileError: SK504 if the file cannot be written; an existing file stays as it was.
        """
        self._write_html(path, memory=memory)

    def to_svg(self, path: PathLike, *, memory: float | str | None = None) -> None:
        """Write the still picture; ``memory`` as for `view`. It raises the errors of `to_html`."""
        self._write_svg(path, memory=memory)

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the times in the Trace Event Format."""
        raise NotImplementedError

    def to_trace(self, path: PathLike) -> None:
        """Write `to_chrome_trace` as JSON, which opens in Perfetto (https://ui.perfetto.dev) and ``chrome://tracing``.

        Raises:
            FileError: SK504 if the file cannot be written.
        """
        import json

        self._write(path, json.dumps(self.to_chrome_trace()))
