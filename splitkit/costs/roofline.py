"""Estimate seconds by the roofline model: the time of a node's arithmetic or memory traffic, plus a kernel launch.

::

    seconds = max(FLOPs / peak of the dtype, bytes moved / bandwidth) + launch

Source: Williams, Waterman, Patterson: Roofline (CACM 2009). Each node counts as one kernel that reads its inputs and
writes its outputs, even if it is composed of several ops (``linear``, ``layer_norm``, attention). A recurrent layer has
one launch for each of its steps, which wait for each other. The model has no fusion of nodes and no caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import HigherOrderOperator
from splitkit.costs.formulas.decomposed_attention import decomposed_attention
from splitkit.costs.formulas.flop_count import Count, CountedCosts, Flops, counted_bodies, counter_of
from splitkit.costs.formulas.sequential_steps import kernels_in_sequence
from splitkit.costs.formulas.traffic import moved_bytes, operands, written_bytes
from splitkit.graph.byte_sizes import require_values
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.fake_calls import body_calls
from splitkit.graph.scope import Scope, region_kind, scopes
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of
from splitkit.hardware.device_specs import Device, find_device
from splitkit.short_repr import brief


def roofline(gm: fx.GraphModule | Dataflow, device: str | Device = "a100", *, tf32: bool = False) -> Roofline:
    """Return costs in estimated seconds on a device, by its data sheet, whatever machine this runs on.

    For the times of this machine, measure them with `splitkit.costs.measured`. The device ``"cpu"`` is a generic
    server, which may be ten or more times as fast as the machine at hand.

    Args:
        gm: the graph, or facts about it.
        device: a name of `splitkit.costs.devices` (in any case, with or without hyphens), or a device of your own.
        tf32: whether products of float32 may be rounded, as by ``torch.set_float32_matmul_precision("high")``.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph, SK102 if nodes have no ``meta["val"]``.
        CostError: SK321 if no device has that name.
    """
    root = root_of(gm)
    require_values(root.graph)
    return Roofline(root, find_device(device), tf32, counter=counter_of(gm))


@dataclass(frozen=True)
class Roofline(CountedCosts):
    """The costs of `roofline`; ``counter`` counts their FLOPs."""

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
        """Seconds of the node's kernel; 0 for nodes without one: views, allocations, inputs, attributes, state ops.

        Nodes of decomposed attention share the seconds of the kernel that a GPU runs instead of them.
        """
        return self.alone(node) * self._shares.get(node, 1.0)

    def alone(self, node: Node) -> float:
        """Seconds of the node's kernel, also if the device runs another one for it and others together."""
        if node not in self._found:
            self._found[node] = self._of(node)
        return self._found[node]

    @cached_property
    def _shares(self) -> Mapping[Node, float]:
        """Node of decomposed attention -> the seconds of the fused kernel per second of the nodes."""
        found: dict[Node, float] = {}
        for kernel in decomposed_attention(self.gm.graph) if not self.device.is_cpu else ():
            counts = {node: self.counter.count(node) for node in kernel.nodes}
            work = [(node, count) for node, count in counts.items() if count.counted]
            compute = sum(count.counted / self.device.rate(self._dtype(node, count)) for node, count in work)
            seconds = max(kernel.work * compute, kernel.moved / self.device.bandwidth) + self.device.launch
            if seconds < (decomposed := sum(map(self.alone, kernel.nodes))):
                found |= dict.fromkeys(kernel.nodes, seconds / decomposed)
        return found

    def _of(self, node: Node) -> float:
        count = self.counter.count(node)
        if isinstance(node.target, HigherOrderOperator):
            inner = [self.of_graph(body) for body in counted_bodies(self.gm, node)]
            if inner:
                return max(inner) if node.target is torch.ops.higher_order.cond else sum(inner) * body_calls(node)
        if not count.counted and not written_bytes(self.gm, node, count):
            return 0.0
        compute = count.flops / self.device.rate(self._dtype(node, count))
        launches = self.device.launch * kernels_in_sequence(self.gm, node)
        return max(compute, self.moved(node) / self.device.bandwidth) + launches

    def moved(self, node: Node) -> int:
        """Bytes that the node's kernel reads and writes."""
        return moved_bytes(self.gm, node, self.counter.count(node))

    def of_graph(self, body: fx.GraphModule) -> float:
        """Return the seconds of all nodes of another graph on the same device."""
        if body not in self._bodies:
            inner = Roofline(body, self.device, self.tf32, counter=self.counter.on(body))
            self._bodies[body] = sum(inner.seconds(node) for node in body.graph.nodes)
        return self._bodies[body]

    def _dtype(self, node: Node, count: Count) -> torch.dtype | str:
        """Return the dtype of a node's arithmetic: for products that of the first operand, else float32 or wider."""
        dtypes = [t.dtype for t in (*operands(self.gm, node), *tensors(value_of(node)))]
        if not count.counted:
            wide = [d for d in dtypes if d == torch.float64 or d.is_complex]
            return wide[0] if wide else torch.float32
        first = dtypes[0] if dtypes else torch.float32
        if first.is_floating_point and first != torch.float64:
            first = self._autocast(node) or first
        return "tf32" if self.tf32 and first == torch.float32 else first

    def _autocast(self, node: Node) -> torch.dtype | None:
        """Return the dtype of the innermost autocast region of the node's device, ``None`` if there is none."""
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
