"""What eager autograd saves for a graph of plain ops, found by running each distinct call once, in isolation.

The result of an ATen call that writes nothing autograd tracks does not depend on where the call stands: what it saves
and what it yields follow from its op, its constants, the layouts of its tensor arguments, which of them are one tensor,
which require grad, and whether grad mode is on. So one call on fake tensors of its own answers for all equal calls, and
a model with many equal layers runs the calls of one::

    r = relu(x)      runs: yields a new storage, saves that storage
    s = relu(r)      equals the first call: yields a new storage, saves that storage
    t = s.relu_()    the graph is refused: it writes to a tensor that requires grad

A saved tensor is known by where it lies: in the memory of an argument, or in a new storage of the call. What no output
of the graph depends on is not kept; it is found by following results to their arguments, as autograd's graph does.

A graph with anything else is refused as a whole (`NotIsolableError`), and `splitkit.memory.autograd.saved_storages`
then runs all of it: modules and methods, ops from outside ATen, autocast, symbolic sizes, ops that raise on fakes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensor
from splitkit.graph.byte_sizes import storage_nbytes
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, repeated_group, storage_key
from splitkit.memory.kernels.kernel_results import hinted_bytes, shows_all

T = TypeVar("T")


class NotIsolableError(Exception):
    """A graph has an effect that an isolated call does not show."""


class Layout(NamedTuple):
    """Everything that an op can see of a tensor except its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    requires_grad: bool


class _SavedMarker:
    """Replaces a saved tensor in autograd's graph, and lives as long as that graph keeps the tensor."""

    __slots__ = ("__weakref__",)


class IsolatedCall:
    """A call on fake tensors of its own.

    Attributes:
        nbytes: bytes of the storages that it makes, if they are saved or yielded.
    """

    def __init__(self, node: Node, fakes: Sequence[torch.Tensor], args: Any, kwargs: Any) -> None:
        self.nbytes: list[int] = []
        self._node, self._fakes, self._args, self._kwargs = node, fakes, args, kwargs
        self._places: dict[Hashable, int] = {storage_key(fake): i for i, fake in enumerate(fakes)}

    def run(self) -> tuple[Any, list[tuple[int, weakref.ref[_SavedMarker]]]]:
        """Return the results, and for each saved tensor its place and a reference that dies when it is released."""
        return self._run(self.place)

    def _run(self, place: Callable[[torch.Tensor], int]) -> tuple[Any, list[tuple[int, weakref.ref[_SavedMarker]]]]:
        saved: list[tuple[int, weakref.ref[_SavedMarker]]] = []

        def pack(tensor: torch.Tensor) -> _SavedMarker:
            kept = _SavedMarker()
            saved.append((place(tensor), weakref.ref(kept)))
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, _never):
            return self._node.target(*self._args, **self._kwargs), saved  # type: ignore[operator]

    def kept_by(self, which: int) -> list[bool]:
        """Return for each saved tensor whether the result tensor ``which`` alone keeps it alive.

        The call runs again and all other results are dropped: what survives is kept by this one.
        """
        result, saved = self._run(lambda tensor: 0)
        tensor = tensor_leaves(result)[which]
        del result
        alive = [kept() is not None for _, kept in saved]
        del tensor
        return alive

    def place(self, tensor: torch.Tensor, made_by: Node | None = None) -> int:
        """Return the index of the argument whose storage a tensor lies in, ``~i`` for the i-th new storage."""
        key = storage_key(tensor)
        if key not in self._places:
            shown = layout_of(tensor).nbytes
            self._places[key] = ~len(self.nbytes)
            self.nbytes.append(shown if made_by is None else max(shown, hinted_bytes(made_by, tensor)))
        return self._places[key]

    def which(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the argument that is this tensor, or ``None``."""
        return next((i for i, fake in enumerate(self._fakes) if fake is tensor), None)

    def reached(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the arguments that backward reaches from a tensor."""
        todo: list[Any] = [tensor.grad_fn] if tensor.grad_fn is not None else []
        seen, found = set(todo), set[int]()
        while todo:
            step = todo.pop()
            if getattr(step, "__dict__", None):
                raise NotIsolableError  # a Python autograd.Function, which may keep tensors as attributes
            if (leaf := getattr(step, "variable", None)) is not None:
                found.update(i for i, fake in enumerate(self._fakes) if fake is leaf)
            fresh = {after for after, _ in step.next_functions if after is not None} - seen
            seen |= fresh
            todo += fresh
        return tuple(sorted(found))


def _never(kept: _SavedMarker) -> torch.Tensor:
    raise NotImplementedError("a call reads in forward what it has saved for backward")


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))
CONSTANTS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def map_leaves(tree: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Return a tree with ``change`` applied to its leaves of one kind.

    Raises:
        NotIsolableError: if another leaf is not a constant.
    """
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, tuple | list):
        found = [map_leaves(leaf, change, kind) for leaf in tree]
        return tuple(found) if isinstance(tree, tuple) else found
    if isinstance(tree, dict):
        return {key: map_leaves(leaf, change, kind) for key, leaf in tree.items()}
    if type(tree) not in CONSTANTS:
        raise NotIsolableError
    return tree


def leaves_of(tree: Any, kind: type[T]) -> list[T]:
    """Return the leaves of one kind, in order."""
    if isinstance(tree, kind):
        return [tree]
    inside = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [leaf for member in inside for leaf in leaves_of(member, kind)]


def tensor_leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree, in order."""
    return leaves_of(tree, torch.Tensor)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a fake tensor."""
    if type(tensor) is not FakeTensor or tensor.is_conj() or tensor.is_neg():
        raise NotIsolableError
    return _layout(tensor, tensor.storage_offset(), storage_nbytes(tensor))


def dense_layout_of(tensor: Any) -> Layout:
    """Return the layout of a copy of a tensor with the same strides, in a storage that starts with it."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        raise NotIsolableError
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return _layout(tensor, 0, (steps + 1) * tensor.element_size() if tensor.numel() else 0)


def _layout(tensor: torch.Tensor, offset: int | torch.SymInt, nbytes: int | torch.SymInt) -> Layout:
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if tensor.layout is not torch.strided or not all(isinstance(n, int) for n in (*shape, *stride, offset, nbytes)):
        raise NotIsolableError
    return Layout(shape, stride, int(offset), tensor.dtype, tensor.device, int(nbytes), tensor.requires_grad)


def fake_tensor(layout: Layout) -> torch.Tensor:
    """Return a fake tensor with this layout in a storage of its own."""
    made = torch.empty(layout.nbytes // layout.dtype.itemsize, dtype=layout.dtype, device=layout.device)
    placed = made.as_strided(layout.shape, layout.stride, layout.offset).detach()
    if layout_of(placed.requires_grad_(layout.requires_grad)) != layout:
        raise NotIsolableError
    return placed


@dataclass(slots=True, eq=False)
class _Edge:
    """A result that requires grad: the storages it keeps for backward, and the results it was computed from."""

    node: Node
    saved: tuple[int, ...]
    reads: tuple[_Edge, ...]


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor of the graph; nodes that would yield the same tensor object share one.

    Attributes:
        layout: the number of its layout.
        storage: the number of its storage; negative for parameters and buffers.
        edge: what it keeps for backward; ``None`` for inputs, parameters and values that do not require grad.
    """

    layout: int
    storage: int
    edge: _Edge | None = None


class _Result(NamedTuple):
    """A tensor among the results of a call.

    Attributes:
        same: index of the argument that it is; ``None`` for a new tensor.
        layout: the number of its layout.
        place: index of the argument whose storage it lies in, or ``~i`` for the i-th new storage.
        saved: the places of the tensors that it keeps for backward.
        reads: indices of the arguments that backward reaches from it.
    """

    same: int | None
    layout: int
    place: int
    saved: tuple[int, ...]
    reads: tuple[int, ...]


class _Call(NamedTuple):
    """The outcome of a call: its results as a tree of `_Result` and constants, and the bytes of its new storages."""

    result: Any
    nbytes: tuple[int, ...]


@dataclass
class ActivationRecord:
    """The activations recorded so far; see `splitkit.memory.autograd.saved_storages.Activations`."""

    nbytes: list[int] = field(default_factory=list)
    values: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    saved: dict[Node, dict[int, None]] = field(default_factory=dict)
    requires: set[Node] = field(default_factory=set)
    estimated: dict[Node, str] = field(default_factory=dict)


class SavedCalls:
    """Interprets a graph and runs only calls that it has not run before; to be used inside a fake mode.

    Attributes:
        record: what the graph saves.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        self.record = ActivationRecord()
        self._gm = gm
        self._env: dict[Node, Any] = {}
        self._calls: dict[Hashable, _Call] = {}
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._owned: dict[int, _Value] = {}  # by id of the real parameter or buffer
        self._groups: dict[int, Any] = {}  # one tensor that was passed for several inputs
        self._graded: set[int] = set()  # storages with a tensor that requires grad

    def run(self, *inputs: Any) -> ActivationRecord:
        """Interpret the graph on fake inputs, in the caller's grad mode.

        Raises:
            NotIsolableError: if the graph has anything but plain ops.
        """
        given = iter(inputs)
        for node in self._gm.graph.nodes:
            if node.op == "output":
                break
            if is_state_op(node):
                self._env[node] = self._run_state_op(node)
                continue
            if node.op == "placeholder":
                value = self._input(node, next(given))
            elif node.op == "get_attr":
                value = self._attribute(attribute(self._gm, str(node.target)))
            else:
                value = self._result(node)
            self._env[node] = value
            self._record_value(node, value)
        self._collect_saved()
        return self.record

    def _record_value(self, node: Node, value: Any) -> None:
        """Record where a value lies, and whether it requires grad."""
        if type(value) is _Value:  # the common case
            self.record.values[node] = (value.storage,) if value.storage >= 0 else ()
            graded = self._layouts[value.layout].requires_grad
        else:
            found = leaves_of(value, _Value)
            self.record.values[node] = tuple(dict.fromkeys(v.storage for v in found if v.storage >= 0))
            graded = any(self._layouts[v.layout].requires_grad for v in found)
        if graded:
            self.record.requires.add(node)

    def _collect_saved(self) -> None:
        """Record what the outputs keep, and values that nobody reads, which an interpreter holds to the end too."""
        last = self._gm.graph.output_node()
        ends = [*last.all_input_nodes, *(n for n in self._gm.graph.nodes if n is not last and not n.users)]
        todo = [v.edge for n in ends for v in leaves_of(self._env[n], _Value) if v.edge is not None]
        seen = {id(edge) for edge in todo}
        while todo:
            edge = todo.pop()
            self.record.saved.setdefault(edge.node, {}).update(dict.fromkeys(edge.saved))
            fresh = [e for e in edge.reads if id(e) not in seen]
            seen.update(map(id, fresh))
            todo += fresh

    def _run_state_op(self, node: Node) -> Any:
        """Set or return the grad mode; ignore regions that switch autocast off, since it is off outside of them too."""
        args = [self._env[a] if isinstance(a, Node) else a for a in node.args]
        if node.target in (_torch.SET_GRAD, torch.is_grad_enabled) and not node.kwargs:
            return node.target(*args)  # type: ignore[operator]
        if node.target is _torch.ENTER_AUTOCAST and len(args) > 2 and args[0] in ("cpu", "cuda") and args[2] is False:
            return None
        if node.target is _torch.EXIT_AUTOCAST:
            return None
        raise NotIsolableError

    def _input(self, node: Node, fake: Any) -> Any:
        value = map_leaves(fake, self._new)
        group = repeated_group(node)
        return value if group is None else self._groups.setdefault(group, value)

    def _new(self, tensor: torch.Tensor) -> _Value:
        """Record an input of the graph."""
        layout = layout_of(tensor)
        self.record.nbytes.append(layout.nbytes)
        return self._value(self._number(layout), len(self.record.nbytes) - 1)

    def _attribute(self, tensor: Any) -> _Value:
        """Return the value of a parameter, buffer or constant, the same each time."""
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
        """Return the results of a call; run it only if no earlier call was equal."""
        if node.op != "call_function":
            raise NotIsolableError
        if node.target is operator.getitem:
            return self._member(*node.args)
        if not isinstance(node.target, _torch.OpOverload) or node.target.namespace != "aten":
            raise NotIsolableError
        given: dict[_Value, int] = {}
        which = node.target if shows_all(node.target) else node  # the table of these ops reads the node's own arguments
        key = (
            which,
            torch.is_grad_enabled(),
            self._fingerprint(node.args, given),
            self._fingerprint(node.kwargs, given),
        )
        values = tuple(given)
        if _torch.schema_of(node.target).is_mutable and not self._graded.isdisjoint(v.storage for v in values):
            raise NotIsolableError
        if key not in self._calls:
            self._calls[key] = self._isolated(node, values)
        return self._results_of(self._calls[key], node, values)

    def _member(self, of: Any, which: Any) -> Any:
        """Return a member of a tuple or list."""
        members = self._env[of] if isinstance(of, Node) else of
        if not isinstance(members, tuple | list) or not isinstance(which, int | slice):
            raise NotIsolableError
        return members[which]

    def _fingerprint(self, tree: Any, given: dict[_Value, int]) -> Hashable:
        """Return a key of the arguments in ``tree``, and number the tensors among them in ``given``."""
        if isinstance(tree, Node):
            tree = self._env[tree]
        kind = type(tree)
        if kind is _Value:
            return given.setdefault(tree, len(given)), tree.layout, _Value
        if kind in CONSTANTS:
            return kind, repr(tree) if kind is float else tree  # 1, 1.0 and True are equal, but different arguments
        if isinstance(tree, tuple | list):
            return (kind, *[self._fingerprint(leaf, given) for leaf in tree])
        if isinstance(tree, dict):
            return (kind, *tree, *[self._fingerprint(leaf, given) for leaf in tree.values()])
        raise NotIsolableError

    def _results_of(self, call: _Call, node: Node, given: Sequence[_Value]) -> Any:
        """Return the results of a call like ``call``, with new storages numbered anew."""
        first = len(self.record.nbytes)
        self.record.nbytes += call.nbytes

        def number(place: int) -> int:
            return given[place].storage if place >= 0 else first + ~place

        def made(leaf: _Result) -> _Value:
            if leaf.same is not None:
                return given[leaf.same]
            value = self._value(leaf.layout, number(leaf.place))
            if self._layouts[leaf.layout].requires_grad:
                saved = tuple(s for s in map(number, leaf.saved) if s >= 0)
                value.edge = _Edge(node, saved, tuple(e for i in leaf.reads if (e := given[i].edge) is not None))
            return value

        return made(call.result) if type(call.result) is _Result else map_leaves(call.result, made, _Result)

    def _isolated(self, node: Node, given: Sequence[_Value]) -> _Call:
        """Run a call in isolation; refuse the graph if it raises."""
        try:
            return self._run_isolated(node, given)
        except NotIsolableError:
            raise
        except Exception as error:  # whatever the op raises on fakes
            raise NotIsolableError from error

    def _run_isolated(self, node: Node, given: Sequence[_Value]) -> _Call:
        layouts = [self._layouts[value.layout] for value in given]
        fakes = [fake_tensor(layout) for layout in layouts]
        call = IsolatedCall(node, fakes, *self._arguments(node, dict(zip(given, fakes, strict=True))))
        result, saved = call.run()
        graded = [t for t in tensor_leaves(result) if t.requires_grad]
        several = len({t.grad_fn for t in graded}) > 1
        alive = [kept() is not None for _, kept in saved]
        made: dict[int, _Result] = {}
        for i, tensor in enumerate(tensor_leaves(result)):
            keeps = (call.kept_by(i) if several else alive) if tensor.requires_grad else ()
            places = tuple(place for (place, _), keep in zip(saved, keeps, strict=False) if keep)
            place, layout = call.place(tensor, node), self._number(layout_of(tensor))
            made[id(tensor)] = _Result(call.which(tensor), layout, place, places, call.reached(tensor))
        if len(made) < len(tensor_leaves(result)) or [layout_of(fake) for fake in fakes] != layouts:
            raise NotIsolableError  # one tensor is yielded twice, or the call has changed an argument's shape
        return _Call(map_leaves(result, lambda t: made[id(t)]), tuple(call.nbytes))

    def _arguments(self, node: Node, fakes: Mapping[_Value, torch.Tensor]) -> tuple[Any, Any]:
        def given(leaf: Any) -> Any:
            return map_leaves(self._env[leaf], fakes.__getitem__, _Value) if isinstance(leaf, Node) else leaf

        return map_leaves(node.args, given, Node), map_leaves(node.kwargs, given, Node)
