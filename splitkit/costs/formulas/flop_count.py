"""Count the FLOPs of a node with torch's own counter, in a run of the node's target on fake tensors.

Composite ops (``linear``, ``einsum``, attention, ``lstm``) decompose under the counter, so that the sum over a graph
is what the counter reports for a real run. An op without a formula counts as one FLOP per element of its result, and a
view as 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx, nn
from torch.fx import Node
from torch.utils.flop_counter import FlopCounterMode

from splitkit._torch import HigherOrderOperator, written_arguments
from splitkit.costs.base import GraphCosts
from splitkit.costs.formulas.flop_formulas import attention_backward_flops, attention_flops, formulas_for
from splitkit.graph import fake_calls
from splitkit.graph.byte_sizes import elements, require_values
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.graph.fake_calls import CallMemo, body_calls, changes_state, hints, op_name, stand_in, value_in
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.short_repr import brief
from splitkit.units import TFLOP

NOMINAL = 1e12  # FLOPs in the unit of prices: any value works, as only ratios of prices matter to a policy

Shape = tuple[int, ...]


def flops(gm: fx.GraphModule | Dataflow) -> Flops:
    """Return costs by FLOPs. Each node is counted when its price is first asked for.

    Args:
        gm: the graph, or facts about it; all costs that are made from the same facts share their counts.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph, SK102 if nodes have no ``meta["val"]``.
    """
    require_values(root_of(gm).graph)
    return counter_of(gm)


def counter_of(gm: fx.GraphModule | Dataflow) -> Flops:
    """Return the FLOP counter of a graph, whose nodes need not have ``meta["val"]``."""
    return gm.fact(_counter) if isinstance(gm, Dataflow) else Flops(gm)


def _counter(flow: Dataflow) -> Flops:
    return Flops(flow.root)


@dataclass(frozen=True)
class Count:
    """The counts of one node.

    Attributes:
        counted: FLOPs by formula.
        written: elements of the result, 0 for views and allocations.
        fresh: for each tensor of the result whether the node writes it; ``None`` if the node could not be run.
    """

    counted: int
    written: int
    fresh: tuple[bool, ...] | None = None

    @property
    def flops(self) -> int:
        """FLOPs by formula, or one per element of the result if there is no formula."""
        return self.counted or self.written


@dataclass(frozen=True)
class Flops(GraphCosts):
    """The costs of `flops`, whose prices are TFLOPs rather than seconds."""

    gm: fx.GraphModule
    unit: ClassVar[str] = TFLOP
    _calls: CallMemo[Count] = field(default_factory=CallMemo, repr=False, compare=False)
    _of: dict[Node, Count] = field(default_factory=dict, repr=False, compare=False)

    __repr__ = brief

    @property
    def counter(self) -> Flops:
        """The counter of FLOPs: these costs themselves, as other costs name theirs."""
        return self

    def seconds(self, node: Node) -> float:
        """TFLOPs, which are seconds on a nominal device of 1e12 FLOP/s."""
        return self.flops(node) / NOMINAL

    def flops(self, node: Node) -> float:
        """FLOPs by formula; without a formula the number of elements of the result, 0 for a view."""
        return float(self.count(node).flops)

    def counted(self, node: Node) -> int:
        """FLOPs by formula only: their sum over a graph is what ``FlopCounterMode`` reports."""
        return self.count(node).counted

    def count(self, node: Node) -> Count:
        """Return all counts of ``node``."""
        if node not in self._of:
            self._of[node] = self._counted_in(self.gm, node)
        return self._of[node]

    def of_graph(self, body: fx.GraphModule) -> float:
        """Return the price of another graph as one node: its FLOPs by formula, if there are any."""
        return self._of_graph(body).flops / NOMINAL

    def on(self, body: fx.GraphModule) -> Flops:
        """Return the counter of another graph, which knows all calls that this one knows."""
        return Flops(body, self._calls)

    def _counted_in(self, root: nn.Module, node: Node) -> Count:
        if node.op not in ("call_function", "call_method", "call_module") or node.target is operator.getitem:
            return NOTHING
        if changes_state(root, node):
            return NOTHING
        if isinstance(node.target, HigherOrderOperator):
            return self._of_higher_order(root, node)
        call, written = stand_in(root, node), partial(_elements, node)
        return self._calls.ask(call, _Counting(call.target, written), lambda: Count(0, written()))

    def _of_higher_order(self, root: nn.Module, node: Node) -> Count:
        """Count the graphs that a higher-order op calls, as often as it calls them; for ``cond`` the dearer branch."""
        if formula := _WHOLE.get(str(node.target)):
            # [query, key, value] of the forward pass; the sparsity of a block mask is data, and unknown
            count = formula([hints(value_in(root, n).shape) for n in node.args[:3] if isinstance(n, Node)])
            return Count(count, 0)
        counts = [self._of_graph(body) for body in counted_bodies(root, node)]
        if not counts:  # it calls a function or kernel of its own
            return Count(0, sum(elements(t) for t in tensors(node.meta.get("val"))))
        if node.target is torch.ops.higher_order.cond:
            return max(counts, key=lambda c: c.flops)
        return _sum(counts, body_calls(node))

    def _of_graph(self, body: fx.GraphModule) -> Count:
        counts = [self._counted_in(body, node) for node in body.graph.nodes]
        # `written` holds the FLOPs of all nodes, so that a body without any formula has a price as well
        return Count(sum(c.counted for c in counts), sum(c.flops for c in counts))


NOTHING = Count(0, 0, fresh=())

_WHOLE: dict[str, Callable[[list[Shape]], int]] = {
    "flex_attention": lambda shapes: attention_flops(*shapes),
    "flex_attention_backward": lambda shapes: attention_backward_flops(shapes[0], *shapes),
}
"""Name -> formula of higher-order ops that do more than their bodies."""


class CountedCosts(GraphCosts):
    """Base class of costs in seconds, whose FLOPs a counter gives."""

    counter: Flops

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self.counter.flops(node)


def _sum(counts: list[Count], times: int) -> Count:
    return Count(
        times * sum(c.counted for c in counts),
        times * sum(c.written for c in counts),
    )


def counted_bodies(root: nn.Module, node: Node) -> list[fx.GraphModule]:
    """Return the graphs that a higher-order op calls; none for an op that is counted as a whole, such as attention."""
    return [] if str(node.target) in _WHOLE else fake_calls.body_graphs(root, node)


@dataclass(frozen=True)
class _Counting:
    """Runs a call of a target under the counter; ``written`` gives the elements of its result if it raises."""

    target: Any
    written: Callable[[], int]

    def __call__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Count:
        counter = FlopCounterMode(display=False, custom_mapping=formulas_for(self.target))
        try:
            with counter:
                made = list(tensors(call(*args, **kwargs)))
        except Exception:  # keep the FLOPs that were counted before the error
            return Count(counter.get_total_flops(), self.written())
        fresh = _fresh(self.target, made, (args, kwargs))
        written = sum(elements(t) for t, own in zip(made, fresh, strict=True) if own)
        written += sum(map(elements, tensors(only_written(self.target, args, kwargs))))
        return Count(counter.get_total_flops(), written, fresh)


def _elements(node: Node) -> int:
    return sum(map(elements, tensors(value_of(node))))


def _fresh(target: Any, made: list[torch.Tensor], inputs: Any) -> tuple[bool, ...]:
    """Return for each result whether it was written: no view of an input and no uninitialized memory."""
    if _allocates(target):
        return (False,) * len(made)
    if _writes(target):
        return (True,) * len(made)
    held = {storage_key(t) for t in tensors(inputs)}
    return tuple(storage_key(t) not in held for t in made)


def only_written(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an op without results writes, as ``_foreach_add_`` and fused optimizers do."""
    schema = getattr(target, "_schema", None)  # OpOverload._schema, .returns: 2.11, 2.13, 2.15
    return [] if schema is None or schema.returns else written_arguments(target, args, kwargs)


def _allocates(target: Any) -> bool:
    return op_name(target).removeprefix("new_").startswith("empty")


def _writes(target: Any) -> bool:
    """Whether ``target`` changes an argument: ``add_``, ``copy_``, an op with ``out=``."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    name = op_name(target)
    return name.endswith("_") and not name.endswith("__")
