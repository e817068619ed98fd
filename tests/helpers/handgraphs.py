"""Helpers build a graph node by node, or capture one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

import splitkit as sk


def graph_of(write: Callable[[fx.Graph], Any], root: nn.Module | None = None) -> fx.GraphModule:
    """A GraphModule around the graph that ``write`` fills; ``root`` has its attributes."""
    graph = fx.Graph()
    write(graph)
    return fx.GraphModule(root or nn.Module(), graph)


def captured(forward: Callable[..., Any], *inputs: Any) -> fx.GraphModule:
    """The capture of a model whose forward is ``forward(self, *inputs)``."""
    return sk.capture(type("Model", (nn.Module,), {"forward": forward})(), *inputs)
