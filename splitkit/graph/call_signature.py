"""Bind the arguments of a call to a graph's placeholders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx, nn

from splitkit import _torch


def bind_inputs(gm: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the values of the graph's placeholders in a call ``gm(*args, **kwargs)``.

    Raises whatever that call raises for arguments that it does not take.
    """
    return list(input_binder(gm)(*args, **kwargs))


def input_binder(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a module that takes the arguments of ``gm`` and returns the values of its placeholders, for many calls."""
    graph = fx.Graph()
    graph.output(tuple(graph.node_copy(n) for n in gm.graph.find_nodes(op="placeholder")))
    codegen = _torch.codegen_of(gm.graph)
    if hasattr(codegen, "pytree_info"):  # 2.11, 2.13, 2.15
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=None)
    graph.set_codegen(codegen)
    return fx.GraphModule(nn.Module(), graph)
