"""What autograd keeps of a graph of plain ops, found by running each distinct call once, alone.

A call of an ATen op that writes nothing that autograd follows does the same wherever it stands: what it saves, and what
it yields, follow from its op, its constants, the layouts of the tensors that it is given, which of them are one tensor,
which require grad, and whether grad mode is on. So one call on fakes of its own answers for all that are alike::

    r = relu(x)      runs: yields its own storage, saves that one
    s = relu(r)      is like the first: yields a storage of its own, saves that one
    t = s.relu_()    gives the graph up: what requires grad is written

What it saves is known by where it lies: in the memory of an argument, or in a new one of the call. What no result keeps
is found by following results to their arguments, as autograd does.

Graphs with anything else in them are given up as a whole (`Unlike`), and run call by call as `splitkit.memory.autograd`
does: modules and methods, other ops than ATen's, autocast, symbolic sizes, ops that raise on fakes.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, one_tensor
from splitkit.memory.alone import (
    CONSTANTS,
    Alone,
    Layout,
    Unlike,
    dense_layout_of,
    fake,
    layout_of,
    leaves,
    mapped,
    tensors,
)
from splitkit.memory.kernels import shows_all


@dataclass(slots=True, eq=False)
class _Edge:
    """What keeps tensors for backward: a result that requires grad, and by it the results that it was computed from."""

    node: Node
    saved: tuple[int, ...]
    reads: tuple[_Edge, ...]


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor of the graph: one object wherever the run would have one tensor.

    Attributes:
        layout: the number of its layout.
        storage: the number of its storage; below 0 for parameters and buffers.
        edge: what it keeps, ``None`` if it does not require grad, or is the graph's own.
    """

    layout: int
    storage: int
    edge: _Edge | None = None


class _Made(NamedTuple):
    """A tensor among the results of a call.

    Attributes:
        same: the argument that it is; ``None`` for another tensor.
        layout: the number of its layout.
        place: where it lies: the argument whose storage it has, or ``~i`` for the new storage i.
        saved: the places of what it keeps for backward.
        reads: the arguments that backward reaches from it.
    """

    same: int | None
    layout: int
    place: int
    saved: tuple[int, ...]
    reads: tuple[int, ...]


class _Call(NamedTuple):
    """What a call does: its results as a tree of `_Made` and constants, and the bytes of its new storages."""

    result: Any
    nbytes: tuple[int, ...]


@dataclass
class Kept:
    """What a run with gradients makes and keeps; see `splitkit.memory.autograd.Activations`."""

    nbytes: list[int] = field(default_factory=list)
    values: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    saved: dict[Node, dict[int, None]] = field(default_factory=dict)
    requires: set[Node] = field(default_factory=set)
    estimated: dict[Node, str] = field(default_factory=dict)


class SavedCalls:
    """Follows a graph, and runs of its calls only those that are new to it; to be used inside of a fake mode.

    Attributes:
        kept: what was found.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.kept = Kept()
        self._gm = gm
        self._env: dict[Node, Any] = {}
        self._calls: dict[Hashable, _Call] = {}
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._owned: dict[int, _Value] = {}  # by id of the real parameter or buffer
        self._groups: dict[int, Any] = {}  # what was given for several inputs
        self._graded: set[int] = set()  # storages of which some tensor requires grad

    def run(self, *inputs: Any) -> Kept:
        """Follow the graph from fakes of its inputs, in the caller's grad mode.

        Raises:
            Unlike: if it is no graph of plain ops.
        """
        given = iter(inputs)
        for node in self._gm.graph.nodes:
            if node.op == "output":
                break
            if is_state_op(node):
                self._env[node] = self._set(node)
                continue
            if node.op == "placeholder":
                value = self._input(node, next(given))
            elif node.op == "get_attr":
                value = self._attribute(attribute(self._gm, str(node.target)))
            else:
                value = self._result(node)
            self._env[node] = value
            self._note(node, value)
        self._settle()
        return self.kept

    def _note(self, node: Node, value: Any) -> None:
        """Take down where a value lies."""
        if type(value) is _Value:  # as most are
            self.kept.values[node] = (value.storage,) if value.storage >= 0 else ()
            graded = self._layouts[value.layout].requires_grad
        else:
            found = leaves(value, _Value)
            self.kept.values[node] = tuple(dict.fromkeys(v.storage for v in found if v.storage >= 0))
            graded = any(self._layouts[v.layout].requires_grad for v in found)
        if graded:
            self.kept.requires.add(node)

    def _settle(self) -> None:
        """Take down what the graph gives back keeps, and what nobody reads: an interpreter holds both until the end."""
        last = self._gm.graph.output_node()
        ends = [*last.all_input_nodes, *(n for n in self._gm.graph.nodes if n is not last and not n.users)]
        todo = [v.edge for n in ends for v in leaves(self._env[n], _Value) if v.edge is not None]
        seen = {id(edge) for edge in todo}
        while todo:
            edge = todo.pop()
            self.kept.saved.setdefault(edge.node, {}).update(dict.fromkeys(edge.saved))
            fresh = [e for e in edge.reads if id(e) not in seen]
            seen.update(map(id, fresh))
            todo += fresh

    def _set(self, node: Node) -> Any:
        """Set the grad mode, or ask for it; go past regions where autocast is off, as it is outside of them too."""
        args = [self._env[a] if isinstance(a, Node) else a for a in node.args]
        if node.target in (_torch.SET_GRAD, torch.is_grad_enabled) and not node.kwargs:
            return node.target(*args)  # type: ignore[operator]
        if node.target is _torch.ENTER_AUTOCAST and len(args) > 2 and args[0] in ("cpu", "cuda") and args[2] is False:
            return None
        if node.target is _torch.EXIT_AUTOCAST:
            return None
        raise Unlike

    def _input(self, node: Node, fake: Any) -> Any:
        value = mapped(fake, self._new)
        group = one_tensor(node)
        return value if group is None else self._groups.setdefault(group, value)

    def _new(self, tensor: torch.Tensor) -> _Value:
        """An input of the graph."""
        layout = layout_of(tensor)
        self.kept.nbytes.append(layout.nbytes)
        return self._value(self._number(layout), len(self.kept.nbytes) - 1)

    def _attribute(self, tensor: Any) -> _Value:
        """A parameter, buffer or constant, the same each time; like it in a storage of its own."""
        if id(tensor) not in self._owned:
            layout = dense_layout_of(tensor)
            self._owned[id(tensor)] = self._value(self._number(layout), -1 - len(self._owned))
        return self._owned[id(tensor)]

    def _value(self, layout: int, storage: int) -> _Value:
        if self._layouts[layout].requires_grad:
            self._graded.add(storage)
        return _Value(layout, storage)

    def _number(self, layout: Layout) -> int:
        if layout not in self._numbers:
            self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return self._numbers[layout]

    def _result(self, node: Node) -> Any:
        """What a call yields; it runs if none before was like it."""
        if node.op != "call_function":
            raise Unlike
        if node.target is operator.getitem:
            return self._member(*node.args)
        if not isinstance(node.target, _torch.OpOverload) or node.target.namespace != "aten":
            raise Unlike
        given: dict[_Value, int] = {}
        which = node.target if shows_all(node.target) else node  # else what the graph says of its arguments counts
        key = (which, torch.is_grad_enabled(), self._print(node.args, given), self._print(node.kwargs, given))
        values = tuple(given)
        if _torch.schema_of(node.target).is_mutable and not self._graded.isdisjoint(v.storage for v in values):
            raise Unlike
        if key not in self._calls:
            self._calls[key] = self._watched(node, values)
        return self._like(self._calls[key], node, values)

    def _member(self, of: Any, which: Any) -> Any:
        """One of several results."""
        members = self._env[of] if isinstance(of, Node) else of
        if not isinstance(members, tuple | list) or not isinstance(which, int | slice):
            raise Unlike
        return members[which]

    def _print(self, tree: Any, given: dict[_Value, int]) -> Hashable:
        """What tells arguments from others; the tensors among them are put into ``given`` and numbered."""
        if isinstance(tree, Node):
            tree = self._env[tree]
        kind = type(tree)
        if kind is _Value:
            return given.setdefault(tree, len(given)), tree.layout, _Value
        if kind in CONSTANTS:
            return kind, repr(tree) if kind is float else tree  # 1, 1.0 and True are equal, but not the same argument
        if isinstance(tree, tuple | list):
            return (kind, *[self._print(leaf, given) for leaf in tree])
        if isinstance(tree, dict):
            return (kind, *tree, *[self._print(leaf, given) for leaf in tree.values()])
        raise Unlike

    def _like(self, call: _Call, node: Node, given: Sequence[_Value]) -> Any:
        """The results of a call, in storages of their own."""
        first = len(self.kept.nbytes)
        self.kept.nbytes += call.nbytes

        def number(place: int) -> int:
            return given[place].storage if place >= 0 else first + ~place

        def made(leaf: _Made) -> _Value:
            if leaf.same is not None:
                return given[leaf.same]
            value = self._value(leaf.layout, number(leaf.place))
            if self._layouts[leaf.layout].requires_grad:
                saved = tuple(s for s in map(number, leaf.saved) if s >= 0)
                value.edge = _Edge(node, saved, tuple(e for i in leaf.reads if (e := given[i].edge) is not None))
            return value

        return made(call.result) if type(call.result) is _Made else mapped(call.result, made, _Made)

    def _watched(self, node: Node, given: Sequence[_Value]) -> _Call:
        """Run a call alone, and again for each of several results that autograd tells apart."""
        try:
            return self._seen(node, given)
        except Unlike:
            raise
        except Exception as error:  # whatever the op raises on fakes
            raise Unlike from error

    def _seen(self, node: Node, given: Sequence[_Value]) -> _Call:
        layouts = [self._layouts[value.layout] for value in given]
        fakes = [fake(layout) for layout in layouts]
        alone = Alone(node, fakes, *self._arguments(node, dict(zip(given, fakes, strict=True))))
        result, saved = alone.run()
        graded = [t for t in tensors(result) if t.requires_grad]
        several = len({t.grad_fn for t in graded}) > 1
        alive = [kept() is not None for _, kept in saved]
        made: dict[int, _Made] = {}
        for i, tensor in enumerate(tensors(result)):
            keeps = (alone.kept_by(i) if several else alive) if tensor.requires_grad else ()
            places = tuple(place for (place, _), keep in zip(saved, keeps, strict=False) if keep)
            place, layout = alone.place(tensor, node), self._number(layout_of(tensor))
            made[id(tensor)] = _Made(alone.which(tensor), layout, place, places, alone.reached(tensor))
        if len(made) < len(tensors(result)) or [layout_of(fake) for fake in fakes] != layouts:
            raise Unlike  # one tensor twice, or an argument has another shape by now
        return _Call(mapped(result, lambda t: made[id(t)]), tuple(alone.nbytes))

    def _arguments(self, node: Node, fakes: Mapping[_Value, torch.Tensor]) -> tuple[Any, Any]:
        def given(leaf: Any) -> Any:
            return mapped(self._env[leaf], fakes.__getitem__, _Value) if isinstance(leaf, Node) else leaf

        return mapped(node.args, given, Node), mapped(node.kwargs, given, Node)
