"""Packs the values that cross a border between stages into tensors that torch's stages can send, and unpacks them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.size_expressions import Expression, evaluated, expression_of, is_known, symbols_in, text_of
from splitkit.graph.storages import is_symbolic, value_of
from splitkit.pipeline.inseparable_nodes import SCALARS, unsendable


@dataclass(frozen=True)
class BorderValue:
    """A value that crosses a border between stages.

    Attributes:
        name: the name of the node that computes it.
        like: a tensor on ``meta`` of the same shape, dtype and ``requires_grad``; zero-dimensional for a number.
        scalar: the Python type of a number; ``None`` for a tensor.
        written: whether a stage may write its memory.
        unsendable: the kind of a value that cannot be sent; empty if it can.
        order: the dimensions from the largest stride to the smallest, if that is not the usual order. It must survive
            the transfer: a ``view`` after a ``transpose`` may work with these strides only.
        shape: the shape of ``like`` where it has symbolic sizes; empty if no size is symbolic.
        padded: the number of elements that are sent, if the value is sent as a flat tensor that may be longer.
    """

    name: str
    like: torch.Tensor
    scalar: type | None = None
    written: bool = False
    unsendable: str = ""
    order: tuple[int, ...] = ()
    shape: tuple[Expression, ...] = ()
    padded: int | None = None

    def at(self, sizes: Sizes) -> BorderValue:
        """Return the value in a microbatch whose inputs have these sizes."""
        wanted = [evaluated(size, sizes) for size in self.shape]
        if not self.shape or wanted == list(self.like.shape):
            return self
        like = torch.empty(wanted, dtype=self.like.dtype, device="meta", requires_grad=self.like.requires_grad)
        return replace(self, like=like)

    def sent(self, train: bool) -> BorderValue:
        """Return the value as it is sent: in training with a gradient that comes back, otherwise without.

        Raises:
            PipelineError: SK801 for a value that is neither a tensor nor a number.
        """
        if self.unsendable:
            raise PipelineError(
                "SK801",
                f"{self.name} is a {self.unsendable}, which cannot be sent to another process",
                "Put the ops that make it and read it into one stage.",
                [self.name],
            )
        return self if train or not self.like.requires_grad else replace(self, like=self.like.detach())

    @property
    def meta_tensor(self) -> torch.Tensor:
        """The tensor on ``meta`` that torch's stage is told to expect: ``like`` with its dimensions in memory order."""
        if self.padded is not None:
            grad = self.like.requires_grad
            return torch.empty(self.padded, dtype=self.like.dtype, device="meta", requires_grad=grad)
        if not self.order:
            return self.like
        return self.like.detach().permute(self.order).contiguous().requires_grad_(self.like.requires_grad)

    def packed(self, value: Any, device: torch.device, where: str) -> Any:
        """Return the tensor to send: contiguous, and with an autograd node of its own.

        Raises:
            PipelineError: SK803 if the value does not have the planned dtype, shape or ``requires_grad``.
        """
        if self.scalar is not None:
            return torch.tensor(value, dtype=self.like.dtype, device=device)
        if self.written and self.like.requires_grad and isinstance(value, torch.Tensor) and not value.requires_grad:
            # A later stage fills this buffer, so it gets a gradient there; what comes back is not used.
            value = value.detach().requires_grad_()
        self._require(value, where)
        value = value.permute(self.order) if self.order else value
        if not self.like.requires_grad:
            value = value.detach()
        if self.padded is not None:
            return FilledUp.apply(value, self.padded)  # type: ignore[no-untyped-call]
        return non_view(value.contiguous()) if self.like.requires_grad else value.contiguous()

    def unpacked(self, value: torch.Tensor) -> Any:
        """Return the value as the receiving stage reads it."""
        if self.scalar is not None:
            return self.scalar(value.item())
        if self.padded is not None:
            shape = [self.like.shape[i] for i in self.order or range(self.like.dim())]
            value = Shaped.apply(value, shape)  # type: ignore[no-untyped-call]
        elif value.requires_grad:
            # This makes the gradient contiguous, so that it can be sent.
            value = non_view(value)
        if self.order:
            value = value.permute([self.order.index(i) for i in range(len(self.order))])
        return value.clone() if self.written else value  # torch owns the received leaf

    def _require(self, value: Any, where: str) -> None:
        found, wants = _look(value), _look(self.like)
        if found != wants or value.requires_grad < self.like.requires_grad:
            lacks = f"{found}{', without gradient' if found == wants else ''}"
            asks = f"{wants}{', with a gradient' if found == wants else ''}"
            raise PipelineError(
                "SK803",
                f"{self.name} is {lacks} {where}; the next stage expects {asks}",
                "Capture with inputs that have the shape of one microbatch, in the mode and the autocast of training.",
                [self.name],
            )


class NonView(torch.autograd.Function):
    """The identity, whose result shares memory with its argument but is not a view to autograd.

    Torch's schedules call ``detach_()`` on what a stage returns, which autograd refuses for views. The gradient is made
    contiguous, since only contiguous tensors can be sent.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, detached."""
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient, made contiguous."""
        return grad.contiguous()


def non_view(x: torch.Tensor) -> Any:
    """Return the same memory as a tensor that is not a view: see `NonView`."""
    return NonView.apply(x)  # type: ignore[no-untyped-call]


def border_value(node: Node, needed: Set[Node], written: Set[Node]) -> BorderValue:
    """Describe how the value of a node crosses a border.

    Args:
        node: a node of the graph that was split.
        needed: nodes that may carry a gradient.
        written: nodes whose memory is written.
    """
    value = value_of(node)
    if kind := unsendable(value):
        return BorderValue(node.name, torch.empty((), device="meta"), unsendable=kind)
    if isinstance(value, torch.Tensor):
        like = torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
        like = like.requires_grad_(node in needed)
        shape = shape_of(value) if is_symbolic(value) else ()
        return BorderValue(node.name, like, written=node in written, order=memory_order(value), shape=shape)
    value = _torch.size_hint(value) if isinstance(value, torch.SymInt) else value
    return BorderValue(node.name, torch.empty((), dtype=SCALARS[type(value)], device="meta"), type(value))


def meta_like(value: object) -> torch.Tensor | None:
    """Return a tensor on ``meta`` that is laid out like a tensor at capture; ``None`` for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    like = torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
    return laid_out(like, memory_order(value))


def laid_out(value: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a value without gaps, with its dimensions in this order in memory: a graph may view it so."""
    order = order or tuple(range(value.dim()))
    if value.layout is not torch.strided or value.permute(order).is_contiguous():
        return value
    return value.permute(order).contiguous().permute([order.index(i) for i in range(value.dim())])


def memory_order(value: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions by decreasing stride; empty if that is the usual order."""
    if value.layout is not torch.strided:
        return ()
    strides = [_torch.size_hint(n) for n in value.stride()]
    found = sorted(range(value.dim()), key=lambda i: -strides[i])
    return () if found == sorted(found) or value.is_contiguous() else tuple(found)


def _look(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


# Sends tensors of different sizes as flat tensors of one size, in forward and backward.


class FilledUp(torch.autograd.Function):
    """Copies a tensor into the first elements of a flat one; the others are zero."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return a new tensor of shape (count,)."""
        ctx.shape = x.shape
        return _flat(x, count)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the first elements."""
        return grad[: math.prod(ctx.shape)].view(ctx.shape), None


class Shaped(torch.autograd.Function):
    """Takes a tensor from the first elements of a flat one, whose memory it shares; to autograd it is not a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor."""
        ctx.count = x.numel()
        return x.detach()[: math.prod(shape)].view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient as a flat tensor, contiguous, so that it can be sent."""
        return _flat(grad, ctx.count), None


def _flat(x: torch.Tensor, count: int) -> torch.Tensor:
    made = x.new_zeros(count)
    made[: x.numel()] = x.reshape(-1)
    return made


# Describes the symbolic sizes of a graph that was captured with ``dynamic=True``, and reads them off its inputs.


_ATTENTION = "scaled_dot_product"

Sizes = Mapping[str, int]
"""Name of a symbol -> its size in a microbatch."""


@dataclass(frozen=True)
class GraphSizes:
    """The symbolic sizes of a graph. All fields are empty for a graph whose sizes are fixed.

    Attributes:
        inputs: input of the graph -> the shape of the tensor.
        captured: symbol -> its size at capture.
        ranges: symbol -> its least and its largest size; ``None`` for no limit.
        guards: conditions on the symbols that the graph relies on.
        computed: node of the parent -> its value, for numbers that each stage computes from the sizes of the inputs.
        squares: symbols that are two dimensions of one tensor, as the length of a sequence is in attention.
    """

    inputs: Mapping[str, tuple[Expression, ...]] = field(default_factory=dict)
    captured: Sizes = field(default_factory=dict)
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    guards: tuple[Expression, ...] = ()
    computed: Mapping[str, Expression] = field(default_factory=dict)
    squares: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> Mapping[str, str]:
        """Symbol -> the first size of an input that it is, as text: ``"x.shape[1]"``."""
        found: dict[str, str] = {}
        for name, shape in self.inputs.items():
            for dim, size in enumerate(shape):
                if isinstance(size, str):
                    found.setdefault(size, f"{name}.shape[{dim}]")
        return found

    def bound(self, inputs: Mapping[str, Any]) -> Sizes:
        """Return the sizes of a microbatch, read off its inputs. A symbol that no input shows has its size at capture.

        Args:
            inputs: the inputs of a microbatch by name.

        Raises:
            PipelineError: SK802 for sizes that the graph does not allow.
        """
        found: dict[str, int] = {}
        for name, wanted in self.inputs.items():
            shape = inputs[name].shape
            if len(shape) != len(wanted):
                raise self._misshapen(name, inputs[name])
            for symbol, size in zip(wanted, shape, strict=True):
                if isinstance(symbol, str):
                    found.setdefault(symbol, size)
        sizes = {**self.captured, **found}
        for name, wanted in self.inputs.items():
            if [evaluated(size, sizes) for size in wanted] != list(inputs[name].shape):
                raise self._misshapen(name, inputs[name])
        if sizes != self.captured:
            self._require_allowed(sizes)
        return sizes

    def _misshapen(self, name: str, value: torch.Tensor) -> PipelineError:
        wants = ", ".join(text_of(size, self.names) for size in self.inputs[name])
        return PipelineError(
            "SK802",
            f"{name} is {list(value.shape)} in a microbatch, but the captured graph takes [{wants}]",
            "Give inputs whose sizes match each other as they did at capture.",
            [name],
        )

    def _require_allowed(self, sizes: Sizes) -> None:
        for symbol, name in self.names.items():
            low, high = self.ranges.get(symbol, (0, None))
            if sizes[symbol] < low or (high is not None and sizes[symbol] > high):
                limit = f"{low} or more" if sizes[symbol] < low else f"at most {high}"
                rows = name.endswith(".shape[0]") and sizes[symbol] < low
                raise PipelineError(
                    "SK802",
                    f"{name} is {sizes[symbol]} in a microbatch, and the captured graph takes {limit}",
                    f"Give {low} rows or more for each microbatch, or leave the last batch out (drop_last=True)."
                    if rows
                    else "Give other sizes, or capture with inputs of this size.",
                    [name.split(".")[0]],
                )
        for guard in self.guards:
            if not is_known(guard) or not evaluated(guard, sizes):
                given = ", ".join(f"{self.names.get(s, s)} = {sizes[s]}" for s in dict.fromkeys(symbols_in(guard)))
                raise PipelineError(
                    "SK802",
                    f"the captured graph needs {text_of(guard, self.names)}, but {given} in a microbatch",
                    "Give other sizes, or capture with inputs of these sizes.",
                    sorted(self.inputs),
                )


def graph_sizes(graph: fx.Graph, numbers: Mapping[str, object]) -> GraphSizes:
    """Return the symbolic sizes of a graph.

    Args:
        graph: the graph that was split.
        numbers: node of the parent -> its value at capture.
    """
    inputs = graph.find_nodes(op="placeholder")
    environment: Any = next((e for node in inputs if (e := _environment(value_of(node))) is not None), None)
    if environment is None:
        return GraphSizes()
    shapes = {str(n.target): shape_of(value) for n in inputs if isinstance(value := value_of(n), torch.Tensor)}
    shown = {size for shape in shapes.values() for size in shape if isinstance(size, str)}
    # ShapeEnv.backed_var_to_val, var_to_range, guards, replacements: 2.11, 2.13, 2.15
    captured = {str(symbol): int(value) for symbol, value in environment.backed_var_to_val.items()}
    ranges = {str(symbol): _limits(found) for symbol, found in environment.var_to_range.items() if str(symbol) in shown}
    known = dict.fromkeys(expression_of(_replaced(guard.expr, environment)) for guard in environment.guards)
    symbolic = {name: expression_of(v) for name, v in numbers.items() if isinstance(v, torch.SymInt)}
    computed = {name: e for name, e in symbolic.items() if is_known(e) and shown.issuperset(symbols_in(e))}
    guards = tuple(g for g in known if set(symbols_in(g)))
    return GraphSizes(shapes, captured, ranges, guards, computed, _squares(graph))


def shape_of(value: torch.Tensor) -> tuple[Expression, ...]:
    """Return the shape of a tensor at capture; a size that cannot be evaluated is the number that it was."""
    return tuple(e if is_known(e := expression_of(size)) else _torch.size_hint(size) for size in value.shape)


def _squares(graph: fx.Graph) -> frozenset[str]:
    """Return the symbols that are in two dimensions of one value of a graph, or of the scores inside an attention."""
    found = set[str]()
    values = (leaf for node in graph.nodes for leaf in _torch.pytree.tree_leaves(value_of(node)))
    shapes = [shape_of(value) for value in values if isinstance(value, torch.Tensor)]
    for shape in (*shapes, *map(_scores, graph.nodes)):
        each = [symbol for size in shape for symbol in dict.fromkeys(symbols_in(size))]
        found.update(symbol for symbol in each if each.count(symbol) > 1)
    return frozenset(found)


def _scores(node: fx.Node) -> tuple[Expression, ...]:
    """Return the positions of query and key whose products an attention op computes; empty for other nodes."""
    if _ATTENTION not in str(node.target):
        return ()
    given = [*node.args, *node.kwargs.values()][:2]  # query and key, which may be one node
    read = [value_of(n) for n in given if isinstance(n, fx.Node)]
    return tuple(shape_of(value)[-2] for value in read if isinstance(value, torch.Tensor) and value.dim() > 1)


def _environment(value: object) -> Any:
    """Return the shape environment of a value's symbolic sizes; ``None`` if it has none."""
    sizes: Any = value.shape if isinstance(value, torch.Tensor) else ()
    return next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)


def _replaced(condition: Any, environment: Any) -> Any:
    """Return a condition on the symbols that are left after equal ones were made one."""
    while (found := condition.xreplace(environment.replacements)) != condition:
        condition = found
    return condition


def _limits(found: Any) -> tuple[int, int | None]:
    """Return the limits of a symbol; the least size is 0 or more."""
    low = int(found.lower) if found.lower.is_Integer else 0
    return max(0, low), int(found.upper) if found.upper.is_Integer else None
