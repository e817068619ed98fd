"""Seconds by the roofline under a compiler that fuses: a chain of pointwise ops costs one read and one write.

::

    x ──> sin ──> exp ──> mm        roofline    sin: read, write    exp: read, write
                                    here        sin: read           exp: write           one launch for both

A kernel (`splitkit.costs.fusion`) reads what others made, once, and writes what others read; the first node that reads
a value is charged for that, and its members share the launch. What runs alone costs what the roofline says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx
from torch.fx import Node

from splitkit.costs.devices import Device, find_device
from splitkit.costs.fusion import Fusion, Kernel
from splitkit.costs.jointly import backward_nodes, is_joint
from splitkit.costs.roofline import Roofline
from splitkit.costs.sizes import require_values


def fused(gm: fx.GraphModule, device: str | Device = "a100", *, tf32: bool = False) -> Fused:
    """Costs in estimated seconds on a device, of a graph that Inductor or another fusing compiler runs.

    In a joint graph a node of forward costs what it adds to the kernels of backward if it is computed again there:
    nothing where a kernel of backward that reads it fuses with it and may as well read its one input, the read of its
    inputs otherwise, and its write where a product or another library call reads it.

    Args:
        gm: the graph.
        device: a name of `splitkit.costs.devices`, or a device of your own.
        tf32: whether products of float32 may be rounded, as by ``torch.set_float32_matmul_precision("high")``.

    Raises:
        GraphError: SK102 when nodes have no ``meta["val"]``.
        CostError: SK321 when no device is called so.
    """
    require_values(gm.graph)
    return Fused(gm, find_device(device), tf32)


@dataclass(frozen=True)
class Fused:
    """See `fused`.

    Attributes:
        gm: the graph.
        device: where it runs.
        tf32: whether products may be rounded.
        fusion: its kernels.
    """

    gm: fx.GraphModule
    device: Device
    tf32: bool = False
    fusion: Fusion = field(init=False, repr=False, compare=False)
    _alone: Roofline = field(init=False, repr=False, compare=False)
    _moved: Mapping[Node, int] = field(init=False, repr=False, compare=False)
    _launch: Mapping[Node, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        alone = Roofline(self.gm, self.device, self.tf32)
        object.__setattr__(self, "_alone", alone)
        object.__setattr__(self, "fusion", Fusion(self.gm.graph, lambda node: not alone.seconds(node)))
        backward = backward_nodes(self.gm.graph) if is_joint(self.gm.graph) else None
        moved: dict[Node, int] = {}
        launch: dict[Node, float] = {}
        for kernel in self.fusion.generated:
            again = [] if backward is None else [n for n in kernel.nodes if n not in backward]
            moved |= self._borders(kernel, again, backward or {})
            exists = any(self._is_read_by(n, backward or {}) for n in again)
            launch |= dict.fromkeys(kernel.nodes, self.device.launch / len(kernel.nodes))
            launch |= dict.fromkeys(again if exists else (), 0.0)
        object.__setattr__(self, "_moved", moved)
        object.__setattr__(self, "_launch", launch)

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"roofline of {self.device.name}, fused"

    def seconds(self, node: Node) -> float:
        """Seconds that the node adds to its kernel; 0 for views, inputs, attributes, and constants."""
        if node in self._moved:
            return self._moved[node] / self.device.bandwidth + self._launch[node]
        return self._alone.seconds(node) if node in self.fusion.kernel else 0.0

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self._alone.flops(node)

    def moved(self, node: Node) -> int:
        """Bytes that the node's kernel reads and writes on its account."""
        return self._moved[node] if node in self._moved else self._alone.moved(node)

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self._alone.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self._alone.param_bytes(node)

    def _borders(self, kernel: Kernel, again: list[Node], backward: Mapping[Node, None]) -> dict[Node, int]:
        """Bytes over the borders of a kernel, each charged to one node; of ``again``, if they are computed again."""
        found: dict[Node, int] = {}
        charged: set[Node] = set()
        for node in kernel.nodes:
            new = [r for r in self.fusion.reads[node] if self.fusion.kernel.get(r) is not kernel and r not in charged]
            charged.update(new)
            found[node] = min(sum(map(self.nbytes, new)), self._alone.moved(node)) + self._written(node, node in again)
            if node in again and self._is_read_by(node, backward):
                found[node] = max(0, found[node] - self.nbytes(node))  # which that kernel need not read then
        return found

    def _written(self, node: Node, again: bool) -> int:
        """Bytes that other kernels read of a node; if it is computed again, those that fuse with nothing."""
        kernel, found = self.fusion.kernel[node], dict[Node, None]()
        for user, read in self.fusion.readers(node):
            reader = self.fusion.kernel.get(user)
            if (reader is not None and reader.loop is None) if again else reader is not kernel:
                found[read] = None
        return sum(map(self.nbytes, found))

    def _is_read_by(self, node: Node, backward: Mapping[Node, None]) -> bool:
        """Whether a node of backward reads it that fuses with others."""
        kernels = (self.fusion.kernel.get(user) for user, _ in self.fusion.readers(node) if user in backward)
        return any(kernel is not None and kernel.loop is not None for kernel in kernels)
