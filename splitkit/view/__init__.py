"""Shows plans and results as tables, still pictures and interactive pages; it changes nothing.

Most users call ``plan.view()``, ``plan.to_html(path)`` and ``plan.to_svg(path)``. This package has the classes behind
these methods: `LadderView` (a plan in stages) and `HalvesView` (plans of forward and backward) give plain data with
``to_dict()``, for pages of your own; ``view()`` returns a `FramedPage`, and `splitkit.report` a `Report`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitkit.view.data.joint_ladder import HalvesView as HalvesView
    from splitkit.view.data.ladder import LadderView as LadderView
    from splitkit.view.data.report import Report as Report
    from splitkit.view.page.html import FramedPage as FramedPage

_HOME = {
    "FramedPage": "page.html",
    "HalvesView": "data.joint_ladder",
    "LadderView": "data.ladder",
    "Report": "data.report",
}

__all__ = ["FramedPage", "HalvesView", "LadderView", "Report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
