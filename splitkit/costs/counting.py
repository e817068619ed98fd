"""FLOPs of a node: torch's own counter over what the node's target runs on fake tensors.

Composite ops (``linear``, ``einsum``, attention, ``lstm``) decompose under the counter, so that the sum over a graph
is what the counter reports for a real run. An op without a formula counts the elements it yields; a view counts 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from splitkit._torch import HigherOrderOperator
from splitkit.brief import brief
from splitkit.costs.formulas import FORMULAS, attention_backward_flops, attention_flops, formulas_for
from splitkit.graph import fakecalls
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.fakecalls import CallMemo, acts, hints, name_of, rounds, stand_in, value_in
from splitkit.graph.sizes import elements, read_bytes, require_values, value_bytes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of

__all__ = ["FORMULAS", "Count", "Flops", "bodies", "flops", "name_of", "rounds"]

NOMINAL = 1e12  # FLOP/s: only ratios matter to a policy

Shape = tuple[int, ...]


def flops(gm: fx.GraphModule | Dataflow) -> Flops:
    """Costs by FLOPs, counted for each node when it is first asked for.

    Args:
        gm: the graph, or facts about it: what they are asked for is counted once for all costs of theirs.

    Raises:
        GraphError: SK101 when it is no graph, SK102 when nodes have no ``meta["val"]``.
    """
    require_values(root_of(gm).graph)
    return counter_of(gm)


def counter_of(gm: fx.GraphModule | Dataflow) -> Flops:
    """What counts FLOPs of a graph, also of nodes without ``meta["val"]``."""
    return gm.fact(_counter) if isinstance(gm, Dataflow) else Flops(gm)


def _counter(flow: Dataflow) -> Flops:
    return Flops(flow.root)


@dataclass(frozen=True)
class Count:
    """What a node costs.

    Attributes:
        counted: FLOPs by formula.
        written: elements yielded, 0 for views and allocations.
        fused: those of ``counted`` that a fused attention kernel does, whose backward computes the scores again.
        fresh: for each tensor of the result whether the node writes it; ``None`` if the node could not be run.
    """

    counted: int
    written: int
    fused: int = 0
    fresh: tuple[bool, ...] | None = None

    @property
    def flops(self) -> int:
        """The formula's FLOPs, or one for each element where there is none."""
        return self.counted or self.written


@dataclass(frozen=True)
class Flops:
    """See `flops`."""

    gm: fx.GraphModule
    _calls: CallMemo[Count] = field(default_factory=CallMemo, repr=False, compare=False)
    _of: dict[Node, Count] = field(default_factory=dict, repr=False, compare=False)

    __repr__ = brief

    @property
    def counter(self) -> Flops:
        """What counts: these costs themselves. Other costs name theirs, so that nothing is counted twice."""
        return self

    def seconds(self, node: Node) -> float:
        """FLOPs on a device that does 1e12 a second."""
        return self.flops(node) / NOMINAL

    def flops(self, node: Node) -> float:
        """FLOPs by formula; where there is none, the number of elements that the node yields; 0 for a view."""
        return float(self.count(node).flops)

    def counted(self, node: Node) -> int:
        """FLOPs by formula alone: their sum is what ``FlopCounterMode`` reports."""
        return self.count(node).counted

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return value_bytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return read_bytes(self.gm, node)

    def count(self, node: Node) -> Count:
        """All that is known of ``node``."""
        if node not in self._of:
            self._of[node] = self._counted_in(self.gm, node)
        return self._of[node]

    def _counted_in(self, root: nn.Module, node: Node) -> Count:
        if node.op not in ("call_function", "call_method", "call_module") or node.target is operator.getitem:
            return NOTHING
        if acts(root, node):
            return NOTHING
        if isinstance(node.target, HigherOrderOperator):
            return self._of_higher_order(root, node)
        call, written = stand_in(root, node), partial(_elements, node)
        return self._calls.ask(call, _Counting(call.target, written), lambda: Count(0, written()))

    def _of_higher_order(self, root: nn.Module, node: Node) -> Count:
        """The graphs that a higher-order op calls: as often as it does, of ``cond`` the dearer one."""
        if formula := _WHOLE.get(str(node.target)):
            # [query, key, value] of the forward pass; the sparsity of a block mask is data, and unknown
            count = formula([hints(value_in(root, n).shape) for n in node.args[:3] if isinstance(n, Node)])
            return Count(count, 0, fused=count if node.target is torch.ops.higher_order.flex_attention else 0)
        counts = [self._of_graph(body) for body in bodies(root, node)]
        if not counts:  # it calls a function or kernel of its own
            return Count(0, sum(elements(t) for t in tensors(node.meta.get("val"))))
        if node.target is torch.ops.higher_order.cond:
            return max(counts, key=lambda c: c.flops)
        return _sum(counts, rounds(node))

    def _of_graph(self, body: fx.GraphModule) -> Count:
        counts = [self._counted_in(body, node) for node in body.graph.nodes]
        # a node has a formula or counts its elements, and so has the body as a whole
        return Count(sum(c.counted for c in counts), sum(c.flops for c in counts), sum(c.fused for c in counts))


NOTHING = Count(0, 0, fresh=())

_WHOLE: dict[str, Callable[[list[Shape]], int]] = {
    "flex_attention": lambda shapes: attention_flops(*shapes),
    "flex_attention_backward": lambda shapes: attention_backward_flops(shapes[0], *shapes),
}
"""Higher-order ops that do more than their bodies, by name."""


def _sum(counts: list[Count], times: int) -> Count:
    return Count(
        times * sum(c.counted for c in counts),
        times * sum(c.written for c in counts),
        times * sum(c.fused for c in counts),
    )


def bodies(root: nn.Module, node: Node) -> list[fx.GraphModule]:
    """The graphs that a higher-order op calls; none of one that is counted whole, such as attention."""
    return [] if str(node.target) in _WHOLE else fakecalls.bodies(root, node)


@dataclass(frozen=True)
class _Counting:
    """Runs a call of a target under the counter; ``written`` are the elements of its result where it raises."""

    target: Any
    written: Callable[[], int]

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Count:
        counter = FlopCounterMode(display=False, custom_mapping=formulas_for(self.target))
        try:
            with counter:
                made = list(tensors(call(*args, **kwargs)))
        except Exception:  # what it did up to there has been counted
            return Count(counter.get_total_flops(), self.written())
        fresh = _fresh(self.target, made, (args, kwargs))
        written = sum(elements(t) for t, own in zip(made, fresh, strict=True) if own)
        written += sum(map(elements, tensors(changed(self.target, args, kwargs))))
        return Count(counter.get_total_flops(), written, _fused(counter), fresh)


def _elements(node: Node) -> int:
    return sum(map(elements, tensors(value_of(node))))


def _fused(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts().get("Global", {})
    return sum(n for op, n in counts.items() if "attention" in str(op) and "backward" not in str(op))


def _fresh(target: Any, made: list[torch.Tensor], inputs: Any) -> tuple[bool, ...]:
    """Which results are neither views of an input nor memory that nobody filled."""
    if _allocates(target):
        return (False,) * len(made)
    if _writes(target):
        return (True,) * len(made)
    held = {storage_key(t) for t in tensors(inputs)}
    return tuple(storage_key(t) not in held for t in made)


def changed(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an op writes and does not give back, as ``_foreach_add_`` and fused optimizers do."""
    schema = getattr(target, "_schema", None)  # OpOverload._schema, .returns, .alias_info: 2.11, 2.13, 2.15
    if schema is None or schema.returns:
        return []
    written = [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def _allocates(target: Any) -> bool:
    return name_of(target).removeprefix("new_").startswith("empty")


def _writes(target: Any) -> bool:
    """Whether ``target`` changes an argument: ``add_``, ``copy_``, an op with ``out=``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = name_of(target)
    return name.endswith("_") and not name.endswith("__")
