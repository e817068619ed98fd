"""What the nodes inside ``torch.vmap`` really yield and take: whole batches, where their values show one example.

A captured ``vmap`` is a stretch of nodes between two that open and close a level of functorch. ``meta["val"]`` of what
lies between has the shape that the function saw::

    _vmap_increment_nesting(5)
    _add_batch_dim(w, 0, 1)           (8, 3)      a view of w: (5, 8, 3)
    matmul(x, _add_batch_dim)         (400, 3)    (5, 400, 3), made by a batched product
    _remove_batch_dim(matmul, ...)    (5, 400, 3) the same memory

So the graph is run on fakes, batching rules and all, and each node's memory is measured in that run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensorMode
from splitkit.errors import GraphError
from splitkit.graph.fakeruns import Values, values_again
from splitkit.memory.measure import measure_memory


@dataclass(frozen=True)
class Batched:
    """How the nodes of a graph with ``vmap`` run.

    Attributes:
        values: node -> what it yields, as tensors that hold the whole batch.
        transient: node inside a ``vmap`` -> bytes that it takes beside its results until it returns.
    """

    values: Mapping[Node, Any]
    transient: Mapping[Node, int]


def batched(gm: fx.GraphModule) -> Batched:
    """How the nodes run, empty for a graph without ``vmap`` and for one that does not run on fakes."""
    if not _has_vmap(gm):
        return Batched({}, {})
    transient: dict[Node, int] = {}

    def interpreter(gm: fx.GraphModule, mode: FakeTensorMode) -> Values:
        return _Physical(gm, mode, transient)

    depth = _torch.functorch_depth()
    try:
        return Batched(values_again(gm, interpreter), transient)
    except GraphError:
        return Batched({}, {})
    finally:
        while _torch.functorch_depth() > depth:  # the run has failed inside
            _torch.CLOSE_VMAP()


class _Physical(Values):
    """Notes whole batches, and what nodes take beside them."""

    def __init__(self, gm: fx.GraphModule, mode: FakeTensorMode, transient: dict[Node, int]) -> None:
        super().__init__(gm, mode)
        self.transient = transient

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and note what it yields, and takes."""
        if not _torch.functorch_depth() or n.op == "output" or self._part(n) is not None:
            return super().run_node(n)
        results: list[Any] = []
        measured = measure_memory(lambda: results.append(super(_Physical, self).run_node(n)))
        self.transient[n] = measured.peak - measured.end
        self.values[n] = _torch.pytree.tree_map_only(torch.Tensor, _torch.unwrapped, results[0])
        return results[0]

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a part of a split node by node, too: it may begin or end inside a ``vmap``."""
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
    """Whether a graph, or one that it calls, opens a level."""
    parts = (m for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(getattr(n.target, "__name__", "") == _OPENS for part in parts for n in part.graph.nodes)


_OPENS = "_vmap_increment_nesting"
