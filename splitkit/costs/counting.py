"""FLOPs of a node: torch's own counter over what the node's target runs on fake tensors.

Composite ops (``linear``, ``einsum``, attention, ``lstm``) decompose under the counter, so that the sum over a graph
is what the counter reports for a real run. An op without a formula counts the elements it yields; a view counts 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator  # 2.11, 2.13, 2.15
from torch._subclasses.fake_tensor import FakeTensorMode  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.costs.sizes import elements, read_bytes, require_values, tensors, value_bytes
from splitkit.effects import storage_key

NOMINAL = 1e12  # FLOP/s: only ratios matter to a policy

Shape = tuple[int, ...]


def attention_flops(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    """Two products a head: ``query @ key.T`` and its product with ``value``."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# Ops that torch runs on the CPU and has no formula for (2.11, 2.13; 2.15 has this one). To compare, give them to
# FlopCounterMode.
FORMULAS: dict[Any, Callable[..., int]] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def flops(gm: fx.GraphModule) -> Flops:
    """Costs by FLOPs, counted for each node when it is first asked for.

    Raises:
        GraphError: SK102 when nodes have no ``meta["val"]``.
    """
    require_values(gm.graph)
    return Flops(gm)


@dataclass(frozen=True)
class Count:
    """What a node costs.

    Attributes:
        counted: FLOPs by formula.
        written: elements yielded, 0 for views and allocations.
    """

    counted: int
    written: int

    @property
    def flops(self) -> int:
        """The formula's FLOPs, or one for each element where there is none."""
        return self.counted or self.written


@dataclass(frozen=True)
class Flops:
    """See `flops`."""

    gm: fx.GraphModule
    _seen: dict[Any, Count] = field(default_factory=dict, repr=False, compare=False)
    _of: dict[Node, Count] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, node: Node) -> float:
        """FLOPs on a device that does 1e12 a second."""
        return self.flops(node) / NOMINAL

    def flops(self, node: Node) -> float:
        """FLOPs by formula; where there is none, the number of elements that the node yields; 0 for a view."""
        return float(self._count(node).flops)

    def counted(self, node: Node) -> int:
        """FLOPs by formula alone: their sum is what ``FlopCounterMode`` reports."""
        return self._count(node).counted

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return value_bytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return read_bytes(self.gm, node)

    def _count(self, node: Node) -> Count:
        if node not in self._of:
            self._of[node] = self._counted_in(self.gm, node)
        return self._of[node]

    def _counted_in(self, root: nn.Module, node: Node) -> Count:
        if node.op not in ("call_function", "call_method", "call_module") or node.target is operator.getitem:
            return Count(0, 0)
        if isinstance(node.target, HigherOrderOperator):
            return self._of_bodies(root, node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _value(root, n))
        target = _callable(root, node)
        key = _key(target, args, kwargs)
        if key not in self._seen:
            self._seen[key] = _run(target, args, kwargs)
        return self._seen[key]

    def _of_bodies(self, root: nn.Module, node: Node) -> Count:
        """The graphs that a higher-order op calls: all of them once, of ``cond`` the dearer one."""
        bodies = [operator.attrgetter(str(n.target))(root) for n in node.all_input_nodes if n.op == "get_attr"]
        counts = [self._of_graph(body) for body in bodies if isinstance(body, fx.GraphModule)]
        if node.target is torch.ops.higher_order.cond:
            return max(counts, key=lambda c: c.flops, default=Count(0, 0))
        return Count(sum(c.counted for c in counts), sum(c.written for c in counts))

    def _of_graph(self, body: fx.GraphModule) -> Count:
        counts = [self._counted_in(body, node) for node in body.graph.nodes]
        # a node has a formula or counts its elements, and so has the body as a whole
        return Count(sum(c.counted for c in counts), sum(c.flops for c in counts))


def _value(root: nn.Module, node: Node) -> Any:
    """What ``node`` yields, as far as it is known without running the graph."""
    if node.op == "get_attr":
        return operator.attrgetter(str(node.target))(root)
    return node.meta.get("val")


def _callable(root: nn.Module, node: Node) -> Any:
    """What ``node`` calls: an op, a module or the name of a method."""
    return operator.attrgetter(str(node.target))(root) if node.op == "call_module" else node.target


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return target, str(spec), tuple(_fingerprint(leaf) for leaf in leaves)


def _fingerprint(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _hints(leaf.shape), _hints(leaf.stride()), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf).__name__, str(leaf)  # 1, 1.0 and True are equal, but not the same argument


def _hints(sizes: Iterable[Any]) -> Shape:
    """Plain ints for sizes; 1 for one that only the data decides."""
    return tuple(_hint(size) for size in sizes)


def _hint(size: Any) -> int:
    try:
        return _torch.size_hint(size)
    except TypeError:
        return 1


def _run(target: Any, args: Any, kwargs: Any) -> Count:
    """Call ``target`` on fakes of its arguments under the counter; nothing real is read, written or drawn.

    The fakes are new ones with plain sizes: running on the graph's own could add guards to its symbols, or let an
    in-place op change the shape that another node is known to have.
    """
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        args, kwargs = pytree.tree_map(_stand_in, (args, kwargs))
        try:
            with counter:
                result = _call(target, args, kwargs)
        except Exception:  # a custom op without a fake, or a size that only the data decides
            return Count(counter.get_total_flops(), 0)
        return Count(counter.get_total_flops(), _written(target, result, (args, kwargs)))


def _stand_in(leaf: Any) -> Any:
    """A fake in the place of a tensor, a plain number in the place of a symbolic one."""
    if isinstance(leaf, torch.Tensor):
        strides = _hints(leaf.stride())
        made = torch.empty_strided(_hints(leaf.shape), strides, dtype=leaf.dtype, device=leaf.device)
        return made.requires_grad_(leaf.requires_grad)
    return _hint(leaf) if isinstance(leaf, torch.SymInt) else leaf


def _call(target: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    if isinstance(target, nn.Module):
        owned = dict([*target.named_parameters(), *target.named_buffers()])
        fakes = {name: _stand_in(tensor) for name, tensor in owned.items()}
        return torch.func.functional_call(target, fakes, args, kwargs)
    return target(*args, **kwargs)


def _written(target: Any, result: Any, inputs: Any) -> int:
    """Elements of the results that are neither views of an input nor memory that nobody filled."""
    if _allocates(target):
        return 0
    if _writes(target):
        return sum(elements(t) for t in tensors(result))
    held = {storage_key(t) for t in tensors(inputs)}
    return sum(elements(t) for t in tensors(result) if storage_key(t) not in held)


def _allocates(target: Any) -> bool:
    return _name(target).removeprefix("new_").startswith("empty")


def _writes(target: Any) -> bool:
    """Whether ``target`` changes an argument: ``add_``, ``copy_``, an op with ``out=``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = _name(target)
    return name.endswith("_") and not name.endswith("__")


def _name(target: Any) -> str:
    """``"add_"`` for ``aten.add_.Tensor``, ``Tensor.add_`` and ``"add_"``."""
    if isinstance(target, str):
        return target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", ""))
