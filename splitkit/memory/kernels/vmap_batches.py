"""The memory of nodes inside ``torch.vmap``, which hold whole batches where their values show one example.

A captured ``vmap`` is a run of nodes between two that open and close a level of functorch. ``meta["val"]`` of the nodes
in between has the shape that the function saw::

    _vmap_increment_nesting(5)
    _add_batch_dim(w, 0, 1)           (8, 3)      a view of w: (5, 8, 3)
    matmul(x, _add_batch_dim)         (400, 3)    (5, 400, 3), made by a batched product
    _remove_batch_dim(matmul, ...)    (5, 400, 3) the same memory

So the graph is run on fake tensors with functorch's batching rules, and each node's memory is measured in that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensorMode
from splitkit.errors import GraphError
from splitkit.graph.fake_runs import Values, values_again
from splitkit.memory.measurement import measure_memory


@dataclass(frozen=True)
class VmapRun:
    """The values and temporary memory of nodes in a graph with ``vmap``.

    Attributes:
        values: node -> its value, with tensors that hold the whole batch.
        transient: node inside a ``vmap`` -> bytes that it takes besides its results until it returns.
    """

    values: Mapping[Node, Any] = field(default_factory=dict)
    transient: Mapping[Node, int] = field(default_factory=dict)


def run_vmap(gm: fx.GraphModule) -> VmapRun:
    """Run a graph and its parts on fake tensors.

    The result is empty for a graph without ``vmap``, and for one that cannot run on fake tensors.
    """
    if not _has_vmap(gm):
        return VmapRun()
    transient: dict[Node, int] = {}

    def interpreter(gm: fx.GraphModule, mode: FakeTensorMode) -> Values:
        return _Physical(gm, mode, transient)

    try:
        return VmapRun(values_again(gm, interpreter), transient)
    except GraphError:
        return VmapRun()


def ends_inside(gm: fx.GraphModule) -> bool:
    """Return whether a graph opens a level that it does not close, or the other way round, as a part may."""
    levels = 0
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        levels += (name == _OPENS) - (name == _CLOSES)
        if levels < 0:
            return True
    return levels > 0


class _Physical(Values):
    """Records whole batches, and the temporary memory of nodes."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, transient: dict[Node, int]) -> None:
        super().__init__(gm, mode)
        self.transient = transient

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and record its value and its temporary memory."""
        if not _torch.functorch_depth() or n.op == "output" or self._part(n) is not None:
            return super().run_node(n)
        results: list[Any] = []
        measured = measure_memory(lambda: results.append(super(_Physical, self).run_node(n)))
        self.transient[n] = measured.peak - measured.end
        self.values[n] = _torch.pytree.tree_map_only(torch.Tensor, _torch.unwrapped, results[0])
        return results[0]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a part of a split node by node too, because it may begin or end inside a ``vmap``."""
        part = self.fetch_attr(target)
        if not isinstance(part, fx.GraphModule):
            return super().call_module(target, args, kwargs)
        inside = _Physical(part, self.mode, self.transient)
        names = [str(node.target) for node in part.graph.find_nodes(op="placeholder")]
        given = (*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs))
        result = inside.run(*given, enable_io_processing=False)
        self.values |= inside.values
        return result

    def _part(self, n: Node) -> fx.GraphModule | None:
        called = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        return called if isinstance(called, fx.GraphModule) else None


def _has_vmap(gm: fx.GraphModule) -> bool:
    """Return whether a graph, or one that it calls, opens a level."""
    parts = (m for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(getattr(n.target, "__name__", "") == _OPENS for part in parts for n in part.graph.nodes)


_OPENS, _CLOSES = "_vmap_increment_nesting", "_vmap_decrement_nesting"  # torch._C._functorch: 2.11, 2.13, 2.15
