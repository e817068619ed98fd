"""Encodes the symbolic sizes of a graph as JSON data, and decodes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from splitkit.engine.serialization.json_fields import JsonField
from splitkit.graph.size_expressions import Expression, is_known, symbols_in
from splitkit.runtime.ranks.graph_sizes import GraphSizes, Sizes


def encode_sizes(sizes: GraphSizes) -> dict[str, Any]:
    """Encode the symbolic sizes of a graph."""
    return {
        "inputs": {name: encode_shape(shape) for name, shape in sizes.inputs.items()},
        "captured": dict(sizes.captured),
        "ranges": {symbol: list(limits) for symbol, limits in sizes.ranges.items()},
        "guards": encode_shape(sizes.guards),
        "computed": {name: _encode(size) for name, size in sizes.computed.items()},
        "squares": sorted(sizes.squares),
    }


def decode_sizes(data: JsonField) -> GraphSizes:
    """Decode the symbolic sizes of a graph.

    Raises:
        FileError: SK505 for damaged data.
    """
    captured = {symbol: size.whole() for symbol, size in data["captured"].fields()}
    return GraphSizes(
        {name: decode_shape(shape, captured) for name, shape in data["inputs"].fields()},
        captured,
        {symbol: _limits(limits) for symbol, limits in data["ranges"].fields()},
        tuple(map(_decode, data["guards"].items())),
        {name: _known(size, captured) for name, size in data["computed"].fields()},
        # folders that older versions wrote do not say it
        frozenset(item.text() for item in data["squares"].items()) if "squares" in data.value else frozenset(),
    )


def encode_shape(shape: Sequence[Expression]) -> list[Any]:
    """Encode expressions: numbers, names of symbols, and lists of a function and its arguments."""
    return [_encode(size) for size in shape]


def decode_shape(data: JsonField, captured: Sizes) -> tuple[Expression, ...]:
    """Decode expressions that can be evaluated.

    Args:
        data: what `encode_shape` returned.
        captured: symbol -> its size at capture.

    Raises:
        FileError: SK505 for damaged data.
    """
    return tuple(_known(size, captured) for size in data.items())


def _encode(size: Expression) -> Any:
    return [size[0], *map(_encode, size[1:])] if isinstance(size, tuple) else size


def _known(data: JsonField, captured: Sizes) -> Expression:
    found = _decode(data)
    if not is_known(found) or not captured.keys() >= set(symbols_in(found)):
        raise data.damaged("an expression of known symbols and functions")
    return found


def _decode(data: JsonField) -> Expression:
    if isinstance(data.value, str):
        return data.text()
    if isinstance(data.value, list):
        name, *arguments = data.items() if data.value else [data]
        return (name.text(), *map(_decode, arguments))
    if not isinstance(data.value, int) or isinstance(data.value, bool):
        raise data.damaged("a size")
    return data.value


def _limits(data: JsonField) -> tuple[int, int | None]:
    limits = list(data.items())
    if len(limits) != 2:
        raise data.damaged("a least and a largest size")
    low, high = limits
    return low.whole(), None if high.value is None else high.whole()
