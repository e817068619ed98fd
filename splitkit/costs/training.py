"""Price forward and backward together: by formula for a forward graph, exactly for a joint one.

By formula, the backward of a product is one product for each factor that requires grad. The backward of fused attention
is 2.5 times its forward: five products for two, as the scores are recomputed (Dao, FlashAttention-2, 2023, section 4.1;
torch's counter agrees). The backward of any other op costs as much as its forward, and that of a view nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.checks import is_number, shown
from splitkit.costs.base import WrappedCosts
from splitkit.costs.devices import kernels_of
from splitkit.costs.formulas.flop_count import Flops, counter_of
from splitkit.errors import CostError
from splitkit.graph.byte_sizes import require_values
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.fake_calls import op_name, target_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint_marks import forward_owners, is_joint
from splitkit.graph.symbols import value_of
from splitkit.prices import Costs, as_given, checked, includes_backward, unit_of
from splitkit.short_repr import brief

# Ops that add their first argument to the product of the next two.
_ADDED = frozenset(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"))
# Ops of two factors; their other arguments (a bias) cost no product.
_PAIRS = _ADDED | {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "__matmul__", "_grouped_mm", "grouped_mm",
    "convolution", "_convolution", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_SDPA = "scaled_dot_product_attention"
_ATTENTION = 2.5  # products in backward per product in forward, with recomputed scores (see above)


def training(costs: Costs, gm: fx.GraphModule | Dataflow | None = None) -> FromFormula | FromJoint:
    """Wrap costs of a graph so that the price of a forward node includes its backward.

    For a joint graph, the price of each backward node is added to the forward node that it came from, and the backward
    node itself costs 0. For a forward graph, backward is estimated. The attribute ``source`` says which it is.

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
    return FromFormula(costs, facts_of(known))


def with_backward(costs: Costs, flow: Dataflow) -> Costs:
    """Return costs that include backward: ``costs`` if they do, else ``training(costs)``."""
    return costs if includes_backward(costs) else training(costs, flow)


def forward_and_backward(costs: Costs, node: Node) -> tuple[float, float]:
    """Return the seconds of a node's forward and of its backward, by costs that include both.

    Raises:
        CostError: SK323 if the costs do not give a valid ratio of the two.
    """
    given = as_given(costs)
    ratio = given.backward(node)
    if isinstance(given, FromFormula):
        forward = given.costs.seconds(node)
        return forward, forward * ratio
    if not is_number(ratio):
        reason = f"{type(given).__name__}.backward({node.name}) is {shown(ratio)}"
        raise CostError(
            "SK323", reason, "Say how many times as long as its forward the backward of a node takes.", [node]
        )
    both = costs.seconds(node)
    forward = both / (1 + float(ratio))
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
class FromFormula(_WithBackward):
    """The costs of `training` for a forward graph.

    Attributes:
        costs: the costs of forward.
        flow: facts about the forward graph.
        source: how backward is priced, for reports.
        gradients: which nodes have a backward.
        counter: the counter of their FLOPs, shared with ``costs`` if those have one.
    """

    costs: Costs
    flow: Dataflow
    source: str = field(default="by formula", init=False)
    gradients: Gradients = field(init=False, repr=False, compare=False)
    counter: Flops = field(init=False, repr=False, compare=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        counter = getattr(self.costs, "counter", None)
        known = isinstance(counter, Flops) and counter.gm is self.gm
        object.__setattr__(self, "counter", counter if known else counter_of(self.flow))
        object.__setattr__(self, "gradients", self.flow.fact(Gradients))

    @property
    def gm(self) -> fx.GraphModule:
        """The forward graph."""
        return self.flow.root

    def seconds(self, node: Node) -> float:
        """Seconds of forward and backward."""
        return self.costs.seconds(node) * (1 + self.backward(node))

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward."""
        return self.costs.flops(node) * (1 + self.backward(node))

    def backward(self, node: Node) -> float:
        """How many times its forward the node costs in backward."""
        count = self.counter.count(node)
        if node not in self.gradients.needed or not count.flops:
            return 0.0
        if not count.counted:
            return 1.0
        given = self._given(node)
        fused = self._fused(node, given)
        plain = count.counted - fused
        products = self._factors(node, given) * plain if plain else 0.0
        return (_ATTENTION * fused + products) / count.counted

    def _fused(self, node: Node, given: list[bool]) -> int:
        """Return the FLOPs of fused kernels. The CPU has none for attention with dropout, or a mask with a gradient."""
        count = self.counter.count(node)
        if op_name(node.target) != _SDPA:
            return count.fused
        kernels, made = kernels_of(self.costs), value_of(node)
        on_cpu = kernels == "cpu" if kernels else isinstance(made, torch.Tensor) and made.device.type == "cpu"
        drops = node.kwargs.get("dropout_p", node.args[4] if len(node.args) > 4 else 0.0)
        return 0 if on_cpu and (drops or any(given[3:])) else count.counted

    def _given(self, node: Node) -> list[bool]:
        """Return for each tensor among the node's arguments whether it requires grad."""
        reads = self.gradients.reads[node]
        return [n in reads for n in pytree.tree_leaves((node.args, node.kwargs)) if _is_tensor(n)]

    def _factors(self, node: Node, given: list[bool]) -> float:
        """Return the products in backward per product in forward: one for each factor that requires grad."""
        target = target_of(self.gm, node)
        if isinstance(target, nn.Module):
            return float(any(given) + _weighs(target))
        name = op_name(target)
        if name == _SDPA:  # query @ key.T, and its product with value; each of them twice
            query, key, value = given[:3]
            return ((query or key) + query + key + value) / 2
        factors = given[1:] if name in _ADDED else given
        first, others = factors[:1], factors[1:2] if name in _PAIRS else factors[1:]
        return float(any(first) + any(others))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value_of(value), torch.Tensor)


def _weighs(module: nn.Module) -> bool:
    """Whether the weight of a called module requires grad."""
    weight = getattr(module, "weight", None)
    weights = [weight] if isinstance(weight, torch.Tensor) else list(module.parameters())
    return any(w.requires_grad for w in weights)


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
