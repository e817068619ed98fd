"""Read each size from the first input that has it; export may read it from the cache of any layer."""

from __future__ import annotations

import torch
from torch import fx


def read_first_sizes(gm: fx.GraphModule) -> None:
    """Let nodes that read the size of an input read it from the first input with that size; in place."""
    first = dict[str, tuple[fx.Node, int]]()
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            first.setdefault(str(size), (node, dim))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int):
        if node.args[0].op == "placeholder":
            node.args = first[str(node.meta["val"])]
    gm.recompile()
