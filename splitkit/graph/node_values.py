"""What nodes yield: their values on fake tensors, the bytes of these, and which of them take part in backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn
from torch.fx import GraphModule, Node

from splitkit import _torch
from splitkit._torch import FakeTensorMode, HigherOrderOperator, OpOverload, pytree
from splitkit.errors import GraphError, listed
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.input_overlap import check_nodes
from splitkit.graph.ops import PURE, Effects, effects_of
from splitkit.graph.ops.facts import Described
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, owned_tensors, plain_size, tensors, value_of


def elements(tensor: torch.Tensor) -> int:
    """Return the number of elements; a symbolic size counts as its value at capture.

    A data-dependent size counts as the upper bound that the model states, or as 1 if it states none.
    """
    return prod(map(hint, tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of ``tensor``, whatever the size of its storage."""
    return elements(tensor) * tensor.element_size()


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the bytes of the storage of ``tensor``, perhaps symbolic.

    Sparse tensors and some subclasses have no storage: for them, the bytes of the tensor's elements.
    """
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return `storage_nbytes` as a plain number: its value at capture, or `tensor_bytes` if it depends on data."""
    try:
        return _torch.size_hint(storage_nbytes(tensor))
    except TypeError:
        return tensor_bytes(tensor)


def value_bytes(node: Node) -> int:
    """Return the bytes of the tensors that ``node`` yields, 0 if its value is unknown (see `value_of`)."""
    return sum(tensor_bytes(t) for t in tensors(value_of(node)))


def read_bytes(root: nn.Module, node: Node) -> int:
    """Return the bytes of the parameters and buffers that ``node`` reads; see `Dataflow.owned`."""
    return sum(map(tensor_bytes, owned_tensors(root, [node])))


def nodes_without_values(graph: fx.Graph) -> list[Node]:
    """Return the nodes that lack a ``meta["val"]`` that their price needs."""
    inert = ("get_attr", "output")
    found = [
        node
        for node in graph.nodes
        if "val" not in node.meta and node.op not in inert and not is_state_op(node) and not _yields_nothing(node)
    ]
    checks = check_nodes(graph) if found else {}
    return [node for node in found if node not in checks]


def _yields_nothing(node: Node) -> bool:
    """Whether a node yields no value: checks (``_assert_async``), prints, and torch.export's check of the inputs."""
    if node.op == "call_module":
        return not node.users and node.target == "_guards_fn"  # 2.11, 2.13, 2.15
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return bool(target.name() == "print")  # type: ignore[no-untyped-call]
    return isinstance(target, OpOverload) and not _torch.schema_of(target).returns


def require_values(graph: fx.Graph, but: Callable[[Node], bool] = lambda node: False) -> None:
    """Raise unless all nodes have a ``meta["val"]``, except those for which ``but`` holds.

    Raises:
        GraphError: SK102 with the nodes that lack one.
    """
    nodes = [node for node in nodes_without_values(graph) if not but(node)]
    if not nodes:
        return
    raise GraphError(
        "SK102",
        f"{listed(nodes, 5)} have no meta['val'], so that their sizes are unknown",
        "Capture the model with splitkit.capture(model, *inputs), or add them: splitkit.extend.propagate(gm, *inputs).",
        nodes,
    )


# Run single nodes on fake tensors to find out what they do, without computing anything.
#
# The arguments are new fakes with plain sizes. On the fakes of the graph itself, a run could add guards to the graph's
# symbols, and an in-place op could change the shape noted for another node.


T = TypeVar("T")

NO_SIZES: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class StandIn:
    """The call of a node.

    Attributes:
        target: the op, function or module that is called, or the name of a method of the first argument.
        args: positional arguments: the graph's own fakes and attributes.
        kwargs: keyword arguments.
        sizes: name of a symbol -> its size, where that differs from its size at capture.
        autocast: the arguments of the autocast regions around the node, outermost first.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sizes: Mapping[str, int]
    autocast: tuple[tuple[Any, ...], ...]

    @property
    def key(self) -> Hashable:
        """A key equal for calls of one target on arguments of the same shapes, strides, dtypes, devices and values."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        return self.target, self.autocast, str(spec), *map(self._fingerprint, leaves)

    def run(self, watch: Callable[..., Any], mode: FakeTensorMode | None = None) -> Any:
        """Return ``watch(call, *args, **kwargs)`` on fakes of ``mode``, without autograd; ``call`` runs the target.

        No real tensor is read or written, and no random number is drawn. Raises whatever the target raises on fakes: a
        custom op may have no fake kernel, and a size may depend on data.
        """
        with mode or _torch.fake_mode(), torch.no_grad():
            args, kwargs = pytree.tree_map(self._fake, (self.args, self.kwargs))
            with ExitStack() as regions:
                for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):  # the caller's
                    regions.enter_context(torch.autocast(device, enabled=False))
                for settings in self.autocast:
                    regions.callback(_torch.EXIT_AUTOCAST, _torch.ENTER_AUTOCAST(*settings))
                return watch(self._callable(), *args, **kwargs)

    def _callable(self) -> Callable[..., Any]:
        if isinstance(self.target, str):
            return lambda first, *args, **kwargs: getattr(first, self.target)(*args, **kwargs)
        if isinstance(self.target, nn.Module):
            named = [*self.target.named_parameters(), *self.target.named_buffers()]
            state = {name: self._fake(tensor) for name, tensor in named}
            return lambda *args, **kwargs: torch.func.functional_call(self.target, state, args, kwargs)
        target: Callable[..., Any] = self.target
        return target

    def _fake(self, leaf: Any) -> Any:
        """Return a fake for a tensor, and a plain number for a symbolic one."""
        if isinstance(leaf, torch.Tensor):
            shape, strides = self._plain(leaf.shape), self._plain(leaf.stride())
            made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
            made = _torch.NEG_VIEW(made) if leaf.is_neg() else made
            return (made.conj() if leaf.is_conj() else made).requires_grad_(leaf.requires_grad)
        return hint(leaf, self.sizes) if isinstance(leaf, torch.SymInt) else leaf

    def _fingerprint(self, leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            shape, strides = self._plain(leaf.shape), self._plain(leaf.stride())
            return shape, strides, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_neg(), leaf.is_conj()
        return type(leaf).__name__, str(leaf)  # 1, 1.0 and True are equal, but not the same argument

    def _plain(self, sizes: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
        return hints(sizes, self.sizes)


class CallMemo(Generic[T]):
    """A cache of the results of calls: each distinct call runs once. It lives as long as its owner."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, T] = {}
        self._mode: FakeTensorMode | None = None  # one for all calls: making one takes as long as a call

    def ask(self, call: StandIn, watch: Callable[..., T], otherwise: Callable[[], T], *facts: Hashable) -> T:
        """Return the result of ``watch`` on a call, or of ``otherwise`` if the call cannot run on fakes.

        Args:
            call: the call.
            watch: see `StandIn.run`.
            otherwise: makes the answer if the call raises: a custom op without a fake kernel, a data-dependent size.
            facts: further values that the answer depends on.
        """
        key = (call.key, *facts)
        if key not in self._seen:
            self._mode = self._mode or _torch.fake_mode()
            try:
                self._seen[key] = call.run(watch, self._mode)
            except Exception:
                self._seen[key] = otherwise()
        return self._seen[key]


NO_VALUES: Mapping[Node, Any] = MappingProxyType({})


def stand_in(
    root: nn.Module,
    node: Node,
    sizes: Mapping[str, int] = NO_SIZES,
    autocast: Iterable[Node] = (),
    given: Mapping[Node, Any] = NO_VALUES,
) -> StandIn:
    """Return the call of ``node`` in the graph of ``root``, in the autocast regions that the nodes ``autocast`` open.

    ``given`` replaces the values of some nodes.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: given[n] if n in given else value_in(root, n))
    target = target_of(root, node)
    settings = tuple((*enter.args, *enter.kwargs.values())[:4] for enter in autocast)  # device, dtype, enabled, cache
    return StandIn(target, args, kwargs, sizes, settings)


def value_in(root: nn.Module, node: Node) -> Any:
    """Return the value of ``node`` if it is known without running the graph: an attribute or ``meta["val"]``."""
    if node.op == "get_attr":
        return attribute(root, str(node.target))
    return node.meta.get("val")


def body_graphs(root: nn.Module, node: Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op takes as attributes of ``root``."""
    taken = (attribute(root, str(n.target)) for n in node.all_input_nodes if n.op == "get_attr")
    return [body for body in taken if isinstance(body, fx.GraphModule)]


def target_of(root: nn.Module, node: Node) -> Any:
    """Return what ``node`` calls: an op, a module or the name of a method."""
    return attribute(root, str(node.target)) if node.op == "call_module" else node.target


def changes_state(root: nn.Module, node: Node) -> bool:
    """Whether calling the target would change the caller's ambient state (autocast, vmap levels), or print.

    Unknown code and ``torch.autograd.Function`` count as harmless: capture has run them on fakes before.
    """
    if is_state_op(node):
        return True
    effects = effects_of(node, root)
    return effects.known and (effects.ambient or (effects.impure and not isinstance(node.target, Described)))


def hint(size: int | torch.SymInt, sizes: Mapping[str, int] = NO_SIZES) -> int:
    """Return a size as a plain int; a data-dependent size without an upper bound counts as 1."""
    try:
        return plain_size(size, sizes)
    except LookupError:
        return 1


def hints(shape: Iterable[int | torch.SymInt], sizes: Mapping[str, int] = NO_SIZES) -> tuple[int, ...]:
    """Return sizes as plain ints."""
    return tuple(size if isinstance(size, int) else hint(size, sizes) for size in shape)


def body_calls(node: Node) -> int:
    """Return how often a higher-order op calls its bodies.

    ``scan`` and ``map`` call them once per row. How often ``while_loop`` does depends on data: it counts as once.
    """
    if str(node.target) not in ("scan", "map_impl"):
        return 1
    rows = node.args[2] if str(node.target) == "scan" else node.args[1]
    stacked = next((v for n in pytree.tree_leaves(rows) for v in tensors(n.meta.get("val"))), None)
    return 1 if stacked is None else hint(stacked.shape[0])


def op_name(target: Any) -> str:
    """Return the plain name of a target: ``"add_"`` for ``aten.add_.Tensor``, ``Tensor.add_`` and ``"add_"``."""
    if isinstance(target, str):
        return target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", ""))


# How many bytes of keys and values each attention of a graph keeps per token, read off the shapes of the graph.


_ATTENTION = "scaled_dot_product_attention"
# Ops that only repeat or rearrange keys and values, as where several query heads share a key.
_SAME_VALUES = frozenset(
    (
        *("expand", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "permute", "contiguous"),
        *("clone", "repeat", "repeat_interleave", "flatten", "unflatten", "alias", "detach", "slice", "__getitem__"),
    )
)


def cache_bytes(gm: GraphModule | Dataflow) -> Mapping[Node, int]:
    """Return the bytes that each attention keeps per token when the model generates: attention node -> bytes.

    An attention is a node that calls ``scaled_dot_product_attention`` (transformers: ``attn_implementation="sdpa"``,
    the default). Its keys and values count before heads are repeated, in their captured dtype, divided by the tokens of
    the capture (batch times length of the keys). If the cache has another dtype, or a sliding window that holds less,
    change the numbers and pass the mapping to `splitkit.policies.Stages`. Do the same for models with an encoder: its
    attention is counted here, although it keeps nothing from token to token.

    Args:
        gm: a captured forward graph, or facts about it.
    """
    flow, found = facts_of(gm), dict[Node, int]()
    for node in flow.nodes:
        if op_name(target_of(flow.root, node)) != _ATTENTION:
            continue
        given = [node.kwargs.get("key"), node.kwargs.get("value")] if len(node.args) < 3 else node.args[1:3]
        kept = [arg for arg in given if isinstance(arg, Node)]
        value = value_of(kept[0]) if kept else None
        if isinstance(value, torch.Tensor) and value.dim() >= 3:
            shape = hints(value.shape)
            batch = shape[0] if len(shape) > 3 else 1
            tokens = batch * shape[-2]
            found[node] = sum(-(-_least_bytes(flow, arg) // tokens) for arg in kept) if tokens else 0
    return {node: nbytes for node, nbytes in found.items() if nbytes}


def _least_bytes(flow: Dataflow, node: Node) -> int:
    """Return the bytes of keys or values before they are repeated."""
    least = value_bytes(node)
    while op_name(target_of(flow.root, node)) in _SAME_VALUES and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
        least = min(least, value_bytes(node) or least)
    return least


# Find the nodes of a forward graph that take part in backward.
#
# The values of captured graphs do not say whether they require grad. So gradients are followed forward from the
# parameters: through floating-point results and written memory, but not through ``detach`` or where gradients are off.
# Then the result is restricted to nodes that an output depends on, as no other node's gradient is asked for::
#
#     weight (requires grad) ── linear ── relu ─┬─ detach ── mul ── output      requires grad: linear, relu, softmax
#     input                  ───┘               └─ softmax ──────── output      has a backward: the same three


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
        found = {self._memory[written] for node in self.needed for written in self._effects(node).writes}
        return self.needed | {node for node, memory in self._memory.items() if memory in found}

    def _visit(self, root: nn.Module, node: Node) -> None:
        effects, cut = self._effects(node), self._is_cut(node)
        self._memory[node] = self._memory[effects.aliases[0]] if effects.aliases and not cut else node
        if node.op in ("placeholder", "get_attr"):
            value = operator.attrgetter(str(node.target))(root) if node.op == "get_attr" else value_of(node)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self._live.add(node)
                self.needed.add(node)
            return
        reads = frozenset(n for n in _sources(node) if self._memory[n] in self._live and _is_float(n))
        self.reads[node] = reads
        module = target_of(root, node) if node.op == "call_module" else None
        trains = isinstance(module, nn.Module) and any(p.requires_grad for p in module.parameters())
        if cut or not (effects.writes or _is_float(node)) or not (reads or trains):
            return
        self.needed.add(node)
        self._live.update(self._memory[n] for n in (node, *effects.writes))

    def _effects(self, node: Node) -> Effects:
        return self._flow.effects.get(node, PURE)

    def _wanted(self, graph: fx.Graph) -> set[Node]:
        """Return the nodes that the outputs depend on, through results and through memory written before."""
        wanted, memory = set[Node](), set[Hashable]()
        for node in reversed(graph.nodes):
            written = (self._memory[n] for n in self._effects(node).writes)
            if node in wanted or node.op == "output" or not memory.isdisjoint(written):
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


def _is_float(node: Node) -> bool:
    """Whether a tensor that ``node`` yields, or one in its tuple, can have a gradient."""
    return any(t.is_floating_point() or t.is_complex() for t in tensors(value_of(node)))
