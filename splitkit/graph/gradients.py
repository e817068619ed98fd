"""Which nodes take part in backward, as far as a forward graph tells.

Values of captured graphs do not say that they require grad, so it is followed from the parameters: through
floating-point results and memory that is written, not through ``detach`` or where gradients are switched off; and
back from the outputs, for nobody asks for the gradient of what reaches none::

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
from splitkit.graph.fakecalls import name_of, target_of
from splitkit.graph.storages import tensors
from splitkit.graph.symbols import value_of

_CUTS = ("detach", "new_", "bernoulli", "lift_fresh")
"""How ops begin of which results have no history, whatever the arguments require; others end in ``_like``."""
_FORMED = ("type_as", "expand_as", "view_as", "reshape_as", "to")
"""Ops that take only a shape, dtype or device of tensors behind the first."""


class Gradients:
    """What requires grad in a forward graph, when each node runs.

    Attributes:
        reads: node -> those of its inputs that require grad then.
        needed: nodes that have a part in backward: a result requires grad, and an output depends on it.
    """

    def __init__(self, flow: Dataflow) -> None:
        self.reads: dict[Node, frozenset[Node]] = {}
        self.needed: set[Node] = set()
        self._flow = flow
        self._memory: dict[Node, Hashable] = {}  # node -> the node whose memory its value lies in
        self._live: set[Hashable] = set()  # memory that has a history
        for node in flow.index:
            self._visit(flow.root, node)
        self.needed &= self._wanted(flow.graph)

    @cached_property
    def carriers(self) -> Set[Node]:
        """Nodes whose values take a gradient: those in `needed`, and those whose memory one of these writes later.

        A table that is made empty and then filled has no history when it is made, but when it is read.
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
        """What an output that requires grad depends on, through results and through memory written before."""
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
        name = name_of(node.target)
        return name.startswith(_CUTS) or name.endswith("_like")


def _sources(node: Node) -> Sequence[Node]:
    """The nodes whose values an op computes with."""
    if node.op in ("call_function", "call_method") and name_of(node.target) in _FORMED:
        return [n for n in node.args[:1] if isinstance(n, Node)]
    return node.all_input_nodes


def _leaf_requires_grad(root: nn.Module, node: Node) -> bool:
    value = operator.attrgetter(str(node.target))(root) if node.op == "get_attr" else value_of(node)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _module_requires_grad(root: nn.Module, node: Node) -> bool:
    module = target_of(root, node) if node.op == "call_module" else None
    return isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())


def _is_float(node: Node) -> bool:
    """Whether a tensor that ``node`` yields can have a gradient: of a tuple, one that does."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors(value_of(node)))
