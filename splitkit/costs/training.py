"""Price forward and backward of a forward graph together, kernel by kernel.

A microbatch takes all kernels of forward and of backward, as autograd launches them, with the sums of gradients of
values that several nodes read. Not included are the optimizer, and adding the gradients of parameters to the sums of
earlier microbatches. The kernels of backward are found node by node.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import TorchDispatchMode, pytree
from splitkit.costs.base import WrappedCosts
from splitkit.costs.flop_formulas import NOMINAL, Flops, counter_of
from splitkit.costs.roofline import Roofline, mesh_of, roofline
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.node_values import (
    NO_SIZES,
    CallMemo,
    Gradients,
    StandIn,
    body_graphs,
    hints,
    op_name,
    require_values,
    stand_in,
    value_in,
)
from splitkit.graph.storages import tensors
from splitkit.hardware.device_specs import Device
from splitkit.prices import Checked, Costs, as_given, checked, includes_backward, unit_of
from splitkit.short_repr import brief

_ATTENTION = 2.5
"""Products in backward of fused attention per product in forward: five for two, as the scores are recomputed (Dao,
FlashAttention-2, 2023, section 4.1; torch's counter agrees)."""


def training(costs: Costs, gm: fx.GraphModule | Dataflow | None = None) -> FromOps:
    """Wrap costs of a graph so that the price of a forward node includes its backward.

    The ops that autograd runs for each node are found and priced like nodes, or by FLOPs and bytes in proportion to its
    forward where the prices are of another kind than a roofline or FLOPs. The nodes of a joint graph have prices of
    their own.

    Args:
        costs: costs of the nodes of ``gm``: any object with the methods of `Costs`.
        gm: the graph, or facts about it; not needed if ``costs`` has an attribute ``gm``.

    Raises:
        CostError: SK323 if the graph is not known or a joint graph, or if ``costs`` are not costs or include backward
            already.
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
    _require_forward(root.graph)
    require_values(root.graph)
    return FromOps(costs, facts_of(known))


def with_backward(costs: Costs, flow: Dataflow) -> Costs:
    """Return costs that include backward: ``costs`` if they do, else ``training(costs)``.

    Raises:
        CostError: SK323 for a joint graph.
    """
    _require_forward(flow.graph)
    return costs if includes_backward(costs) else training(costs, flow)


def _require_forward(graph: fx.Graph) -> None:
    if is_joint(graph):
        raise CostError(
            "SK323",
            "the graph has forward and backward together, and they cannot be told apart",
            "Capture the forward graph: splitkit.capture(model, *inputs).",
        )


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


@dataclass(frozen=True)
class FromOps(WrappedCosts):
    """The costs of `training`.

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
        object.__setattr__(self, "_like", given if own else roofline(self.flow, _device_of(given), mesh=mesh_of(given)))

    @property
    def gm(self) -> fx.GraphModule:
        """The forward graph."""
        return self.flow.root

    @property
    def note(self) -> str:
        """A text for reports: the costs of forward, and the source of backward."""
        return ", ".join(filter(None, (getattr(self.costs, "note", ""), f"backward {self.source}")))

    @property
    def unit(self) -> str:
        """The unit of the costs of forward."""
        return unit_of(self.costs)

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

    def seconds(self, node: Node) -> float:
        """Seconds of forward and backward."""
        return sum(self.both(node))

    def backward(self, node: Node) -> float:
        """Ratio of the node's time in backward to its time in forward."""
        forward, backward = self.both(node)
        return backward / forward if forward else 0.0

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


# Find the kernels that autograd runs in backward, by running each distinct call once on fake tensors.
#
# Autograd runs more than the products: bias sums, one kernel for each factor of a pointwise product, zeros behind a
# slice. Each call is run forward and backward, and the ops of its backward are recorded as a graph, which costs price
# as any other. Between the calls, the gradients of a value with several readers are added up::
#
#     node       forward    backward
#     addmm      addmm      mm (of the input), mm (of the weight), sum (of the bias)
#     x ** 3     pow        pow, mul, mul
#     x + y      add        nothing: both addends have the gradient of the sum
#     x                     add, if both read it


_SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class StepOps:
    """The ops that a node runs in a training step: graphs, of which nobody asks for results.

    Attributes:
        forward: the ops of its forward, several for a composite op.
        backward: the ops of its backward.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule


class BackwardKernels:
    """The kernels of backward, node by node, of a forward graph.

    Attributes:
        gradients: which nodes have a backward.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.gradients = flow.fact(Gradients)
        self._flow = flow
        self._calls = CallMemo[StepOps | None]()
        self._of: dict[tuple[Node, bool], StepOps | None] = {}
        self._summed = self._sums()

    def of(self, node: Node, *, fused: bool) -> StepOps | None:
        """Return the ops of a node that takes part in backward; ``None`` if it cannot run on fake tensors.

        Args:
            node: the node.
            fused: whether attention runs as a fused kernel; if not, as torch runs it on a CPU.
        """
        if (node, fused) not in self._of:
            self._of[node, fused] = self._found(node, fused)
        return self._of[node, fused]

    def sums(self, node: Node) -> list[fx.GraphModule]:
        """Return the additions of gradients of the values that a node makes, or is the first to read as parameters."""
        return self._summed.get(node, [])

    def _found(self, node: Node, fused: bool) -> StepOps | None:
        root, scope = self._flow.root, self._flow.scope[node]
        if body_graphs(root, node):
            return None
        call = stand_in(root, node, NO_SIZES, scope.autocast)
        reads = self.gradients.reads[node]
        flags = tuple(isinstance(leaf, Node) and leaf in reads for leaf in pytree.tree_leaves((node.args, node.kwargs)))
        yields_tuple = isinstance(node.meta["val"], tuple | list)
        members = [n for n in node.users if n.target is operator.getitem] if yields_tuple else []
        asked = tuple(n.args[1] for n in members if n in self.gradients.needed)
        watch = _BackwardRun(flags, asked, fused and op_name(node.target) == _SDPA)
        return self._calls.ask(call, watch, lambda: None, watch)

    def _sums(self) -> dict[Node, list[fx.GraphModule]]:
        root, found, terms = self._flow.root, dict[Node, list[fx.GraphModule]](), Counter[Any]()
        owner: dict[Any, tuple[Node, Any]] = {}  # value, a parameter by its tensor -> the node that adds, the value
        for node in self._flow.index:
            if node not in self.gradients.needed or node.target is operator.getitem:
                continue
            for read in pytree.tree_leaves((node.args, node.kwargs)):
                if isinstance(read, Node) and read in self.gradients.reads.get(node, ()):
                    value = value_in(root, read)
                    key = read if read.op != "get_attr" else id(value)
                    terms[key] += 1
                    maker = node if read.op in ("get_attr", "placeholder") else self._flow.producer(read)
                    owner.setdefault(key, (maker, value))
        for key, (node, value) in owner.items():
            if isinstance(value, torch.Tensor) and terms[key] > 1:
                call = StandIn(torch.ops.aten.add.Tensor, (value, value), {}, NO_SIZES, ())
                if (addition := self._calls.ask(call, _added, lambda: None, _added)) is not None:
                    found.setdefault(node, []).extend([addition.backward] * (terms[key] - 1))
        return found


@dataclass(frozen=True)
class _BackwardRun:
    """Runs a call, and records its backward.

    Attributes:
        flags: for each leaf of the arguments whether it requires grad.
        asked: the members of a tuple whose gradients come; empty for all.
        fused: whether the call is attention of a fused kernel, which has no dropout on a CPU and no gradient of a mask.
    """

    flags: tuple[bool, ...]
    asked: tuple[Any, ...]
    fused: bool

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> StepOps:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        with torch.inference_mode(False), torch.enable_grad():
            given = [_on_cpu(leaf, flag) for leaf, flag in zip(leaves, self.flags, strict=True)]
            args, kwargs = pytree.tree_unflatten(given, spec)
            call = partial(_fused_attention, call) if self.fused else call
            forward, made = _recorded(call, *args, **kwargs)
            outputs = [t for t in tensors([made[i] for i in self.asked] if self.asked else made) if t.requires_grad]
            gradients = list(map(torch.empty_like, outputs))
            leaves = _graded_leaves(outputs)
            backward, _ = _recorded(torch.autograd.grad, outputs, leaves, gradients, allow_unused=True)
            return StepOps(forward, backward)


def _added(call: Callable[..., Any], *args: Any) -> StepOps:
    addition, _ = _recorded(call, *args)
    return StepOps(addition, addition)


def _fused_attention(
    call: Callable[..., Any], query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Return attention without dropout and the gradient of its mask, for which a CPU has a fused kernel."""
    mask = None if attn_mask is None else attn_mask.detach()
    kwargs.pop("dropout_p", None)
    return call(query, key, value, mask, 0.0, *args[1:], **kwargs)


def _on_cpu(leaf: Any, flag: bool) -> Any:
    """Return an argument that requires grad if ``flag`` says so, and that the op may write to in place."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(hints(leaf.shape), hints(leaf.stride()), dtype=leaf.dtype, device="cpu")
    return made.requires_grad_().clone() if flag else made


def _graded_leaves(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that backward reaches, arguments and parameters of a module."""
    todo: list[Any] = [t.grad_fn for t in outputs]
    seen, found = set(todo), list[torch.Tensor]()
    while todo:
        step = todo.pop()
        if (leaf := getattr(step, "variable", None)) is not None:
            found.append(leaf)
        fresh = {after for after, _ in step.next_functions if after is not None} - seen
        seen |= fresh
        todo += fresh
    return found


def _recorded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, Any]:
    """Return a graph of the ops that a call runs, and the result of the call."""
    with _Recorder() as recorder:
        made = call(*args, **kwargs)
    recorder.graph.output(None)
    return fx.GraphModule({}, recorder.graph), made


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops that run, in a graph."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._nodes: dict[int, Node] = {}  # by id of a tensor; the nodes' values keep them alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and note it."""
        kwargs = kwargs or {}
        inputs = pytree.tree_map_only(torch.Tensor, self._node, (args, kwargs))
        made = func(*args, **kwargs)
        if func.namespace == "prim":  # a question, such as for the device of a tensor
            return made
        node = self._noted(self.graph.call_function(func, *inputs), made)
        for i, member in enumerate(made if isinstance(made, tuple | list) else ()):
            self._noted(self.graph.call_function(operator.getitem, (node, i)), member)
        return made

    def _node(self, tensor: torch.Tensor) -> Node:
        if id(tensor) not in self._nodes:
            self._noted(self.graph.placeholder(f"input_{len(self._nodes)}"), tensor)
        return self._nodes[id(tensor)]

    def _noted(self, node: Node, value: Any) -> Node:
        node.meta["val"] = value
        if isinstance(value, torch.Tensor):
            self._nodes[id(value)] = node
        return node
