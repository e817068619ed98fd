"""Costs of forward and backward together: by formula from a forward graph, exactly from a joint one.

By formula, the backward of a product is one product for each factor that requires grad, that of fused attention 2.5
times its forward (five products for two: the scores are computed again; Dao, FlashAttention-2, 2023, section 4.1, and
torch's counter), that of any other op as dear as its forward, and that of a view nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.brief import brief
from splitkit.checks import is_number, shown
from splitkit.costs.counting import Flops, counter_of
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.fakecalls import name_of, target_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint import is_joint, owners
from splitkit.graph.sizes import require_values
from splitkit.graph.symbols import value_of
from splitkit.prices import Costs, as_given, checked, includes_backward, unit_of

# Ops of which the first argument is added to the product of the next two.
_ADDED = frozenset(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"))
# Ops of two factors; what else they take (a bias) costs no product.
_PAIRS = _ADDED | {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "inner", "__matmul__", "_grouped_mm", "grouped_mm",
    "convolution", "_convolution", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
}  # fmt: skip
_SDPA = "scaled_dot_product_attention"
_ATTENTION = 2.5  # products in backward for one in forward, where the scores are computed again


def training(costs: Costs, gm: fx.GraphModule | Dataflow | None = None) -> FromFormula | FromJoint:
    """Wrap costs of a graph so that the price of a forward node includes its backward.

    For a joint graph, each backward node's price is added to the forward node that it came from, and is 0 itself; for
    a forward graph, backward is estimated. ``.source`` says which.

    Args:
        costs: of the nodes of ``gm``: any with the four methods.
        gm: the graph, or facts about it; not needed where ``costs`` has an attribute ``gm`` that says it.

    Raises:
        CostError: SK323 if the graph is not known, or ``costs`` are none, or include backward already.
        GraphError: SK102 when nodes have no ``meta["val"]``.
    """
    if includes_backward(as_given(costs)):
        reason = f"{type(as_given(costs)).__name__} includes backward already"
        raise CostError("SK323", reason, "Use it as it is.")
    known = gm if gm is not None else getattr(costs, "gm", None)
    root, costs = known.root if isinstance(known, Dataflow) else known, checked(costs)
    if not isinstance(root, fx.GraphModule):
        raise CostError(
            "SK323",
            f"{type(as_given(costs)).__name__} does not say which graph it is of",
            "Pass it: training(costs, gm).",
        )
    if is_joint(root.graph):
        return FromJoint(costs, root)
    require_values(root.graph)
    return FromFormula(costs, facts_of(known))


def with_backward(costs: Costs, flow: Dataflow) -> Costs:
    """Costs that include the backward of a node: themselves if they do, else `training` of them."""
    return costs if includes_backward(costs) else training(costs, flow)


def told_apart(costs: Costs, node: Node) -> tuple[float, float]:
    """Seconds of a node's forward and of its backward, by costs that include both.

    Raises:
        CostError: SK323 for what are none.
    """
    given = as_given(costs)
    ratio = given.backward(node)
    if isinstance(given, FromFormula):
        forward = given.costs.seconds(node)
        return forward, forward * ratio
    if not is_number(ratio):
        reason = f"{type(given).__name__}.backward({node.name}) is {shown(ratio)}"
        raise CostError("SK323", reason, "Say how many times its forward a node takes in backward.", [node])
    both = costs.seconds(node)
    forward = both / (1 + float(ratio))
    return forward, both - forward


@dataclass(frozen=True)
class FromFormula:
    """See `training`: forward graphs.

    Attributes:
        costs: what a node costs in forward.
        flow: facts about the forward graph.
        source: for reports.
        gradients: which nodes have a backward.
        counter: what counts their FLOPs: that of ``costs``, if they have one.
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

    @property
    def note(self) -> str:
        """What was added to which prices, for reports."""
        return _note(self.costs, self.source)

    @property
    def unit(self) -> str:
        """What the costs of forward count."""
        return unit_of(self.costs)

    def seconds(self, node: Node) -> float:
        """Seconds of forward and backward."""
        return self.costs.seconds(node) * (1 + self.backward(node))

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward."""
        return self.costs.flops(node) * (1 + self.backward(node))

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value; its gradient has as many, if it has one."""
        return self.costs.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.costs.param_bytes(node)

    def backward(self, node: Node) -> float:
        """How many times its forward the node costs in backward."""
        count = self.counter.count(node)
        if node not in self.gradients.needed or not count.flops:
            return 0.0
        if not count.counted:
            return 1.0
        given = self._given(node)
        fused = 0 if _no_kernel(node, given) else count.fused
        plain = count.counted - fused
        products = self._factors(node, given) * plain if plain else 0.0
        return (_ATTENTION * fused + products) / count.counted

    def _given(self, node: Node) -> list[bool]:
        """For each tensor that ``node`` takes whether it requires grad."""
        reads = self.gradients.reads[node]
        return [n in reads for n in pytree.tree_leaves((node.args, node.kwargs)) if _is_tensor(n)]

    def _factors(self, node: Node, given: list[bool]) -> float:
        """Products in backward for one in forward: one for each factor that requires grad."""
        target = target_of(self.gm, node)
        if isinstance(target, nn.Module):
            return float(any(given) + _weighs(target))
        name = name_of(target)
        if name == _SDPA:  # query @ key.T, and its product with value; each of them twice
            query, key, value = given[:3]
            return ((query or key) + query + key + value) / 2
        factors = given[1:] if name in _ADDED else given
        first, others = factors[:1], factors[1:2] if name in _PAIRS else factors[1:]
        return float(any(first) + any(others))


def _note(costs: Costs, source: str) -> str:
    return ", ".join(filter(None, (getattr(costs, "note", ""), f"backward {source}")))


def _no_kernel(node: Node, given: list[bool]) -> bool:
    """Whether torch takes no fused kernel: that of the CPU has no gradient for a mask (as T5 learns one)."""
    made = value_of(node)
    on_cpu = isinstance(made, torch.Tensor) and made.device.type == "cpu"
    return on_cpu and name_of(node.target) == _SDPA and any(given[3:])


def _is_tensor(value: object) -> bool:
    return isinstance(value, Node) and isinstance(value_of(value), torch.Tensor)


def _weighs(module: nn.Module) -> bool:
    """Whether the weight of a called module requires grad."""
    weight = getattr(module, "weight", None)
    weights = [weight] if isinstance(weight, torch.Tensor) else list(module.parameters())
    return any(w.requires_grad for w in weights)


@dataclass(frozen=True)
class FromJoint:
    """See `training`: joint graphs of forward and backward.

    Attributes:
        costs: what a node of the joint graph costs.
        gm: the joint graph.
        source: for reports.
        owner: backward node -> the forward node that it came from.
    """

    costs: Costs
    gm: fx.GraphModule
    source: str = field(default="from the joint graph", init=False)
    owner: Mapping[Node, Node] = field(init=False, repr=False, compare=False)
    _owned: Mapping[Node, list[Node]] = field(init=False, repr=False, compare=False)

    __repr__ = brief

    def __post_init__(self) -> None:
        owner, owned = owners(self.gm.graph), dict[Node, list[Node]]()
        for node, forward in owner.items():
            owned.setdefault(forward, []).append(node)
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "_owned", owned)

    @property
    def note(self) -> str:
        """What was added to which prices, for reports."""
        return _note(self.costs, self.source)

    @property
    def unit(self) -> str:
        """What the costs of forward count."""
        return unit_of(self.costs)

    def of(self, node: Node) -> list[Node]:
        """The nodes that ``node`` pays for: itself and its backward; none for a backward node."""
        return [] if node in self.owner else [node, *self._owned.get(node, ())]

    def seconds(self, node: Node) -> float:
        """Seconds of forward and backward; 0 for a backward node."""
        return sum(map(self.costs.seconds, self.of(node)))

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward; 0 for a backward node."""
        return sum(map(self.costs.flops, self.of(node)))

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self.costs.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.costs.param_bytes(node)
