"""Test splits and plans: compare a split with the whole, check a plan, and find models and hard graphs to try.

Names are imported on first use: the command line needs the names of models before it imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splitkit.testing.compare import assert_legal as assert_legal
    from splitkit.testing.compare import assert_same as assert_same
    from splitkit.testing.graph_zoo import Specimen as Specimen
    from splitkit.testing.graph_zoo import zoo as zoo

_MODULES = {
    "Specimen": "graph_zoo",
    "assert_legal": "compare",
    "assert_same": "compare",
    "zoo": "graph_zoo",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
