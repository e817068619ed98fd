"""How a graph is called: which of its inputs gets which argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from splitkit import _torch


def bound(gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The values of the graph's placeholders: the graph's own signature binds them, as in a call of ``gm``.

    Raises whatever such a call raises for what it does not take.
    """
    return list(binder(gm)(*args, **kwargs))


def binder(gm: fx.GraphModule) -> fx.GraphModule:
    """For many calls: takes what ``gm`` takes, and gives the values of its placeholders."""
    graph = fx.Graph()
    graph.output(tuple(graph.node_copy(n) for n in gm.graph.find_nodes(op="placeholder")))
    codegen = _torch.codegen_of(gm.graph)
    if hasattr(codegen, "pytree_info"):  # 2.11, 2.13, 2.15
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
    graph.set_codegen(codegen)
    return fx.GraphModule(nn.Module(), graph)
