"""Find the kernels that autograd runs in backward, by running each distinct call once on fake tensors.

Autograd runs more than the products: bias sums, one kernel for each factor of a pointwise product, zeros behind a
slice. Each call is run forward and backward, and the ops of its backward are recorded as a graph, which costs price as
any other. Between the calls, the gradients of a value with several readers are added up::

    node       forward    backward
    addmm      addmm      mm (of the input), mm (of the weight), sum (of the bias)
    x ** 3     pow        pow, mul, mul
    x + y      add        nothing: both addends have the gradient of the sum
    x                     add, if both read it
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import TorchDispatchMode, pytree
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fake_calls import NO_SIZES, CallMemo, StandIn, body_graphs, hints, op_name, stand_in, value_in
from splitkit.graph.gradients import Gradients
from splitkit.graph.storages import tensors

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
        call = stand_in(root, node, NO_SIZES, [r for r in scope.regions if r.target is _torch.ENTER_AUTOCAST])
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
                    owner.setdefault(key, (node if read.op in ("get_attr", "placeholder") else _maker(read), value))
        for key, (node, value) in owner.items():
            if isinstance(value, torch.Tensor) and terms[key] > 1:
                call = StandIn(torch.ops.aten.add.Tensor, (value, value), {}, NO_SIZES, ())
                if (addition := self._calls.ask(call, _added, lambda: None, _added)) is not None:
                    found.setdefault(node, []).extend([addition.backward] * (terms[key] - 1))
        return found


def _maker(node: Node) -> Node:
    """Return the op that made a value, also one in its tuple."""
    while node.target is operator.getitem and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


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
