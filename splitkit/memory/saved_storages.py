"""What eager autograd saves of a forward graph for backward, node by node, found on fake tensors.

The graph runs once, with its parameters requiring grad as in the model, and with `saved_tensors_hooks` around it.
Nothing real is computed. What a run saves does not depend on where the graph is split, so one run serves all plans::

    node        value   autograd saves             storages
    linear      B       x                          x: the input's; the weight is a parameter and does not count
    dropout     D       its mask                   M: made inside the op, the value of no node
    relu        R       R                          R

For a node that cannot run on fake tensors (a custom op without a fake, a data-dependent size), or that calls graphs of
its own, everything that it reads, makes and computes in these graphs counts as saved, and `Activations.estimated` names
it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._gc import paused_collector
from splitkit._torch import plain_tensors, pytree
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.node_values import (
    NO_SIZES,
    CallMemo,
    StandIn,
    body_calls,
    body_graphs,
    changes_state,
    hint,
    hints,
    require_values,
    stand_in,
    storage_bytes,
    target_of,
    tensor_bytes,
    value_bytes,
)
from splitkit.graph.scope import Scope, is_state_op, scopes
from splitkit.graph.storages import repeated_group, storage_key, tensors, value_of
from splitkit.memory.kernels.kernel_results import as_seen, bytes_made
from splitkit.memory.kernels.target_kernels import TargetKernels, inexact, own_kernels
from splitkit.memory.measurement import measure_memory


@dataclass(frozen=True)
class Activations:
    """What a run with gradients makes and saves. Storages are numbered, without those of parameters and buffers.

    Attributes:
        nbytes: bytes of each storage, with symbolic sizes as seen at capture.
        values: node -> the storages that its value lies in, for inputs of the graph too.
        saved: node -> the storages that autograd keeps for the node's backward, each once; nodes that save nothing are
            left out. Nothing is kept for results that no output of the graph depends on.
        requires: the nodes whose value has a tensor that requires grad.
        inside: node -> the temporary memory of its forward and backward, besides what is saved and yielded.
        estimated: node -> the reason why the bytes that it saves are an upper bound.
        kernels: the kernels that ran; ``None`` if torch chose by the device of the tensors.
    """

    nbytes: tuple[int, ...]
    values: Mapping[Node, tuple[int, ...]]
    saved: Mapping[Node, tuple[int, ...]]
    requires: frozenset[Node]
    inside: Mapping[Node, BackwardBytes]
    estimated: Mapping[Node, str]
    kernels: str | None = None

    @property
    def saved_bytes(self) -> int:
        """The bytes of everything that autograd saves, each storage once."""
        return sum(self.nbytes[s] for s in {s for storages in self.saved.values() for s in storages})


def activations(gm: fx.GraphModule | Dataflow, kernels: str | None = None) -> Activations:
    """Return what eager autograd saves for backward, node by node, from one run on fake tensors.

    Regions of autocast and ``no_grad`` in the graph apply. Saved integers and masks count too.

    Args:
        gm: a forward graph with ``meta["val"]``, as `splitkit.capture` makes it, or facts about it.
        kernels: `splitkit.costs.Device.kernels` of the device that runs the graph. By default those of the device of
            its tensors; for ``meta``, of the CPU.

    Raises:
        GraphError: SK101 if it is not a graph, SK102 if nodes have no ``meta["val"]``.
    """
    kept, root = activations_alone(gm, kernels), root_of(gm)
    probes = BackwardTemporaries(root, kept.requires)
    with TargetKernels(kept.kernels):
        return replace(kept, inside={node: found for node in kept.values if (found := probes(node))})


def activations_alone(gm: fx.GraphModule | Dataflow, kernels: str | None = None) -> Activations:
    """Return what `activations` does, without the temporary memory, which takes most of the time to find.

    Raises:
        GraphError: as `activations`.
    """
    root = root_of(gm)
    require_values(root.graph)
    kernels = kernels or own_kernels(t for node in root.graph.nodes for t in tensors(value_of(node)))
    kept = _RecordingRun(root)
    # inference mode of the caller would save nothing
    with paused_collector(), torch.inference_mode(False), TargetKernels(kernels):
        kept.record()
    order = {node: i for i, node in enumerate(root.graph.nodes)}
    saved = {n: tuple(sorted(kept.saved[n])) for n in sorted(kept.saved, key=order.__getitem__) if kept.saved[n]}
    unknown = {n: why for n in saved if (why := inexact(target_of(root, n), kernels))}
    estimated = kept.estimated | unknown
    return Activations(tuple(kept.nbytes), kept.values, saved, frozenset(kept.requires), {}, estimated, kernels)


_KEPT = "_kept_by_splitkit"


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SavedMarker:
    """Replaces a tensor that a node saves in autograd's graph, and lives as long as that graph keeps it."""

    node: Node
    storages: tuple[int, ...]


def _never(kept: _SavedMarker) -> torch.Tensor:
    raise NotImplementedError(f"{kept.node.name} reads in forward what it has saved for backward")


class _RecordingRun(fx.Interpreter):
    """Runs a graph inside a fake mode and records what its nodes yield and save; the attributes are `Activations`'."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.nbytes: list[int] = []
        self.values: dict[Node, tuple[int, ...]] = {}
        self.saved: dict[Node, dict[int, None]] = {}
        self.requires: set[Node] = set()
        self.estimated: dict[Node, str] = {}
        self._gm = gm
        self._now: Node | None = None
        self._numbers: dict[Hashable, int] = {}  # by storage; -1 for the caller's
        self._owned: dict[int, torch.Tensor] = {}  # by id of the real parameter or buffer
        self._alive: weakref.WeakSet[_SavedMarker] = weakref.WeakSet()
        self._given: dict[int, Any] = {}  # one tensor that was passed for several inputs

    def record(self) -> None:
        """Run the graph on fakes of its inputs."""
        given = tuple(value_of(node) for node in self._gm.graph.find_nodes(op="placeholder"))

        def watched(call: Any, *fakes: Any) -> None:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self.pack, _never):
                held = call(*fakes, enable_io_processing=False)
            for kept in self._alive:  # what is still saved at the end
                self.saved.setdefault(kept.node, {}).update(dict.fromkeys(kept.storages))
            del held  # not before: now autograd has freed what no output depends on

        StandIn(self.run, given, {}, NO_SIZES, ()).run(watched)

    def pack(self, tensor: torch.Tensor) -> _SavedMarker:
        """Record a tensor that autograd saves; the hook that packs it."""
        assert self._now is not None
        kept = _SavedMarker(self._now, self._storages(tensor))
        self._alive.add(kept)
        return kept

    def _keep_attributes(self, result: Any) -> None:
        """Record what a ``torch.autograd.Function`` keeps as attributes of its context, which no hook sees."""
        for tensor in tensors(result):
            attributes = getattr(tensor.grad_fn, "__dict__", None)  # nodes of autograd in C++ have no attributes
            if attributes and _KEPT not in attributes:
                attributes[_KEPT] = [self.pack(t) for t in tensors(list(attributes.values()))]

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and record what it yields."""
        if "saved_tensors_hooks" in getattr(n.target, "__name__", ""):
            return None  # it would disable the hooks of this run; autograd saves all the same
        if n.op == "output" or is_state_op(n):
            return super().run_node(n)
        self._now = n
        try:
            result = self._called(n)
        except Exception as error:  # whatever the op raises on fakes
            result = self._estimate(n, str(error).strip().partition("\n")[0] or type(error).__name__)
        if (group := repeated_group(n)) is not None:
            result = self._given.setdefault(group, result)
        self.values[n] = self._storages(result, n)
        self._keep_attributes(result)
        if any(t.requires_grad for t in tensors(result)):
            self.requires.add(n)
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a fake of the attribute."""
        return self._fake_of(operator.attrgetter(target)(self._gm))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call the module on fakes of its parameters and buffers."""
        module: nn.Module = operator.attrgetter(target)(self._gm)
        owned = dict([*module.named_parameters(), *module.named_buffers()])
        fakes = {name: self._fake_of(value) for name, value in owned.items()}
        return torch.func.functional_call(module, fakes, args, kwargs)

    def _called(self, node: Node) -> Any:
        if body_graphs(self._gm, node):
            return self._estimate(node, "it calls graphs of its own")
        return super().run_node(node)

    def _estimate(self, node: Node, why: str) -> Any:
        """Return stand-ins for a node's results; count them and its inputs as saved if it takes part in backward."""
        needs = any(n in self.requires for n in node.all_input_nodes) and torch.is_grad_enabled()
        result = pytree.tree_map(lambda leaf: _stand_in(leaf, needs), value_of(node))
        if needs:
            self.estimated[node] = why
            inner = _bytes_inside(self._gm, node)
            taken = [s for n in node.all_input_nodes for s in self.values.get(n, ())]
            kept = [*taken, *self._storages(result)]
            if inner:
                kept.append(self._new(inner * body_calls(node)))
            self.saved[node] = dict.fromkeys(kept)
        return result

    def _fake_of(self, value: Any) -> Any:
        """Return the fake of a parameter, buffer or constant, the same each time; other values as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._owned:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            self._owned[id(value)] = made.requires_grad_(value.requires_grad)
            self._numbers[storage_key(made)] = -1
        return self._owned[id(value)]

    def _storages(self, value: Any, made_by: Node | None = None) -> tuple[int, ...]:
        """Return the storages of a value, without those of parameters and buffers."""
        found: dict[int, None] = {}
        for tensor in (part for t in tensors(value) for part in plain_tensors(t)):
            key = storage_key(tensor)
            if key not in self._numbers:
                nbytes = hint(tensor.untyped_storage().nbytes())
                if made_by is not None:
                    nbytes = max(nbytes, as_seen(bytes_made(made_by, tensor), tensor))
                self._numbers[key] = self._new(nbytes)
            found[self._numbers[key]] = None
        found.pop(-1, None)
        return tuple(found)

    def _new(self, nbytes: int) -> int:
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1


def _stand_in(leaf: Any, needs_grad: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        made = torch.empty_strided(hints(leaf.shape), hints(leaf.stride()), dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(needs_grad and (made.is_floating_point() or made.is_complex()))
    return hint(leaf) if isinstance(leaf, torch.SymInt) else leaf


# The temporary memory of a single node's forward and backward under autograd, found on fake tensors.
#
# Each distinct call (op, shapes, constants, which arguments require grad) runs once, forward and then backward, and its
# live bytes are measured as for a real run. `splitkit.memory.kernels.temporaries` does the same without autograd.


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
        call = stand_in(self.gm, node, NO_SIZES, scope.autocast)
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        flags = tuple(isinstance(leaf, Node) and leaf in self.requires for leaf in leaves)
        watch = _CallRun(flags, scope.grad is not False)
        return self._calls.ask(call, watch, lambda: _guess(self.gm, node), watch)


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
    inner = _bytes_inside(gm, node)
    made, taken = value_bytes(node), sum(map(value_bytes, node.all_input_nodes))
    return BackwardBytes(inner + made, inner + made + taken)


def _bytes_inside(gm: fx.GraphModule, node: Node) -> int:
    """Return the bytes of all values in the graphs that a node calls."""
    return sum(value_bytes(n) for body in body_graphs(gm, node) for n in body.graph.nodes if "call" in n.op)
