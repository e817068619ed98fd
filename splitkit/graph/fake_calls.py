"""Run single nodes on fake tensors to find out what they do, without computing anything.

The arguments are new fakes with plain sizes. On the fakes of the graph itself, a run could add guards to the graph's
symbols, and an in-place op could change the shape noted for another node.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensorMode, pytree
from splitkit.graph.ops import effects_of
from splitkit.graph.ops.facts import Described
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute, tensors
from splitkit.graph.symbols import plain_size

T = TypeVar("T")

NO_SIZES: Mapping[str, int] = MappingProxyType({})

_LEAVES = (int, float, bool, str, type(None), torch.dtype, torch.device)  # known leaves of pytrees, for speed


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
        return self.target, self.autocast, self._print((self.args, self.kwargs))

    def run(self, watch: Callable[..., Any], mode: FakeTensorMode | None = None) -> Any:
        """Return ``watch(call, *args, **kwargs)`` on fakes of ``mode``, without autograd; ``call`` runs the target.

        No real tensor is read or written, and no random number is drawn. Raises whatever the target raises on fakes: a
        custom op may have no fake kernel, and a size may depend on data.
        """
        with mode or new_mode(), torch.no_grad():
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

    def _print(self, tree: Any) -> Hashable:
        """Return a hashable copy of a pytree, with fingerprints for its leaves."""
        kind = type(tree)
        if kind is tuple or kind is list:
            return (kind, *map(self._print, tree))
        if kind is dict:
            return (kind, *tree, *map(self._print, tree.values()))
        if isinstance(tree, torch.Tensor) or kind in _LEAVES:
            return self._fingerprint(tree)
        leaves, spec = pytree.tree_flatten(tree)
        return str(spec), *map(self._fingerprint, leaves)

    def _fingerprint(self, leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            shape, strides = self._plain(leaf.shape), self._plain(leaf.stride())
            return shape, strides, leaf.dtype, leaf.device, leaf.requires_grad, leaf.is_neg(), leaf.is_conj()
        return type(leaf).__name__, str(leaf)  # 1, 1.0 and True are equal, but not the same argument

    def _plain(self, sizes: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
        return hints(sizes, self.sizes)


def new_mode() -> FakeTensorMode:
    """Return a fake mode that accepts real parameters and buffers of modules."""
    return _torch.fake_mode()


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
            self._mode = self._mode or new_mode()
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
