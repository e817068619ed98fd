"""The temporary memory of a single node's forward and backward under autograd, found on fake tensors.

Each distinct call (op, shapes, constants, which arguments require grad) runs once, forward and then backward, and its
live bytes are measured as for a real run. `splitkit.memory.kernels.temporaries` does the same without autograd.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.graph.byte_sizes import storage_bytes, tensor_bytes, value_bytes
from splitkit.graph.fake_calls import NO_SIZES, CallMemo, body_graphs, changes_state, stand_in
from splitkit.graph.scope import Scope, scopes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.measurement import measure_memory


@dataclass(frozen=True)
class BackwardBytes:
    """The temporary bytes of a node.

    Attributes:
        forward: the most bytes while the node runs, besides its results and what autograd saves.
        backward: the most bytes while its backward runs, besides its inputs (gradients, saved tensors) and results.
        wide: (argument, bytes) for arguments whose gradient is a view of larger memory, as for the inputs of ``cat``;
            an argument is an index into the leaves of the arguments.
        handed: arguments whose gradient shares memory with a result's gradient, as for the addends of a sum.
    """

    forward: int
    backward: int
    wide: tuple[tuple[int, int], ...] = ()
    handed: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward or self.wide or self.handed)


NOTHING = BackwardBytes(0, 0)


@dataclass
class BackwardTemporaries:
    """Measures each distinct call of a graph once.

    Attributes:
        gm: the graph.
        requires: the nodes whose value requires grad.
    """

    gm: fx.GraphModule
    requires: Collection[Node]
    _scope: Mapping[Node, Scope] = field(init=False)
    _calls: CallMemo[BackwardBytes] = field(default_factory=CallMemo)

    def __post_init__(self) -> None:
        self._scope, _ = scopes(self.gm.graph)

    def __call__(self, node: Node) -> BackwardBytes:
        """Return the temporary bytes of ``node`` in its autocast regions.

        A node that cannot run on fake tensors, or calls graphs of its own, counts its results, and in backward its
        inputs too, a second time.
        """
        if node.op not in ("call_function", "call_method", "call_module") or changes_state(self.gm, node):
            return NOTHING
        if node.target is operator.getitem and isinstance(value_of(node.all_input_nodes[0]), tuple | list):
            return NOTHING  # a member of a tuple: for autograd only the op that made the tuple exists
        scope = self._scope[node]
        if body_graphs(self.gm, node):
            return _guess(self.gm, node)
        call = stand_in(self.gm, node, NO_SIZES, [r for r in scope.regions if r.target is _torch.ENTER_AUTOCAST])
        flags = tuple(self._flags(node))
        watch = _CallRun(flags, scope.grad is not False)
        return self._calls.ask(call, watch, lambda: _guess(self.gm, node), watch)

    def _flags(self, node: Node) -> list[bool]:
        """Return for each leaf of the arguments whether it is a node whose value requires grad."""
        flat = not node.kwargs and not any(isinstance(a, tuple | list | dict) for a in node.args)
        leaves = node.args if flat else pytree.tree_leaves((node.args, node.kwargs))
        return [isinstance(a, Node) and a in self.requires for a in leaves]


@dataclass(frozen=True)
class _CallRun:
    """Runs a call and its backward, and measures both.

    Attributes:
        flags: for each leaf of the arguments whether it requires grad.
        grad: whether grad mode is on.
    """

    flags: tuple[bool, ...]
    grad: bool

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> BackwardBytes:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        with torch.set_grad_enabled(self.grad):
            given = [self._given(leaf, flag) for leaf, flag in zip(leaves, self.flags, strict=True)]
            args, kwargs = pytree.tree_unflatten(given, spec)
            held: list[Any] = []
            forward = measure_memory(lambda *a, **k: held.append(call(*a, **k)), *args, **kwargs)
            outputs = [t for t in tensors(held) if t.requires_grad]
            inputs = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            if not outputs or not inputs:
                return BackwardBytes(forward.peak - forward.end, 0)
            found: list[torch.Tensor | None] = []
            come = list(map(torch.empty_like, outputs))
            backward = measure_memory(_backward, outputs, inputs, come, found)
        where = [i for i, t in enumerate(given) if isinstance(t, torch.Tensor) and t.requires_grad]
        memory = [(i, g, storage_bytes(g)) for i, g in zip(where, found, strict=True) if g is not None]
        wide = tuple((i, nbytes) for i, g, nbytes in memory if nbytes > tensor_bytes(g))
        there = {storage_key(g) for g in come}
        handed = tuple(i for i, g, _ in memory if storage_key(g) in there)
        return BackwardBytes(forward.peak - forward.end, backward.peak - backward.end, wide, handed)

    def _given(self, leaf: Any, flag: bool) -> Any:
        """Return an argument that requires grad if ``flag`` says so, and that the op may write to in place."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        plain = leaf.detach()
        return plain.requires_grad_().clone() if flag and plain.is_floating_point() else plain


def _backward(outputs: Any, inputs: Any, gradients: Any, found: list[torch.Tensor | None]) -> None:
    found += torch.autograd.grad(outputs, inputs, gradients, allow_unused=True, retain_graph=True)


def _guess(gm: fx.GraphModule, node: Node) -> BackwardBytes:
    inner = sum(value_bytes(n) for body in body_graphs(gm, node) for n in body.graph.nodes if "call" in n.op)
    made, taken = value_bytes(node), sum(map(value_bytes, node.all_input_nodes))
    return BackwardBytes(inner + made, inner + made + taken)
