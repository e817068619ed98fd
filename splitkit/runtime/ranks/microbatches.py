"""Splits a batch into microbatches."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf
from typing import Any

import torch
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.checks import is_whole, shown
from splitkit.engine.graph_data import name_of_dtype
from splitkit.errors import PipelineError
from splitkit.graph.call_signature import input_binder
from splitkit.graph.size_expressions import Expression, evaluated
from splitkit.runtime.ranks.border_values import BorderValue, Sizes, laid_out, memory_order
from splitkit.runtime.ranks.stage_chain import Chain
from splitkit.runtime.ranks.step_agreement import form_of
from splitkit.runtime.ranks.step_losses import Reduction, shares_of

BatchDims = Mapping[str, int | None]
"""Input -> the dimension that holds its batch; ``None`` if every microbatch gets the input as it is."""

Rivals = tuple[tuple[str, int], ...]
"""Dimensions, as (input, dimension), that may hold the batch."""

Extent = tuple[int, ...]
"""Sizes of a symbol: at capture and in a call, or in each microbatch."""


@dataclass(frozen=True)
class StepSizes:
    """The sizes of the microbatches of a step.

    Attributes:
        sizes: microbatch -> the sizes of its inputs.
        shares: microbatch -> the factor of its loss in the loss of the step; empty on ranks that compute no loss.
    """

    sizes: tuple[Sizes, ...]
    shares: tuple[Fraction | float, ...] = ()


@dataclass(frozen=True)
class MessageShapes:
    """The shapes in which values cross the borders in a step.

    Attributes:
        sizes: the sizes of every microbatch; empty if they differ.
        padded: value -> the number of elements that are sent; empty if all microbatches have the same sizes.
    """

    sizes: Sizes = field(default_factory=dict)
    padded: Mapping[str, int] = field(default_factory=dict)

    def of(self, value: BorderValue) -> BorderValue:
        """Return how a value crosses a border."""
        count = self.padded.get(value.name)
        return value.at(self.sizes) if count is None else replace(value, padded=count)


def message_shapes(chain: Chain, wanted: Sequence[Node], step: StepSizes) -> MessageShapes:
    """Return the shapes in which values cross the borders in a step; they are the same on all ranks.

    Args:
        chain: the stages.
        wanted: the values that the last stage needs.
        step: the sizes of all microbatches of the step.
    """
    different = list({tuple(each.items()): each for each in step.sizes}.values())
    if len(different) == 1:
        return MessageShapes(different[0])
    crossing = dict.fromkeys(n for stage in range(chain.stages - 1) for n in chain.border(stage, wanted))
    values = [chain.value(node) for node in crossing]
    largest = {v.name: max(v.at(sizes).like.numel() for sizes in different) for v in values if v.scalar is None}
    return MessageShapes(padded=largest)


# Holds the sizes of the microbatches of a step, and decides in which shapes values cross the borders in it.
#
# If all microbatches have the same sizes, each value is sent in its own shape. Torch's stages receive every microbatch
# into tensors of one shape, so if sizes differ, each value is sent as a flat tensor as large as its largest::
#
#     microbatch 0   [2, 5, 32]      320 elements, 320 sent
#     microbatch 1   [2, 3, 32]      192 elements, 320 sent


_OTHER_SIZES = " For other sizes, capture with dynamic=True; for a smaller last batch, drop_last=True."
EACH = "or give each microbatch: step(microbatches=[...])"
"""What works whatever the dimension of the batch is."""


@dataclass(frozen=True)
class DividedBatch:
    """The batch of a step, divided into microbatches.

    Attributes:
        whole: the inputs as they are given, for all microbatches together; empty if this rank is not given them all.
        inputs: microbatch -> its inputs, by the names that they have in the graph.
        targets: microbatch -> its target.
        sizes: the sizes of the microbatches, and the shares of their losses.
        undivided: why this rank cannot tell that it was given a batch; ``None`` if it was.
    """

    whole: dict[str, Any]
    inputs: list[dict[str, Any]]
    targets: list[Any]
    sizes: StepSizes
    undivided: PipelineError | None = None


class BatchSplitter:
    """Splits the inputs and targets of a step, by the shapes with which the graph was captured.

    Raises:
        PipelineError: SK802 for ``batch_dims`` that name no dimension of an input.
    """

    def __init__(
        self,
        chain: Chain,
        microbatches: int,
        device: torch.device,
        needed: Collection[str] | None = None,
        batch_dims: BatchDims | None = None,
    ) -> None:
        self._binder, self._count, self._device = input_binder(chain.split.module), microbatches, device
        self._wanted, self._sizes, self._constants = chain.facts.inputs, chain.facts.sizes, chain.facts.constants
        self._needed = self._wanted.keys() if needed is None else needed
        self._likes = {name: like for name, like in self._wanted.items() if like is not None}
        self._named = dict(batch_dims or {})
        for name, dim in self._named.items():
            most = self._likes[name].dim() if name in self._likes else inf if name == "target" else 0
            if dim is not None and not (is_whole(dim) and dim < most):
                raise PipelineError(
                    "SK802",
                    f"batch_dims has {name!r}: {shown(dim)}",
                    f"Name a dimension, from 0 on, of one of {', '.join(self._likes)}, or of the target.",
                )

    def divide(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, reduction: Reduction | None
    ) -> DividedBatch:
        """Return the microbatches of a step.

        If the graph has symbolic sizes, the rows are shared out as evenly as possible. An input that this rank does not
        read may be missing, or ``None``.

        Args:
            args: the inputs.
            kwargs: the keyword inputs; or ``microbatches``, with the inputs of each.
            target: the target, or with ``microbatches`` a list of them.
            reduction: the reduction of the losses; ``None`` on a rank that computes none.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take, of another dtype or shape than captured, or
                whose batch may be in several dimensions; and as `targets` and `shares_of`.
        """
        rest = {name: value for name, value in kwargs.items() if name != "microbatches"}
        each, rows, error = kwargs.get("microbatches"), tuple[int, ...](), None
        if each is None:
            values = self._bound(args, rest)
            whole = {} if any(values[name] is None for name in self._likes) else values
            found = self._division(values)
            inputs, rows = self._cut(values, found), found.rows or (1,) * self._count
            targets = self.targets(target, rows, found)
            if not found.rows and self._count > 1:
                given = {name: like if values[name] is None else values[name] for name, like in self._likes.items()}
                error = no_batch(given, self._count)
        else:
            inputs, targets = self.given(each), self.given_targets(target)
            whole = {name: [own[name] for own in inputs] for name in self._wanted}
        for name, like in self._likes.items():
            for own in (each for each in inputs if each[name] is not None):
                own[name] = laid_out(own[name], memory_order(like))
        sizes = tuple(self._sizes.bound(own) for own in inputs)
        if not rows:
            rows = self._rows(sizes) if reduction == "mean" else (1,) * self._count
        batch = [own if target is None else {**own, "target": t} for own, t in zip(inputs, targets, strict=True)]
        shares = () if reduction is None else shares_of(reduction, rows, batch)
        return DividedBatch(whole, inputs, targets, StepSizes(sizes, shares), error)

    def _cut(self, values: Mapping[str, Any], found: Division) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch, on the device."""
        made: list[dict[str, Any]] = [{} for _ in range(self._count)]
        for name, value in values.items():
            own = value.to(self._device) if isinstance(value, torch.Tensor) else value
            dim = found.dims.get(name)
            parts = [own] * self._count if dim is None else own.split(found.lengths[name], dim)
            for inputs, part in zip(made, parts, strict=True):
                inputs[name] = part
        return made

    def given(self, microbatches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch as `divide` does, where the caller has divided the batch.

        Args:
            microbatches: the keyword inputs of each microbatch.

        Raises:
            PipelineError: SK802 for another number of microbatches, and as in `divide`.
        """
        if len(microbatches) != self._count:
            raise PipelineError(
                "SK802",
                f"{len(microbatches)} microbatches are given, and a step has {self._count}",
                f"Give {self._count}, or make the pipeline with microbatches={len(microbatches)}.",
            )
        made = [self._bound((), inputs) for inputs in microbatches]
        for inputs in made:
            for name, value in inputs.items():
                like = self._wanted[name]
                if isinstance(value, torch.Tensor) and like is not None:
                    fits = value.shape == like.shape if not self._sizes.inputs else value.dim() == like.dim()
                    if value.dtype != like.dtype or not fits:
                        raise _unfit(name, value, f"Give each microbatch {form_of(like)}, as captured.")
                    inputs[name] = value.to(self._device)
        return made

    def with_target(self, kwargs: Mapping[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """Return the keyword arguments and the target of a step, with the target among the former if it is an input."""
        if "target" not in self._wanted:
            return dict(kwargs), target
        given = kwargs.get("microbatches")
        if given is None:
            return {**kwargs, "target": target}, None
        if target is None:
            return dict(kwargs), None
        pairs = zip(given, self.given_targets(target), strict=False)
        return {**kwargs, "microbatches": [{**inputs, "target": own} for inputs, own in pairs]}, None

    def targets(self, target: Any, rows: Sequence[int], found: Division | None = None) -> list[Any]:
        """Return the target of each microbatch.

        Args:
            target: a tensor or a tree of them, with all microbatches concatenated in dimension 0, or in the dimension
                that was named.
            rows: the rows of each microbatch.
            found: how the inputs are divided.

        Raises:
            PipelineError: SK802 if the rows of a tensor cannot be shared out like the rows of the inputs, or if the
                inputs have their batch in another dimension and that of the target is not named.
        """
        leaves, spec = pytree.tree_flatten(target)
        inner = found is not None and bool(found.dims) and 0 not in found.dims.values() and "target" not in self._named
        parts = [self._shares(leaf, rows, inner) for leaf in leaves]
        return [pytree.tree_unflatten([part[i] for part in parts], spec) for i in range(self._count)]

    def given_targets(self, target: Any) -> list[Any]:
        """Return the target of each microbatch from a list of them; ``None`` is for all.

        Raises:
            PipelineError: SK802 for another number of them.
        """
        made = [None] * self._count if target is None else list(target)
        if len(made) != self._count:
            raise PipelineError(
                "SK802", f"{len(made)} targets for {self._count} microbatches", "Give the target of each microbatch."
            )
        return list(pytree.tree_map_only(torch.Tensor, lambda t: t.to(self._device), made))

    def _bound(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        parameters = [*inspect.signature(self._binder.forward).parameters]  # a dict of inputs is one of them
        missing = self._wanted.keys() & {*parameters[len(args) :]} - kwargs.keys() - {*self._needed}
        try:
            values = self._binder(*args, **kwargs, **dict.fromkeys(missing))
        except Exception as error:
            reason = f"the graph does not take these arguments: {error}"
            raise PipelineError("SK802", reason, "Give the inputs of the model.") from error
        found = dict(zip(self._wanted, values, strict=True))
        for name in self._sizes.inputs:
            if not isinstance(found[name], torch.Tensor):
                raise PipelineError("SK802", f"{name} is a {type(found[name]).__name__}", "Give a tensor.", [name])
        for name, constant in self._constants.items():
            if found[name] is not None and (type(found[name]), repr(found[name])) != (type(constant), repr(constant)):
                reason = f"{name} is {form_of(found[name])}, but the graph was captured with {shown(constant)}"
                remedy = "Capture with a tensor in its place, such as torch.tensor(2), or with this value."
                raise PipelineError("SK802", reason, remedy, [name])
        return found

    def _division(self, values: Mapping[str, Any]) -> Division:
        """Return how inputs are divided: as captured if they fit it, otherwise by the symbols that count rows."""
        likes = self._likes
        for name in likes:
            if values[name] is None and name in self._needed:
                raise PipelineError("SK802", f"{name} is None, but this rank reads it", "See Pipeline.needs.", [name])
        given = {name: values[name] for name in likes if isinstance(values[name], torch.Tensor)}
        shapes = {name: value.shape for name, value in given.items()}
        parts: Mapping[str, Sequence[Sequence[int]]] = {name: [likes[name].shape] * self._count for name in given}
        found = division(shapes, parts, self._named)
        if self._sizes.inputs and (found.unfit or not found.rows):
            sized, rows, rivals = self._symbolic_parts(given)
            other = division(shapes, sized, self._named, rows)
            if other.dims or other.unfit or not any(found.unfit.values()):
                found, parts = other, sized
                if not other.dims and not other.unfit and self._count > 1:
                    self._require_clear(rivals, given)
        require_fit(given, likes, parts, found, self._named, other=None if self._sizes.inputs else _OTHER_SIZES)
        self._require_equal_rows(given, found)
        return found

    def _require_equal_rows(self, given: Mapping[str, torch.Tensor], found: Division) -> None:
        """Refuse an input for every microbatch with symbolic rows, at capture as many as a divided one had."""
        captured, shapes = self._sizes.captured, self._sizes.inputs
        of = {name: (shapes[name][dim], *shapes[name]) for name, dim in found.dims.items() if name in shapes}
        counted = {captured[str(own[0])] for own in of.values() if own[0] in captured}
        other = {size for own in of.values() for size in own[1:] if size != own[0]}
        first = {name: shape[0] for name, shape in shapes.items() if shape and name in given}
        alike = [name for name, size in first.items() if captured.get(str(size)) in counted and size not in other]
        if {*alike} - found.dims.keys() - self._named.keys():
            raise _unequal({name: given[name].shape[0] for name in alike})

    def _symbolic_parts(
        self, given: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, list[list[int]]], tuple[int, ...], Rivals]:
        """Share out the rows as evenly as possible.

        Returns:
            Input -> its shape in each microbatch; the rows of each, if symbols count them; and what else may be rows.

        Raises:
            PipelineError: SK802 if inputs have different numbers of rows, or fewer than there are microbatches; or if
                several dimensions may hold the batch.
        """
        known, sizes = self._sizes, dict[str, int]()
        for name, shape in known.inputs.items():
            for symbol, size in zip(shape, given[name].shape, strict=False):
                if isinstance(symbol, str):
                    sizes.setdefault(symbol, size)
        extents = {symbol: (known.captured[symbol], size) for symbol, size in sizes.items()}
        groups, rivals = row_symbols(known.inputs, extents, known.squares, self._named)
        each, rows = [dict[str, int]()] * self._count, list[int]()
        if self._count > 1 and groups:
            symbols = tuple(symbol for group in groups.values() for symbol in group)
            self._require_clear(rivals, given)
            rows = self._rows_of(given, symbols)
            each = [dict.fromkeys(symbols, n) for n in rows]
        sized = [{**known.captured, **sizes, **own} for own in each]
        parts = {name: [[evaluated(size, own) for size in known.inputs[name]] for own in sized] for name in given}
        return parts, tuple(rows), rivals

    def _rows_of(self, given: Mapping[str, torch.Tensor], symbols: Collection[str]) -> list[int]:
        """Return the rows of each microbatch."""
        counts = dict[str, int]()
        for name, shape in self._sizes.inputs.items():
            dim = self._named.get(name, 0)
            if dim is not None and shape and shape[dim] in symbols and given[name].dim() > dim:
                counts[name] = given[name].shape[dim]
        total = next(iter(counts.values()))
        if len(set(counts.values())) > 1:
            raise _unequal(counts)
        if total < self._count:
            raise PipelineError(
                "SK802",
                f"{next(iter(counts))} has {total} rows for {self._count} microbatches",
                f"Give {self._count} rows or more, or leave the last batch out (drop_last=True in a DataLoader).",
                sorted(counts),
            )
        return [total // self._count + (i < total % self._count) for i in range(self._count)]

    def _require_clear(self, rivals: Rivals, given: Mapping[str, torch.Tensor]) -> None:
        """Refuse inputs whose batch may be in several dimensions."""
        for name, rival in rivals:
            varying = {dim for dim, size in enumerate(self._sizes.inputs[name]) if not isinstance(size, int)}
            dims = sorted(varying | {0, rival})
            ways = " or ".join(f"batch_dims={{{name!r}: {dim}}}" for dim in dims)
            raise PipelineError(
                "SK802",
                f"dimension {' or '.join(map(str, dims))} of {name}, {form_of(given[name])}, may hold the batch",
                f"Name the right one where you make the pipeline: {ways}; {EACH}.",
                [name],
            )

    def _rows(self, sizes: Sequence[Sizes]) -> tuple[int, ...]:
        """Return the rows of microbatches that the caller has divided.

        Raises:
            PipelineError: SK802 if several dimensions may hold the batch, which would weight losses differently.
        """
        extents = {symbol: tuple(own[symbol] for own in sizes) for symbol in sizes[0]}
        groups, rivals = row_symbols(self._sizes.inputs, extents, self._sizes.squares, self._named)
        counts = [*groups] or [(1,) * self._count]
        others = [extents[str(self._sizes.inputs[name][dim])] for name, dim in rivals]
        if len({tuple(Fraction(n, sum(own)) for n in own) for own in (*counts, *others)}) > 1:
            name = next(iter(self._sizes.inputs))
            raise PipelineError(
                "SK802",
                "several dimensions may count the rows of the microbatches, by which their losses are weighted",
                f"Name the right one where you make the pipeline, such as batch_dims={{{name!r}: 1}}; or give it "
                'another reduction than "mean".',
            )
        return counts[0]

    def _shares(self, leaf: Any, rows: Sequence[int], inner: bool) -> list[Any]:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or self._named.get("target", 0) is None:
            return [leaf] * self._count
        if inner and leaf.dim() > 1:
            raise PipelineError(
                "SK802",
                f"the target is {form_of(leaf)}, and the batch is not in dimension 0 of the inputs",
                "Name the dimension where you make the pipeline: batch_dims={..., 'target': 1}.",
            )
        dim = min(self._named.get("target") or 0, leaf.dim() - 1)
        even, found = len(set(rows)) == 1, leaf.shape[dim]
        if found % (self._count if even else sum(rows)):
            raise PipelineError(
                "SK802",
                f"the target has {found} rows for {self._count} microbatches"
                + ("" if even else f" of {', '.join(map(str, rows))} rows"),
                f"Give a multiple of {self._count if even else sum(rows)}.",
            )
        each = [found // self._count] * self._count if even else [n * (found // sum(rows)) for n in rows]
        return list(torch.split(leaf.to(self._device), each, dim))


def _unequal(counts: Mapping[str, int]) -> PipelineError:
    """Return the error for inputs with different numbers of rows."""
    text = ", ".join(f"{name} {rows}" for name, rows in counts.items())
    return PipelineError(
        "SK802",
        f"the inputs have different numbers of rows: {text}",
        "Give all inputs the same number of rows; make the pipeline with batch_dims={name: None} for an input "
        f"that every microbatch gets as it is; {EACH}.",
        sorted(counts),
    )


def require_fit(
    given: Mapping[str, torch.Tensor],
    likes: Mapping[str, torch.Tensor],
    parts: Mapping[str, Sequence[Sequence[int]]],
    found: Division,
    named: BatchDims,
    *,
    other: str | None,
) -> None:
    """Refuse an input that cannot be divided.

    Args:
        given: the tensors among the inputs.
        likes: input -> a tensor of the shape and dtype of one microbatch at capture.
        parts: input -> its shape in each microbatch.
        found: how they are divided.
        named: the dimensions that the caller named.
        other: what to do for other sizes, if the graph's are fixed; otherwise ``None``.

    Raises:
        PipelineError: SK802; names the input and what would fit.
    """
    for name, value in given.items():
        like, own, count = likes[name], parts[name], len(parts[name])
        if value.dtype == like.dtype and name not in found.unfit:
            continue
        if value.dtype == like.dtype and (dim := found.unfit[name]) is not None:
            parts_text = f"{count} microbatches of {list(own[0])}"
            raise PipelineError(
                "SK802",
                f"{name} is {form_of(value)}: {parts_text}, if dimension {dim} holds the batch",
                f"If so, name it where you make the pipeline: batch_dims={{{name!r}: {dim}}}; {EACH}.",
                [name],
            )
        dim, whole = named.get(name, 0), list(own[0])
        if dim is not None and whole:
            whole[dim] = sum(part[dim] for part in own)
        how = "it fits the other inputs"
        if other is not None:
            how = "as captured" if dim is None else f"{count} microbatches of {list(like.shape)} in dimension {dim}"
            how += "" if name in named else _elsewhere(name, value, like)
        remedy = f"Give {name_of_dtype(like.dtype)}{whole}: {how}; {EACH}.{other or ''}"
        raise _unfit(name, value, remedy)


def no_batch(given: Mapping[str, Any], count: int) -> PipelineError | None:
    """Return the error of a step whose inputs are all as large as in one microbatch; ``None`` if none has dimensions.

    Args:
        given: the inputs by name.
        count: the number of microbatches.
    """
    found = {name: value for name, value in given.items() if isinstance(value, torch.Tensor) and value.dim()}
    for name, value in found.items():
        rows, *rest = value.shape
        dtype = name_of_dtype(value.dtype)
        of_this = f" ({name} {dtype}{[rows // count, *rest]} for this batch)" if rows % count == 0 else ""
        return PipelineError(
            "SK802",
            f"no input is a batch of {count} microbatches: {name} is {form_of(value)}, as large as in one of them",
            f"Capture with the inputs of one microbatch{of_this}; or give {name} as "
            f"{dtype}{[rows * count, *rest]}{_elsewhere(name, value, value)}; {EACH}.",
            [name],
        )
    return None


def _elsewhere(name: str, value: torch.Tensor, like: torch.Tensor) -> str:
    """Return what to do if an input of several dimensions has its batch in another one than 0."""
    if value.dim() < 2 or value.dim() != like.dim():
        return ""
    dim = next((dim for dim in range(1, value.dim()) if value.shape[dim] != like.shape[dim]), 1)
    return f" (if another dimension than 0 holds the batch, name it: batch_dims={{{name!r}: {dim}}})"


def _unfit(name: str, value: torch.Tensor, remedy: str) -> PipelineError:
    return PipelineError("SK802", f"{name} is {form_of(value)}", remedy, [name])


# Finds the dimension along which each input of a step is divided into microbatches.
#
# An input is divided along the one dimension in which it is as large as all microbatches together. If it is as large as
# one of them, every microbatch gets it. For 4 microbatches:
#
#     captured                   given
#     input_ids      [2, 16]     [8, 16]       divided along dimension 0
#     position_ids   [3, 2, 16]  [3, 8, 16]    along dimension 1: as many rows as another input in dimension 0
#     mask           [16, 16]    [16, 16]      goes to every microbatch
#     x              [16, 2, 8]  [16, 8, 8]    refused unless the caller names dimension 1: it may be the sequence


@dataclass(frozen=True)
class Division:
    """How the inputs of a step are divided.

    Attributes:
        dims: input that is divided -> its dimension; every microbatch gets the others as they are.
        lengths: input that is divided -> its size in that dimension in each microbatch.
        unfit: input that cannot be divided -> the dimension along which it could be if the caller named it.
        rows: microbatch -> its rows; empty if no input is divided.
    """

    dims: Mapping[str, int]
    lengths: Mapping[str, tuple[int, ...]]
    unfit: Mapping[str, int | None]
    rows: tuple[int, ...]


def division(
    given: Mapping[str, Sequence[int]],
    parts: Mapping[str, Sequence[Sequence[int]]],
    named: BatchDims,
    rows: tuple[int, ...] = (),
) -> Division:
    """Decide how inputs are divided.

    Another dimension than 0 must be named, or have as many rows as the first input that is divided has in dimension 0.

    Args:
        given: input -> its shape.
        parts: input -> its shape in each microbatch.
        named: the dimensions that the caller named.
        rows: the rows of each microbatch, if they are known already.
    """
    dims, unfit = dict[str, int](), dict[str, int | None]()
    for name, shape in given.items():
        fits = _dims_that_fit(shape, parts[name])
        found = None if None in fits else next(iter(fits), None)
        if not fits or (len(parts[name]) > 1 and named.get(name, found) != found):
            unfit[name] = None
        elif found is not None:
            dims[name] = found
    lengths = {name: tuple(part[dim] for part in parts[name]) for name, dim in dims.items()}
    known = [own for name, own in lengths.items() if name in named] + [rows] * bool(rows)
    known += [own for name, own in list(lengths.items())[:1] if dims[name] == 0]
    unfit |= {name: dim for name, dim in dims.items() if dim > 0 and lengths[name] not in known}
    return Division(dims, lengths, unfit, known[0] if known and dims else ())


def _dims_that_fit(given: Sequence[int], parts: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the dimensions in which an input is as large as its parts together; ``None`` if it is like each part."""
    if any(len(part) != len(given) for part in parts):
        return []
    found: list[int | None] = [None] if all(list(part) == list(given) for part in parts) else []
    for dim, size in enumerate(given):
        rest = [(*part[:dim], *part[dim + 1 :]) for part in parts]
        if size == sum(part[dim] for part in parts) and all(r == (*given[:dim], *given[dim + 1 :]) for r in rest):
            found.append(dim)
    return found


def row_symbols(
    shapes: Mapping[str, tuple[Expression, ...]],
    extents: Mapping[str, Extent],
    squares: Collection[str],
    named: BatchDims,
) -> tuple[Mapping[Extent, tuple[str, ...]], Rivals]:
    """Return the symbols that count rows: the ones that the caller named, otherwise all of dimension 0.

    Symbols of the same extent count as one size, since export does not know that ``input_ids`` and ``labels`` have the
    same rows. A symbol that is two dimensions of one tensor, as the sequence is in attention, counts no rows.

    Args:
        shapes: input -> its shape.
        extents: symbol -> its extent.
        squares: symbols that are two dimensions of one tensor somewhere in the graph.
        named: the dimensions that the caller named.

    Returns:
        Extent -> the symbols at dimensions that hold the batch; with more than one, inputs differ in rows. And the
        dimensions that may hold the batch instead.
    """
    shapes = {name: shape for name, shape in shapes.items() if shape and named.get(name, 0) is not None}
    kinds = {
        name: [extents.get(size) if isinstance(size, str) else None for size in shape] for name, shape in shapes.items()
    }
    square = {extents[symbol] for symbol in squares if symbol in extents}
    at = {name: named.get(name) or 0 for name in shapes}
    asked = [name for name in shapes if name in named]
    first = dict.fromkeys(kind for name in shapes if (kind := kinds[name][at[name]]) is not None)
    if asked:
        lead = [kind for name in asked if (kind := kinds[name][at[name]]) is not None]
        beside = {kind for own in kinds.values() if not set(own).isdisjoint(lead) for kind in own}
        lead += [kind for kind in first if lead and kind not in beside and _varies(kind)]
    else:
        inner = {kind for own in kinds.values() for kind in own[1:]}
        lead = [kind for kind in first if kind not in inner] or [kind for kind in first if kind not in square]
        lead = [kind for kind in lead if _varies(kind)] or lead
    groups = {kind: tuple(str(shapes[n][at[n]]) for n in shapes if kinds[n][at[n]] == kind) for kind in lead}
    return groups, () if asked else tuple(_rivals(shapes, kinds, lead, square))


def _varies(extent: Extent) -> bool:
    return len(set(extent)) > 1


def _rivals(
    shapes: Mapping[str, tuple[Expression, ...]],
    kinds: Mapping[str, Sequence[Extent | None]],
    lead: Collection[Extent],
    square: Collection[Extent],
) -> Iterator[tuple[str, int]]:
    """Yield the dimensions that may hold the batch instead of dimension 0. Export fixes a size of 1, batch or not."""
    doubtful = not set(square).isdisjoint(lead)
    at = {name: own.index(kind) for name, own in kinds.items() for kind in own if kind in lead}
    ones = [name for name, dim in at.items() if dim == 0 and shapes[name][1:2] == (1,)]
    for name, own in kinds.items():
        if lead and name not in at:
            continue
        for dim, kind in enumerate(own):
            is_own = kind in lead and dim == at[name]
            is_one = shapes[name][dim] == 1 and (dim < at.get(name, 0) or (dim == 1 and len(ones) == len(at)))
            if is_one or (kind is not None and (doubtful or not (is_own or kind in square))):
                yield name, dim
