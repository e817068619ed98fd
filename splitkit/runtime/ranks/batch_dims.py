"""Finds the dimension along which each input of a step is divided into microbatches.

An input is divided along the one dimension in which it is as large as all microbatches together. If it is as large as
one of them, every microbatch gets it. For 4 microbatches:

    captured                   given
    input_ids      [2, 16]     [8, 16]       divided along dimension 0
    position_ids   [3, 2, 16]  [3, 8, 16]    along dimension 1: as many rows as another input in dimension 0
    mask           [16, 16]    [16, 16]      goes to every microbatch
    x              [16, 2, 8]  [16, 8, 8]    refused unless the caller names dimension 1: it may be the sequence
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from splitkit.graph.size_expressions import Expression

BatchDims = Mapping[str, int | None]
"""Input -> the dimension that holds its batch; ``None`` if every microbatch gets the input as it is."""

Rivals = tuple[tuple[str, int], ...]
"""Dimensions, as (input, dimension), that may hold the batch."""

Extent = tuple[int, ...]
"""Sizes of a symbol: at capture and in a call, or in each microbatch."""


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


@dataclass(frozen=True)
class RowSymbols:
    """The symbols that count the rows of a graph with symbolic sizes.

    Attributes:
        groups: extent -> the symbols at dimensions that hold the batch; with more than one, inputs differ in rows.
        rivals: dimensions that may hold the batch instead.
    """

    groups: Mapping[Extent, tuple[str, ...]]
    rivals: Rivals


def row_symbols(
    shapes: Mapping[str, tuple[Expression, ...]],
    extents: Mapping[str, Extent],
    squares: Collection[str],
    named: BatchDims,
) -> RowSymbols:
    """Return the symbols that count rows: the ones that the caller named, otherwise all of dimension 0.

    Symbols of the same extent count as one size, since export does not know that ``input_ids`` and ``labels`` have the
    same rows. A symbol that is two dimensions of one tensor, as the sequence is in attention, counts no rows.

    Args:
        shapes: input -> its shape.
        extents: symbol -> its extent.
        squares: symbols that are two dimensions of one tensor somewhere in the graph.
        named: the dimensions that the caller named.
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
    return RowSymbols(groups, () if asked else tuple(_rivals(shapes, kinds, lead, square)))


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
