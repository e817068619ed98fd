"""Compute a graph's canonical form, equal for graphs that differ only in names and in the order of independent nodes.

A model that loops over a set may make the same nodes in another order in another process, and fx numbers names in the
order of the nodes. Neither changes what a node computes, or who reads it::

    process 1:  cos = cos(slow)   cos_1 = cos(fast)   out = f(cos, cos_1)      slow < fast < cos(slow) < cos(fast) < out
    process 2:  cos = cos(fast)   cos_1 = cos(slow)   out = f(cos_1, cos)      the same

The nodes are numbered by a depth-first walk from the output along the arguments, which does not depend on the order of
the graph. Nodes that the output does not need (a write, a print) follow, sorted by what they do. Order edges
(`Dataflow.after`) are part of the form: nodes that write the same memory or draw random numbers keep their order. So a
plan that is valid for one graph is valid for each graph of the same form, and the order of either is valid for both.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import target_name
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.graph.node_values import hint
from splitkit.graph.scope import Scope, is_state_op
from splitkit.graph.storages import attribute, value_of
from splitkit.short_repr import brief

# The names that tracers give to constants and to bodies of control flow, numbered in graph order: 2.11, 2.13, 2.15.
_NUMBERED = re.compile(r"^_?(?:(?:lifted_)?(?:tensor|param|fx_const|torchbind_obj)\w*?|\w*_graph)_?\d+$")


@dataclass(frozen=True)
class CanonicalForm:
    """The canonical form of a graph. Constants and sizes are not part of it.

    Attributes:
        nodes: all nodes except state ops (enter, exit, set), in canonical order: inputs before their readers.
        lines: for each node a text of its op, its target, the numbers of its inputs and of the nodes that it waits for,
            and the ambient state that it runs under.
    """

    nodes: tuple[Node, ...]
    lines: tuple[str, ...]

    __repr__ = brief

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """A short hash of each line."""
        return tuple(_digest(line)[:8] for line in self.lines)

    @cached_property
    def digest(self) -> str:
        """A hash of the form."""
        return _digest("\n".join(self.lines))

    def first_difference(self, digests: Sequence[str]) -> int | None:
        """Return the number of the first node that differs from a form with these digests; ``None`` if none does."""
        if self.digests == tuple(digests):
            return None
        pairs = zip(self.digests, digests, strict=False)
        return next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(self.nodes), len(digests)))


def canonical_form(gm: fx.GraphModule | Dataflow) -> CanonicalForm:
    """Return the canonical form of a graph, in time linear in its nodes and edges.

    Raises:
        GraphError: as `splitkit.analyze`.
    """
    flow = gm if isinstance(gm, Dataflow) else analyze(gm)
    walk = _Walk(flow, {node: _call_of(node, flow.root) for node in flow.scope})
    for node in flow.graph.find_nodes(op="output"):
        walk.visit(node)
    for node in _rest(walk):
        walk.visit(node)
    return CanonicalForm(tuple(walk.number), tuple(walk.line(node) for node in walk.number))


def value_text(node: Node) -> str:
    """Return a text of a node's value with its sizes at capture, such as ``float32[2, 16]``; empty if unknown."""
    return _value_text(value_of(node))


def _value_text(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{[hint(size) for size in value.shape]}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value_text, value))})"
    return "" if value is None else type(value).__name__


@dataclass(frozen=True)
class _Call:
    """What a node calls, without the names of its arguments.

    Attributes:
        text: op, target and the structure of the arguments, with ``%`` for a node and ``_`` for a constant.
        inputs: the nodes among the arguments, repeated where they occur several times.
    """

    text: str
    inputs: tuple[Node, ...]


@dataclass
class _Walk:
    """Numbers nodes, inputs before their readers."""

    flow: Dataflow
    calls: Mapping[Node, _Call]
    number: dict[Node, int] = field(default_factory=dict)

    def visit(self, last: Node) -> None:
        """Number all nodes that ``last`` depends on, then ``last``."""
        left = [(last, iter(self.calls[last].inputs))]
        while left:
            node, inputs = left[-1]
            found = next((n for n in inputs if n not in self.number), None)
            if found is None:
                left.pop()
                self.number.setdefault(node, len(self.number))
            else:
                left.append((found, iter(self.calls[found].inputs)))

    def line(self, node: Node) -> str:
        """Return the line of a numbered node."""
        inputs = " ".join(str(self.number[n]) for n in self.calls[node].inputs)
        return self._line(node, inputs, sorted(self.number[n] for n in self._waits(node)))

    def keys(self, nodes: Iterable[Node]) -> dict[Node, str]:
        """Return a digest of what each of these nodes does; they have no number yet and are in graph order."""
        found: dict[Node, str] = {}
        for node in nodes:
            inputs, waits = (
                [found.get(n) or str(self.number.get(n)) for n in some]
                for some in (self.calls[node].inputs, self._waits(node))
            )
            found[node] = _digest(self._line(node, " ".join(inputs), sorted(waits)))
        return found

    def _line(self, node: Node, inputs: str, waits: Sequence[object]) -> str:
        after = f" after {' '.join(map(str, waits))}" if waits else ""
        return f"{self.calls[node].text} {inputs}{after}{_scope_text(self.flow.scope[node])}"

    def _waits(self, node: Node) -> tuple[Node, ...]:
        return self.flow.after.get(node, ())


def _rest(walk: _Walk) -> list[Node]:
    """Return the unnumbered nodes that no unnumbered node reads, sorted by what they do; equal ones in graph order."""
    left = [node for node in walk.calls if node not in walk.number]
    read = {n for node in left for n in walk.calls[node].inputs}
    keys = walk.keys(left)
    return sorted((node for node in left if node not in read), key=keys.__getitem__)


def _call_of(node: Node, root: fx.GraphModule) -> _Call:
    inputs: list[Node] = []
    args = [_form(value, inputs) for value in node.args]
    args += [f"{name}={_form(value, inputs)}" for name, value in sorted(node.kwargs.items())]
    if node.target is getitem:
        args.append(str(node.args[1]) if isinstance(node.args[1], int | str) else "")
    return _Call(f"{node.op} {_target(node, root)}({', '.join(args)})", tuple(inputs))


def _form(value: Any, inputs: list[Node]) -> str:
    """Return the structure of an argument, and add its nodes to ``inputs``; an argument without nodes is a constant."""
    if isinstance(value, Node):
        if is_state_op(value):
            return "_"
        inputs.append(value)
        return "%"
    before = len(inputs)
    if isinstance(value, tuple | list):
        text = f"({', '.join([_form(item, inputs) for item in value])})"
    elif isinstance(value, dict):
        text = f"{{{', '.join([f'{key}: {_form(item, inputs)}' for key, item in value.items()])}}}"
    elif isinstance(value, slice):
        text = f"[{':'.join([_form(item, inputs) for item in (value.start, value.stop, value.step)])}]"
    else:
        return "_"
    return text if len(inputs) > before else "_"


def _target(node: Node, root: fx.GraphModule) -> str:
    """Return a text of what a node calls or names, without the numbers that a tracer gave to constants."""
    name = target_name(node)
    if node.op != "get_attr":
        return name
    value = attribute(root, str(node.target))
    if isinstance(value, fx.GraphModule):
        return f"graph {canonical_form(value).digest}"
    return "constant" if is_numbered(name) else name


def is_numbered(name: str) -> bool:
    """Whether a tracer chose the name of an attribute and numbered it."""
    return _NUMBERED.match(name.rpartition(".")[2]) is not None


def _scope_text(scope: Scope) -> str:
    settings = [f"{name}={_constant_text(value)}" for name, value in scope.settings]
    return "".join(f" in {text}" for text in (*map(settings_text, scope.regions), *settings))


def settings_text(node: Node) -> str:
    """Return a text of a state op without names of nodes, such as ``set_grad_enabled(False)``."""
    given = [*node.args, *(value for _, value in sorted(node.kwargs.items()))]
    return f"{target_name(node)}({', '.join(map(_constant_text, given))})"


def _constant_text(value: object) -> str:
    """Return a text of a constant that is the same in every process."""
    if isinstance(value, Node):
        return str(value.target) if value.op == "get_attr" else "%"
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
