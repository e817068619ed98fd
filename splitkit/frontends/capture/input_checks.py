"""Check the inputs of a captured graph, with a hook that Dynamo and strict export can trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.fx import _pytree as fx_pytree  # 2.11, 2.13, 2.15

from splitkit._torch import pytree
from splitkit.engine.codegen.part_modules import pickle_by_nodes

Size = int | str | None
"""The size of a dimension: fixed, the name of a symbol, or ``None`` where only torch's own check knows."""


@dataclass(frozen=True)
class ExpectedInput:
    """The shape or value that an input must have.

    Attributes:
        shape: sizes of a tensor; ``None`` if the input is not a tensor.
        value: number or string that was fixed at capture.
        is_value: whether a value was fixed.
    """

    shape: tuple[Size, ...] | None = None
    value: object = None
    is_value: bool = False


class InputCheck:
    """Refuses inputs that differ from the example in structure, fixed sizes or Python values.

    It needs nothing of the module but its graph and signature, so that the parent of a split can have it too. Where
    Dynamo traces the check, sizes and values are compared at compile time and become guards.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        self.spec: Any = gm._in_spec
        self.ranges: Any = dict(getattr(gm, "range_constraints", None) or {})
        self.limits = _limits(self.ranges)
        self.wanted = [_expected(node) for node in inputs]
        self.is_whole = all(map(_is_whole, inputs))

    def watch(self, gm: fx.GraphModule) -> None:
        """Register the check on ``gm``, so that modules unpickled from it have the check too."""
        gm.register_forward_pre_hook(self, with_kwargs=True)
        pickle_by_nodes(gm)

    def __call__(self, gm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RuntimeError for inputs of another size or value, ValueError for another structure."""
        if torch.compiler.is_compiling():
            self._require(_leaves(args, kwargs, self.spec))
            return
        # The usual case: everything as in the example, and nothing that only torch's check knows.
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.spec and self.is_whole and not self._refusal(leaves):
            return
        self._look_closely(gm, args, kwargs)

    def _look_closely(self, gm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run torch's own check, which is slow and names the input; then ours, for graphs without values."""
        from torch.export._unlift import _check_input_constraints_pre_hook  # 2.11, 2.13, 2.15

        read = SimpleNamespace(validate_inputs=True, range_constraints=self.ranges, graph=gm.graph, _in_spec=self.spec)
        _check_input_constraints_pre_hook(read, args, kwargs)  # type: ignore[no-untyped-call]
        self._require(_leaves(args, kwargs, self.spec))

    def _require(self, leaves: Sequence[Any]) -> None:
        if refusal := self._refusal(leaves):
            raise RuntimeError(refusal)

    def _refusal(self, leaves: Sequence[Any]) -> str:
        """Return what is wrong with inputs of the right structure; empty if nothing is."""
        sizes: dict[str, Any] = {}
        for i in range(min(len(self.wanted), len(leaves))):
            if refusal := self._input_refusal(self.wanted[i], leaves[i], sizes):
                return f"Expected input {i} {refusal}"
        return ""

    def _input_refusal(self, wanted: ExpectedInput, given: Any, sizes: dict[str, Any]) -> str:
        if wanted.is_value:
            same = type(given) is type(wanted.value) and given == wanted.value
            return "" if same else f"to be equal to {wanted.value}, as at capture"
        if wanted.shape is None:
            return ""
        if not isinstance(given, torch.Tensor):
            return "to be a tensor"
        if len(wanted.shape) != given.dim():
            return f"to have {len(wanted.shape)} dimensions, as at capture"
        for dim, size in enumerate(wanted.shape):
            if refusal := self._size_refusal(size, given.shape[dim], sizes):
                return f"at shape[{dim}] {refusal}"
        return ""

    def _size_refusal(self, wanted: Size, given: int, sizes: dict[str, Any]) -> str:
        if wanted is None:
            return ""
        if isinstance(wanted, int):
            return "" if given == wanted else f"to be equal to {wanted}, as at capture"
        low, high = self.limits.get(wanted, (None, None))
        if wanted in sizes and given != sizes[wanted]:
            return "to be equal to another size, as at capture"
        sizes[wanted] = given
        if low is not None and given < low:
            return f"to be >= {low}"
        return f"to be <= {high}" if high is not None and given > high else ""


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any) -> list[Any]:
    """Return the inputs in the order of the signature."""
    if len(args) != spec.child(0).num_children:
        raise RuntimeError("The graph takes other positional inputs: give the ones that it was captured with.")
    return list(fx_pytree.tree_flatten_spec((args, kwargs), spec))


def _expected(node: fx.Node) -> ExpectedInput:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return ExpectedInput(shape=tuple(map(_size, value.shape)))
    return ExpectedInput(value=value, is_value=True) if isinstance(value, (int, float, str)) else ExpectedInput()


def _size(size: int | torch.SymInt) -> Size:
    if isinstance(size, int):
        return size
    return str(size.node.expr) if size.node.expr.is_Symbol else None


def _is_whole(node: fx.Node) -> bool:
    """Return whether an `ExpectedInput` covers every check of this input."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return not isinstance(value, torch.SymInt) and all(_size(size) is not None for size in sizes)


def _limits(ranges: Mapping[Any, Any]) -> dict[str, tuple[int | None, int | None]]:
    """Return symbol -> (lower bound, upper bound), ``None`` where a bound is missing."""

    def bound(value: Any) -> int | None:
        return int(value) if getattr(value, "is_Integer", False) or isinstance(value, int) else None

    return {str(symbol): (bound(r.lower), bound(r.upper)) for symbol, r in dict(ranges).items()}
