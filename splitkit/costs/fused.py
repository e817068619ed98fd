"""Seconds by the roofline under a compiler that fuses: a chain of pointwise ops costs one read and one write.

::

    x ──> sin ──> exp ──> mm        roofline    sin: read, write    exp: read, write
                                    here        sin: read           exp: write           one launch for both

A kernel (`splitkit.costs.fusion`) reads what others made, once, and writes what others read; the first node that reads
a value is charged for that, and its members share the launch. What runs alone costs what the roofline says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx
from torch.fx import Node

from splitkit.brief import brief
from splitkit.costs.counting import Flops, counter_of
from splitkit.costs.devices import Device, find_device
from splitkit.costs.fusion import Fusion, Kernel
from splitkit.costs.loops import loop_of
from splitkit.costs.roofline import Roofline
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.joint import backward_nodes, is_joint
from splitkit.graph.sizes import require_values


def fused(gm: fx.GraphModule | Dataflow, device: str | Device = "a100", *, tf32: bool = False) -> Fused:
    """Costs in estimated seconds on a device, of a graph that Inductor or another fusing compiler runs.

    In a joint graph a node of forward costs what it adds to the kernels of backward if it is computed again there:
    nothing where a kernel of backward that reads it fuses with it and may as well read its one input, the read of its
    inputs otherwise, and its write where a product or another library call reads it. A reduction costs as much as alone
    where no kernel of backward has its rows at hand.

    Against Inductor's own scheduler for GPUs (torch 2.11 and 2.15), two layers each: as many kernels within 25 % in
    forward and backward of GPT-2, Llama, BERT and ViT; of ResNets, whose layout Inductor changes, up to twice or half
    as many.

    Args:
        gm: the graph, or facts about it.
        device: a name of `splitkit.costs.devices`, or a device of your own.
        tf32: whether products of float32 may be rounded, as by ``torch.set_float32_matmul_precision("high")``.

    Raises:
        GraphError: SK101 when it is no graph, SK102 when nodes have no ``meta["val"]``.
        CostError: SK321 when no device is called so.
    """
    root = root_of(gm)
    require_values(root.graph)
    return Fused(root, find_device(device), tf32, counter=counter_of(gm))


@dataclass(frozen=True)
class Fused:
    """See `fused`.

    Attributes:
        gm: the graph.
        device: where it runs.
        tf32: whether products may be rounded.
        counter: what counts its FLOPs.
    """

    gm: fx.GraphModule
    device: Device
    tf32: bool = False
    counter: Flops = field(kw_only=True, repr=False, compare=False)

    __repr__ = brief

    @cached_property
    def fusion(self) -> Fusion:
        """The kernels."""
        return Fusion(self.gm.graph, lambda node: not self._alone.seconds(node))

    @cached_property
    def _alone(self) -> Roofline:
        return Roofline(self.gm, self.device, self.tf32, counter=self.counter)

    @cached_property
    def _charged(self) -> dict[Node, tuple[int, float]]:
        """Node of a generated kernel -> the bytes and the seconds of launches that it is charged for."""
        moved: dict[Node, int] = {}
        launch: dict[Node, float] = {}
        generated = [kernel for kernel in self.fusion.kernels if kernel.loop is not None]
        for kernel in generated:
            moved |= self._borders(kernel)
            launch |= dict.fromkeys(kernel.nodes, self.device.launch / len(kernel.nodes))
        for node in self.fusion.second:
            moved[node] += self._of_second(node)
            launch[node] += self.device.launch
        backward = _backward_of_both(self.gm.graph)
        for kernel in [*generated, *self.fusion.repeated] if backward else ():
            again = [node for node in kernel.nodes if node not in backward]
            moved |= self._again(again, backward)
            if kernel in self.fusion.repeated or any(self._fused_readers(node, backward)[0] for node in again):
                launch |= dict.fromkeys(again, 0.0)  # a kernel of backward computes them on its way
            for node in again:
                if self._is_reduced_apart(node, backward):
                    moved[node], launch[node] = self._alone.moved(node), self.device.launch
        return {node: (moved[node], launch.get(node, 0.0)) for node in moved}

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"roofline of {self.device.name}, fused"

    def seconds(self, node: Node) -> float:
        """Seconds that the node adds to its kernel; 0 for views, inputs, attributes, and constants."""
        if node in self._charged:
            moved, launch = self._charged[node]
            return moved / self.device.bandwidth + launch
        return self._alone.seconds(node) if node in self.fusion.kernel else 0.0

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self._alone.flops(node)

    def moved(self, node: Node) -> int:
        """Bytes that the node's kernel reads and writes on its account."""
        return self._charged[node][0] if node in self._charged else self._alone.moved(node)

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self._alone.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self._alone.param_bytes(node)

    def _borders(self, kernel: Kernel) -> dict[Node, int]:
        """Bytes over the borders of a kernel, each charged to one node."""
        read = self._read(kernel.nodes)
        return {node: read[node] + self._written(node, lambda other: other is not kernel) for node in kernel.nodes}

    def _again(self, nodes: list[Node], backward: Collection[Node]) -> dict[Node, int]:
        """Bytes that nodes of one kernel of forward add to backward if they are computed there.

        A kernel of backward that read one of them reads what it is computed of instead. What is spared beyond that goes
        to the node before it, if that one is computed for its sake only. Several kernels each read, or one writes it.
        """
        read, spared, found = self._read(nodes), dict.fromkeys(nodes, 0), dict[Node, int]()
        for node in reversed(nodes):
            kernels, values = self._fused_readers(node, backward)
            spared[node] += sum(map(self.nbytes, values))
            more = max(0, read[node] - spared[node])
            called = self._written(node, lambda other: other is not None and other.loop is None)
            found[node] = called + (min(len(kernels) * more, read[node]) if kernels else more)
            before = [r for r in self.fusion.reads[node] if r in spared and not self._fused_readers(r, backward)[0]]
            if before:
                spared[max(before, key=self.nbytes)] += max(0, spared[node] - read[node])
        return found

    def _read(self, nodes: list[Node]) -> dict[Node, int]:
        """Bytes of what nodes of one kernel read that they do not make, each charged to the first that reads it."""
        found: dict[Node, int] = {}
        charged = set(nodes)
        for node in nodes:
            new = [r for r in self.fusion.reads[node] if self.fusion.maker(r) not in charged and r not in charged]
            charged.update(new)
            found[node] = min(sum(map(self.nbytes, new)), self._alone.moved(node))
        return found

    def _written(self, node: Node, counts: Callable[[Kernel | None], bool]) -> int:
        """Bytes that kernels read of a node for which it is written."""
        reads = {read: None for user, read in self.fusion.readers(node) if counts(self.fusion.kernel.get(user))}
        return sum(map(self.nbytes, reads))

    def _fused_readers(self, node: Node, backward: Collection[Node]) -> tuple[set[Kernel], set[Node]]:
        """The generated kernels of backward that read a node, and what they read: itself, or members of its tuple."""
        kernels, values = set[Kernel](), set[Node]()
        for user, value in self.fusion.readers(node):
            kernel = self.fusion.kernel.get(user)
            if user in backward and kernel is not None and kernel.loop is not None:
                kernels.add(kernel)
                values.add(value)
        return kernels, values

    def _is_reduced_apart(self, node: Node, backward: Collection[Node]) -> bool:
        """Whether a node reduces rows, and no kernel of backward that reads it has these at hand."""
        loop = loop_of(node)
        readers = (self.fusion.kernel.get(user) for user, _ in self.fusion.readers(node) if user in backward)
        return loop is not None and loop.row is not None and all(k is None or k.loop != loop for k in readers)

    def _of_second(self, node: Node) -> int:
        """Bytes of the other kernel of a node: it reads the same, or writes zeros."""
        loop = self.fusion.second[node].loop
        is_zeros = loop is not None and loop.row is None
        return self.nbytes(node) if is_zeros else sum(map(self.nbytes, self.fusion.reads[node]))


def _backward_of_both(graph: fx.Graph) -> dict[Node, None]:
    """The nodes of backward of a joint graph; none in a graph of forward or backward alone."""
    backward = backward_nodes(graph) if is_joint(graph) else {}
    outputs = graph.output_node().all_input_nodes
    return backward if any(node.op != "placeholder" and node not in backward for node in outputs) else {}
