"""Describes the symbolic sizes of a graph that was captured with ``dynamic=True``, and reads them off its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from splitkit import _torch
from splitkit.errors import PipelineError
from splitkit.graph.size_expressions import Expression, evaluated, expression_of, is_known, symbols_in, text_of
from splitkit.graph.symbols import value_of

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
