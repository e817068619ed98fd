"""Seconds by the roofline: a node takes as long as its arithmetic or its memory traffic, and a kernel's start.

::

    seconds = max(FLOPs / peak of the dtype, bytes moved / bandwidth) + launch

Williams, Waterman, Patterson: Roofline (CACM 2009). A node is one kernel, also where it is made of several ops
(``linear``, ``layer_norm``, attention): it reads its inputs and writes its outputs. No fusion of nodes, no caches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import HigherOrderOperator
from splitkit.brief import brief
from splitkit.costs.counting import Count, Flops, bodies, counter_of
from splitkit.costs.devices import Device, find_device
from splitkit.costs.traffic import moved_bytes, operands, written_bytes
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.fakecalls import rounds
from splitkit.graph.scope import Scope, region_kind, scopes
from splitkit.graph.sizes import require_values
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of


def roofline(gm: fx.GraphModule | Dataflow, device: str | Device = "a100", *, tf32: bool = False) -> Roofline:
    """Costs in estimated seconds on a device: on that one only, by its data sheet, whatever runs the graph here.

    For times of this machine measure them (`splitkit.costs.measured`): ``"cpu"`` is some CPU, which may be ten and more
    times as fast as the one at hand.

    Args:
        gm: the graph, or facts about it.
        device: a name of `splitkit.costs.devices` (in any case, with or without hyphens), or a device of your own.
        tf32: whether products of float32 may be rounded, as by ``torch.set_float32_matmul_precision("high")``.

    Raises:
        GraphError: SK101 when it is no graph, SK102 when nodes have no ``meta["val"]``.
        CostError: SK321 when no device is called so.
    """
    root = root_of(gm)
    require_values(root.graph)
    return Roofline(root, find_device(device), tf32, counter=counter_of(gm))


@dataclass(frozen=True)
class Roofline:
    """See `roofline`; ``counter`` counts its FLOPs."""

    gm: fx.GraphModule
    device: Device
    tf32: bool = False
    counter: Flops = field(kw_only=True, repr=False, compare=False)
    _scopes: dict[Node, Scope] = field(init=False, repr=False, compare=False)
    _found: dict[Node, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    _bodies: dict[fx.GraphModule, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        object.__setattr__(self, "_scopes", dict(scopes(self.gm.graph)[0]))

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"roofline of {self.device.name}"

    def seconds(self, node: Node) -> float:
        """Seconds of the kernel; 0 for what starts none: views, allocations, inputs, attributes, state ops."""
        if node not in self._found:
            self._found[node] = self._of(node)
        return self._found[node]

    def _of(self, node: Node) -> float:
        count = self.counter.count(node)
        if isinstance(node.target, HigherOrderOperator):
            inner = [self._of_body(body) for body in bodies(self.gm, node)]
            if inner:
                return max(inner) if node.target is torch.ops.higher_order.cond else sum(inner) * rounds(node)
        if not count.counted and not written_bytes(self.gm, node, count):
            return 0.0
        compute = count.flops / self.device.rate(self._dtype(node, count))
        return max(compute, self.moved(node) / self.device.bandwidth) + self.device.launch

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self.counter.flops(node)

    def moved(self, node: Node) -> int:
        """Bytes that the node's kernel reads and writes."""
        return moved_bytes(self.gm, node, self.counter.count(node))

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self.counter.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.counter.param_bytes(node)

    def _of_body(self, body: fx.GraphModule) -> float:
        if body not in self._bodies:
            inner = Roofline(body, self.device, self.tf32, counter=Flops(body))
            self._bodies[body] = sum(inner.seconds(node) for node in body.graph.nodes)
        return self._bodies[body]

    def _dtype(self, node: Node, count: Count) -> torch.dtype | str:
        """In which the node computes: products in that of their first operand, all else in float32 or wider."""
        dtypes = [t.dtype for t in (*operands(self.gm, node), *tensors(value_of(node)))]
        if not count.counted:
            wide = [d for d in dtypes if d == torch.float64 or d.is_complex]
            return wide[0] if wide else torch.float32
        first = dtypes[0] if dtypes else torch.float32
        if first.is_floating_point and first != torch.float64:
            first = self._autocast(node) or first
        return "tf32" if self.tf32 and first == torch.float32 else first

    def _autocast(self, node: Node) -> torch.dtype | None:
        """The dtype of the innermost autocast region of the node's device, ``None`` if it is off."""
        made: torch.Tensor | None = next(tensors(value_of(node)), None)
        scope = self._scopes.get(node)
        if made is None or scope is None:
            return None
        for enter in reversed(scope.regions):
            if region_kind(enter).name != "autocast" or _argument(enter, 0, "device_type") != made.device.type:
                continue
            if not _argument(enter, 2, "enabled"):
                return None
            return _argument(enter, 1, "dtype") or torch.get_autocast_dtype(made.device.type)
        return None


def _argument(node: Node, at: int, name: str) -> Any:
    return node.args[at] if at < len(node.args) else node.kwargs.get(name)
