"""Find the nodes of a forward graph that take part in backward.

The values of captured graphs do not say whether they require grad. So gradients are followed forward from the
parameters: through floating-point results and written memory, but not through ``detach`` or where gradients are off.
Then the result is restricted to nodes that an output depends on, as no other node's gradient is asked for::

    weight (requires grad) ── linear ── relu ─┬─ detach ── mul ── output      requires grad: linear, relu, softmax
    input                  ───┘               └─ softmax ──────── output      has a backward: the same three
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence, Set
from functools import cached_property

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.fake_calls import op_name, target_of
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of

_CUTS = ("detach", "new_", "bernoulli", "lift_fresh")
"""Prefixes of the names of ops whose results never require grad; names that end in ``_like`` are of such ops too."""
_FORMED = ("type_as", "expand_as", "view_as", "reshape_as", "to")
"""Ops that take only the shape, dtype or device of tensors behind the first argument."""


class Gradients:
    """The values of a forward graph that require grad at the time when a node reads them.

    Attributes:
        reads: node -> its inputs that require grad when it runs.
        needed: the nodes that take part in backward: their result requires grad, and an output depends on it.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.reads: dict[Node, frozenset[Node]] = {}
        self.needed: set[Node] = set()
        self._flow = flow
        self._memory: dict[Node, Hashable] = {}  # node -> the node whose memory its value lies in
        self._live: set[Hashable] = set()  # memory whose tensors require grad
        for node in flow.index:
            self._visit(flow.root, node)
        self.needed &= self._wanted(flow.graph)

    @cached_property
    def carriers(self) -> Set[Node]:
        """The nodes whose values take a gradient: those in `needed`, and those whose memory such a node writes later.

        A tensor that is made empty and then filled does not require grad when it is made, but does when it is read.
        """
        found = set[Hashable]()
        for node in self.needed:
            effects = self._flow.effects.get(node)
            found.update(self._memory[written] for written in (effects.writes if effects is not None else ()))
        return self.needed | {node for node, memory in self._memory.items() if memory in found}

    def _visit(self, root: nn.Module, node: Node) -> None:
        effects = self._flow.effects.get(node)
        aliases = effects.aliases if effects is not None else ()
        cut = self._is_cut(node)
        self._memory[node] = self._memory[aliases[0]] if aliases and not cut else node
        if node.op in ("placeholder", "get_attr"):
            if _leaf_requires_grad(root, node):
                self._live.add(node)
                self.needed.add(node)
            return
        reads = frozenset(n for n in _sources(node) if self._memory[n] in self._live and _is_float(n))
        self.reads[node] = reads
        written = effects.writes if effects is not None else ()
        if cut or not (written or _is_float(node)) or not (reads or _module_requires_grad(root, node)):
            return
        self.needed.add(node)
        self._live.update(self._memory[n] for n in (node, *written))

    def _wanted(self, graph: fx.Graph) -> set[Node]:
        """Return the nodes that the outputs depend on, through results and through memory written before."""
        wanted, memory = set[Node](), set[Hashable]()
        for node in reversed(graph.nodes):
            effects = self._flow.effects.get(node)
            written = effects.writes if effects is not None else ()
            if node in wanted or node.op == "output" or any(self._memory[n] in memory for n in written):
                wanted.add(node)
                reads = self.reads.get(node, frozenset()) if node in self.needed or node.op == "output" else ()
                wanted.update(reads)
                memory.update(self._memory[n] for n in reads)
        return wanted

    def _is_cut(self, node: Node) -> bool:
        if node not in self._flow.scope or self._flow.scope[node].grad is False:
            return node.op not in ("placeholder", "get_attr")
        if node.op not in ("call_function", "call_method"):
            return False
        name = op_name(node.target)
        return name.startswith(_CUTS) or name.endswith("_like")


def _sources(node: Node) -> Sequence[Node]:
    """Return the nodes whose values an op computes with."""
    if node.op in ("call_function", "call_method") and op_name(node.target) in _FORMED:
        return [n for n in node.args[:1] if isinstance(n, Node)]
    return node.all_input_nodes


def _leaf_requires_grad(root: nn.Module, node: Node) -> bool:
    value = operator.attrgetter(str(node.target))(root) if node.op == "get_attr" else value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _module_requires_grad(root: nn.Module, node: Node) -> bool:
    module = target_of(root, node) if node.op == "call_module" else None
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


def _is_float(node: Node) -> bool:
    """Whether a tensor that ``node`` yields, or one in its tuple, can have a gradient."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors(value_of(node)))
