"""The simulated run of graphs: which storages there are, which step makes each, and after which step nobody holds it.

It follows what Python does when the code of a graph module runs. A name lives until its last reader, a storage as long
as some name holds it::

    step              a    b    c       storages
    0  a = relu(x)    A                 x is the caller's, and is never given up here
    1  b = a.view(…)  A    A
    2  c = b * 2      A    A    C       A is freed after this step: `b` was its last holder
    3  return c                 C       C is held by whoever called

What follows from it: the members of a tuple that nobody claims live as long as the tuple; a result that nobody reads
is freed at once; what is given to a called graph (a part) is held by the caller until the call returns.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, plain_tensors
from splitkit.graph.fakecalls import bodies
from splitkit.graph.fakeruns import values_again
from splitkit.graph.scope import Scope, is_state_op, scopes
from splitkit.graph.sizes import require_values, storage_nbytes
from splitkit.graph.storages import attribute, one_tensor, shares_memory, storage_key, tensors
from splitkit.graph.symbols import bounds_in, value_of
from splitkit.memory.batched import batched
from splitkit.memory.kernels import Bytes, Gives, storages_of
from splitkit.memory.layouts import layouts
from splitkit.memory.options import known_bytes, refuse_sparse
from splitkit.memory.stored import BEFORE, HELD, Buffer
from splitkit.memory.temporaries import Temporaries

Value = Mapping[Hashable, int]
"""What a node yields: identity of a storage -> number of its buffer in this run."""


@dataclass
class _Casts:
    """The weights that the autocast region ``region`` has cast -> their buffers; ``last`` is its last step so far."""

    region: Node | None = None
    of: dict[Hashable, int] = field(default_factory=dict)
    last: int = BEFORE


@dataclass
class MemoryRun:
    """What happens when graphs run one after the other.

    Attributes:
        sizes: symbol -> size, for symbols whose size at capture is not the one that is asked for.
        block: the allocator hands out multiples of this many bytes.
        workspace: what is known of what a node takes besides its results, while it runs.
        steps: the nodes that compute, in the order in which they run.
        transient: for each step, the bytes that are there only while it runs.
        buffers: all storages.
        calls: name of a called graph -> its first step and the one after its last.
        gives: node -> what of its arguments' memory it gives back, where that was seen.
        beyond: node -> bytes of its results beyond what their values show, where that was seen.
        bounds: symbol -> the upper bound that it counts as, for those that only the data decides.
        from_above: branch or loop -> the most that its bodies take inside, whichever runs, and however often.
    """

    sizes: Mapping[str, int]
    block: int
    workspace: Callable[[Node], int]
    steps: list[Node] = field(default_factory=list)
    transient: list[int] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    calls: dict[str, range] = field(default_factory=dict)
    gives: dict[Node, Gives] = field(default_factory=dict)
    beyond: dict[Node, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    from_above: dict[Node, int] = field(default_factory=dict)
    _static: dict[Hashable, int] = field(default_factory=dict)
    _inputs: dict[int | None, Value] = field(default_factory=dict)
    _temporaries: Temporaries = field(init=False)
    _casts: _Casts = field(default_factory=_Casts)
    _items: dict[Node, list[Value]] = field(default_factory=dict)
    _again: dict[Node, Any] = field(default_factory=dict)
    _layouts: dict[Node, Any] = field(default_factory=dict)
    _batched: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._temporaries = Temporaries(self.sizes)

    def own(self, root: nn.Module) -> None:
        """Count all parameters and buffers of a module, whether the run reads them or not; tied ones once."""
        named = [(n, p, "parameter") for n, p in root.named_parameters()]
        for name, tensor, kind in [*named, *((n, b, "buffer") for n, b in root.named_buffers())]:
            self._attribute(name, tensor, kind)

    def input(self, node: Node, kind: str, keep: bool = True) -> Value:
        """A value from outside for a placeholder; its owner keeps it to the end, or gives it up to the run."""
        value: dict[Hashable, int] = {}
        group = one_tensor(node)
        if group in self._inputs:  # given a second time
            return self._named(node, self._inputs[group])
        for tensor in self._tensors(node):
            key = storage_key(tensor)  # two inputs may be views of one storage, or of a parameter
            if key not in self._static:
                dies = HELD if keep else BEFORE
                nbytes = storage_nbytes(tensor)
                self._static[key] = self._add(node.name, node, tensor.device, nbytes, kind, BEFORE, dies)
            value[key] = self._static[key]
        if group is not None:
            self._inputs[group] = value
        return value

    def graph(
        self, gm: fx.GraphModule, given: Callable[[Node], Value], autocast: tuple[Node, ...] = ()
    ) -> list[tuple[Node, Value]]:
        """Run the nodes of a graph.

        Args:
            gm: the graph.
            given: placeholder -> what is passed for it.
            autocast: the nodes that open the autocast regions around it.

        Returns:
            Each node in the output, once for each place that it has there, and the buffers that it holds.
        """
        require_values(gm.graph, but=lambda node: _calls_graph(gm, node) is not None)
        known = any(node in self._again for node in gm.graph.nodes)  # a part whose caller was run on fakes
        self._again |= {} if known or shares_memory(gm) else values_again(gm)
        if not known:
            inside = batched(gm)
            self._again |= inside.values
            self._batched |= inside.transient
        self._layouts |= layouts(gm, self.sizes)
        scope, _ = scopes(gm.graph)
        values: dict[Node, Value] = {}
        outputs: list[tuple[Node, Value]] = []
        unread: list[Value] = []
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = self._named(node, given(node))
                if not node.users:
                    unread.append(values[node])
            elif node.op == "get_attr":
                values[node] = self._read(gm, node)
            elif node.op == "output":
                leaves: list[Node] = []
                fx.map_arg(node.args, leaves.append)
                outputs = [(leaf, values[leaf]) for leaf in leaves if leaf in values]
            elif not is_state_op(node):
                read = {n: values[n] for n in node.all_input_nodes if n in values}
                values[node] = self._call(gm, node, read, (*autocast, *_autocast(scope[node])))
        for value in [*unread, *(value for _, value in outputs)]:
            self.hold(value, len(self.steps) - 1)
        self._drop_casts()
        return outputs

    def hold(self, value: Value, step: int) -> None:
        """Say that somebody holds ``value`` until ``step`` is done."""
        for number in value.values():
            buffer = self.buffers[number]
            buffer.dies = max(buffer.dies, step)

    def _call(self, gm: fx.GraphModule, node: Node, read: Mapping[Node, Value], autocast: tuple[Node, ...]) -> Value:
        part = _calls_graph(gm, node)
        if part is not None:
            value = self._enter(node, part, read)
        else:
            self.steps.append(node)
            hidden = self._hidden(gm, node, autocast)
            value = self._result(gm, node, read)
            self.transient.append(self._rounded(max(self.workspace(node), hidden)))
        for held in (*read.values(), value):
            self.hold(held, len(self.steps) - 1)
        return value

    def _result(self, gm: fx.GraphModule, node: Node, read: Mapping[Node, Value]) -> Value:
        """The storages of a result: those of the arguments that it shares, and new ones."""
        if node.target is operator.getitem and (items := self._items.get(cast(Node, node.args[0]))):
            return self._named(node, items[cast(int, node.args[1])])
        value, step, beyond = dict[Hashable, int](), len(self.steps) - 1, self.beyond.get(node, 0)
        for piece in storages_of(gm, node, list(self._tensors(node)), read, self.gives.get(node)):
            held = piece.held
            if held is None:
                held = self._add(node.name, node, piece.tensor.device, piece.nbytes + beyond, "activation", step, step)
                beyond = 0
            value[piece.key] = held
        return value

    def _enter(self, node: Node, part: fx.GraphModule, passed: Mapping[Node, Value]) -> Value:
        """Call another graph: its names are its own, its storages are the caller's."""
        start = len(self.steps)
        given = dict(zip(part.graph.find_nodes(op="placeholder"), node.args, strict=False))
        given |= {n: node.kwargs[str(n.target)] for n in given if str(n.target) in node.kwargs}

        def value_given(placeholder: Node) -> Value:
            source = given.get(placeholder)
            return passed[source] if isinstance(source, Node) else {}

        outputs = dict(self.graph(part, value_given))
        self.calls[str(node.target)] = range(start, len(self.steps))
        given_back = part.graph.output_node().args[0]
        if isinstance(given_back, tuple | list):
            self._items[node] = [outputs[leaf] if isinstance(leaf, Node) else {} for leaf in given_back]
        return {key: number for value in outputs.values() for key, number in value.items()}

    def _hidden(self, gm: fx.GraphModule, node: Node, autocast: tuple[Node, ...]) -> int:
        """What is there only while the node runs: inside a composite op, or in the bodies of a higher-order one."""
        if isinstance(node.target, HigherOrderOperator):
            inner = (node,) if node.target is torch.ops.higher_order.wrap_with_autocast else ()
            taken = max((self._inside(body, (*autocast, *inner)) for body in bodies(gm, node)), default=0)
            if str(node.target) in _FROM_ABOVE:
                self.from_above[node] = taken
            return taken
        if node in self._batched:
            return self._batched[node]
        inside = self._temporaries(gm, node, autocast, self._layouts)
        if autocast:
            self._keep_casts(gm, node, inside.casts, autocast[0])
        self.gives[node] = inside.gives
        if not isinstance(node.target, _torch.OpOverload):  # `storages_of` knows these
            self.beyond[node] = inside.beyond
        return inside.transient

    def _inside(self, body: fx.GraphModule, autocast: tuple[Node, ...]) -> int:
        """The most that a body of a higher-order op holds beyond what it takes and gives back."""
        inner = MemoryRun(self.sizes, self.block, self.workspace)
        for _, value in inner.graph(body, lambda n: inner.input(n, "input"), autocast):
            inner.hold(value, HELD)
        self.bounds |= inner.bounds
        kept = sum(b.nbytes for b in inner.buffers if b.born != BEFORE and b.dies == HELD)
        before = sum(b.nbytes for b in inner.buffers if b.born == BEFORE)
        return max(0, max(inner.timeline(), default=0) - before - kept)

    def _keep_casts(self, gm: fx.GraphModule, node: Node, nbytes: int, region: Node) -> None:
        """Autocast casts a weight once, and keeps the result until its outermost region ends."""
        step = len(self.steps) - 1
        if self._casts.region is not region:
            self._drop_casts()
            self._casts.region = region
        self._casts.last = step
        weights = [attribute(gm, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
        wanted = {storage_key(w): w for w in weights if isinstance(w, nn.Parameter)}
        if nbytes and not wanted.keys() <= self._casts.of.keys():
            device = next(iter(wanted.values())).device
            self.buffers.append(Buffer(self._rounded(nbytes), "cast", node.name, node, device, step, step))
            self._casts.of |= dict.fromkeys(wanted, len(self.buffers) - 1)

    def _drop_casts(self) -> None:
        self.hold(self._casts.of, self._casts.last)
        self._casts = _Casts()

    def timeline(self) -> list[int]:
        """Bytes that are there while each step runs, its results and transients included."""
        change = [0] * (len(self.steps) + 2)
        for buffer in self.buffers:
            change[max(buffer.born, 0)] += buffer.nbytes
            change[min(buffer.dies, len(self.steps)) + 1] -= buffer.nbytes
        live, total = [], 0
        for step, transient in enumerate(self.transient):
            total += change[step]
            live.append(total + transient)
        return live

    def _read(self, gm: fx.GraphModule, node: Node) -> Value:
        tensor = attribute(gm, str(node.target))
        if not isinstance(tensor, torch.Tensor):
            return {}
        number = self._attribute(str(node.target), tensor, "constant")
        return {storage_key(tensor): number} | {storage_key(t): number for t in self._tensors(node)}

    def _named(self, node: Node, passed: Value) -> Value:
        """What is passed, under the identities that the placeholder's own value knows it by."""
        known = list(dict.fromkeys(map(storage_key, self._tensors(node))))
        numbers = list(dict.fromkeys(passed.values()))
        return {**passed, **dict(zip(known, numbers, strict=True))} if len(known) == len(numbers) else passed

    def _tensors(self, node: Node) -> Iterator[torch.Tensor]:
        """The tensors that hold the memory of a value: what subclasses wrap, not these themselves."""
        for tensor in tensors(self._again[node] if node in self._again else value_of(node)):
            refuse_sparse(node, tensor)
            yield from plain_tensors(tensor)

    def _attribute(self, name: str, tensor: torch.Tensor, kind: str) -> int:
        key = storage_key(tensor)
        if key not in self._static:
            parts = [
                self._add(name, None, part.device, storage_nbytes(part), kind, BEFORE, HELD)
                for part in plain_tensors(tensor)
            ]
            self._static[key] = parts[0]
        return self._static[key]

    def _add(
        self, name: str, node: Node | None, device: torch.device, nbytes: Bytes, kind: str, born: int, dies: int
    ) -> int:
        self.bounds |= bounds_in(nbytes, self.sizes)
        rounded = self._rounded(known_bytes(name, nbytes, self.sizes))
        self.buffers.append(Buffer(rounded, kind, name, node, device, born, dies))
        return len(self.buffers) - 1

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.block) * self.block


_FROM_ABOVE = frozenset(("cond", "while_loop", "scan", "map_impl", "associative_scan"))


def _autocast(scope: Scope) -> tuple[Node, ...]:
    """The enter nodes of the autocast regions of a scope, outermost first."""
    return tuple(enter for enter in scope.regions if enter.target is _torch.ENTER_AUTOCAST)


def _calls_graph(gm: fx.GraphModule, node: Node) -> fx.GraphModule | None:
    """The graph that ``node`` calls, such as a part of a split."""
    target = attribute(gm, str(node.target)) if node.op == "call_module" else None
    return target if isinstance(target, fx.GraphModule) else None
