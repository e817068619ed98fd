"""Price forward and backward together, from a forward graph or a joint one, kernel by kernel.

A microbatch takes all kernels of forward and of backward, as autograd launches them, with the sums of gradients of
values that several nodes read. Not included are the optimizer, and adding the gradients of parameters to the sums of
earlier microbatches. In a joint graph, the kernels of backward are nodes; for a forward graph,
`splitkit.costs.formulas.backward_kernels` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs.base import StepCosts, WrappedCosts
from splitkit.costs.formulas.backward_kernels import BackwardKernels
from splitkit.costs.formulas.flop_count import NOMINAL, Flops, counter_of
from splitkit.costs.roofline import Roofline, roofline
from splitkit.errors import CostError
from splitkit.graph.byte_sizes import require_values
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.joint_marks import forward_owners, is_joint
from splitkit.hardware.device_specs import Device
from splitkit.prices import Checked, Costs, as_given, checked, includes_backward, unit_of
from splitkit.short_repr import brief

_ATTENTION = 2.5
"""Products in backward of fused attention per product in forward: five for two, as the scores are recomputed (Dao,
FlashAttention-2, 2023, section 4.1; torch's counter agrees)."""


def training(costs: Costs, gm: fx.GraphModule | Dataflow | None = None) -> FromOps | FromJoint:
    """Wrap costs of a graph so that the price of a forward node includes its backward.

    For a joint graph, the price of each backward node is added to the forward node that it came from, and the backward
    node itself costs 0. For a forward graph, the ops that autograd runs for each node are found and
    priced like nodes, or by FLOPs and bytes in proportion to its forward where the prices are of another kind than a
    roofline or FLOPs. The attribute ``source`` says which it is.

    Args:
        costs: costs of the nodes of ``gm``: any object with the methods of `Costs`.
        gm: the graph, or facts about it; not needed if ``costs`` has an attribute ``gm``.

    Raises:
        CostError: SK323 if the graph is not known, or if ``costs`` are not costs or include backward already.
        GraphError: SK102 if nodes have no ``meta["val"]``.
    """
    if includes_backward(as_given(costs)):
        reason = f"{type(as_given(costs)).__name__} includes backward already"
        raise CostError("SK323", reason, "Use it as it is.")
    known = gm if gm is not None else getattr(costs, "gm", None)
    root, costs = known.root if isinstance(known, Dataflow) else known, checked(costs)
    if not isinstance(root, fx.GraphModule):
        raise CostError(
            "SK323",
            f"{type(as_given(costs)).__name__} does not say which graph it prices",
            "Pass it: training(costs, gm).",
        )
    if is_joint(root.graph):
        return FromJoint(costs, root)
    require_values(root.graph)
    return FromOps(costs, facts_of(known))


def with_backward(costs: Costs, flow: Dataflow) -> Costs:
    """Return costs that include backward: ``costs`` if they do, else ``training(costs)``."""
    return costs if includes_backward(costs) else training(costs, flow)


def forward_and_backward(costs: Costs, node: Node) -> tuple[float, float]:
    """Return the seconds of a node's forward and of its backward, by costs that include both.

    Raises:
        CostError: SK323 if the costs do not give a valid ratio of the two.
    """
    given = as_given(costs)
    if isinstance(given, FromOps):
        return given.both(node)
    ratio = Checked(given).backward_ratio(node)
    both = costs.seconds(node)
    forward = both / (1 + ratio)
    return forward, both - forward


class _WithBackward(WrappedCosts):
    source: str

    @property
    def note(self) -> str:
        """A text for reports: the costs of forward, and the source of backward."""
        return ", ".join(filter(None, (getattr(self.costs, "note", ""), f"backward {self.source}")))

    @property
    def unit(self) -> str:
        """The unit of the costs of forward."""
        return unit_of(self.costs)


@dataclass(frozen=True)
class FromOps(_WithBackward, StepCosts):
    """The costs of `training` for a forward graph.

    Attributes:
        costs: the costs of forward.
        flow: facts about the forward graph.
        source: how backward is priced, for reports.
        kernels: the ops of backward.
        counter: the counter of their FLOPs, shared with ``costs`` if those have one.
    """

    costs: Costs
    flow: Dataflow
    source: str = field(default="op by op", init=False)
    kernels: BackwardKernels = field(init=False, repr=False, compare=False)
    counter: Flops = field(init=False, repr=False, compare=False)
    _like: Roofline | Flops = field(init=False, repr=False, compare=False)
    _known: dict[Node, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        given = as_given(self.costs)
        counter = getattr(given, "counter", None)
        known = isinstance(counter, Flops) and counter.gm is self.gm
        object.__setattr__(self, "counter", counter if known else counter_of(self.flow))
        object.__setattr__(self, "kernels", self.flow.fact(BackwardKernels))
        own = isinstance(given, Roofline | Flops) and given.gm is self.gm
        object.__setattr__(self, "_like", given if own else roofline(self.flow, _device_of(given)))

    @property
    def gm(self) -> fx.GraphModule:
        """The forward graph."""
        return self.flow.root

    def both(self, node: Node) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        if node not in self._known:
            forward, backward = self.costs.seconds(node), self._backward(self._like, node)
            if backward and self._like is not as_given(self.costs):  # prices of another kind: only the ratio holds
                ops = self.kernels.of(node, fused=self._fuses)
                alone = self._like.seconds(node) if ops is None else self._like.of_graph(ops.forward)
                backward = forward * backward / alone if alone else 0.0
            self._known[node] = forward, backward
        return self._known[node]

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward."""
        return self.costs.flops(node) + self._backward(self.counter, node) * NOMINAL

    def _backward(self, costs: Roofline | Flops, node: Node) -> float:
        """Return the price of a node's backward, with the sums of the gradients of its values."""
        if node not in self.kernels.gradients.needed or node.op not in ("call_function", "call_method", "call_module"):
            return 0.0
        found = sum(map(costs.of_graph, self.kernels.sums(node)))
        ops = self.kernels.of(node, fused=self._fuses)
        return found + (costs.seconds(node) * self._guess(node) if ops is None else costs.of_graph(ops.backward))

    def _guess(self, node: Node) -> float:
        """Return backward as a multiple of forward for an op that does not run on fake tensors, or calls graphs."""
        if not self.counter.count(node).counted:
            return 1.0
        return _ATTENTION if node.target is torch.ops.higher_order.flex_attention else 2.0

    @property
    def _fuses(self) -> bool:
        """Whether attention runs as a fused kernel whatever its mask and dropout, as on a GPU."""
        return isinstance(self._like, Roofline) and not self._like.device.is_cpu


def _device_of(costs: object) -> str | Device:
    """Return the device by which backward is compared with forward, for prices of another kind than a roofline."""
    device = getattr(costs, "device", "cpu")
    return device if isinstance(device, Device) else "a100" if str(device).startswith("cuda") else "cpu"


@dataclass(frozen=True)
class FromJoint(_WithBackward):
    """The costs of `training` for a joint graph of forward and backward.

    Attributes:
        costs: the costs of the joint graph's nodes.
        gm: the joint graph.
        source: how backward is priced, for reports.
        owner: backward node -> the forward node that it came from.
    """

    costs: Costs
    gm: fx.GraphModule
    source: str = field(default="from the joint graph", init=False)
    owner: Mapping[Node, Node] = field(init=False, repr=False, compare=False)
    _owned: Mapping[Node, list[Node]] = field(init=False, repr=False, compare=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        owner, owned = forward_owners(self.gm.graph), dict[Node, list[Node]]()
        for node, forward in owner.items():
            owned.setdefault(forward, []).append(node)
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "_owned", owned)

    def of(self, node: Node) -> list[Node]:
        """Return the nodes whose prices ``node`` includes: itself and its backward nodes; none for a backward node."""
        return [] if node in self.owner else [node, *self._owned.get(node, ())]

    def seconds(self, node: Node) -> float:
        """Seconds of forward and backward; 0 for a backward node."""
        return sum(map(self.costs.seconds, self.of(node)))

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward; 0 for a backward node."""
        return sum(map(self.costs.flops, self.of(node)))
