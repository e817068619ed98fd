"""Encodes the facts about the split graph that a pipeline needs (`ChainFacts`) as JSON data, and decodes them."""

from __future__ import annotations

from typing import Any

import torch

from splitkit.engine.serialization.argument_data import dtype_of, name_of_dtype
from splitkit.engine.serialization.json_fields import JsonField
from splitkit.pipeline.inseparable_nodes import SCALARS
from splitkit.runtime.folder.size_data import decode_shape, decode_sizes, encode_shape, encode_sizes
from splitkit.runtime.ranks.border_values import BorderValue
from splitkit.runtime.ranks.graph_sizes import GraphSizes, Sizes
from splitkit.runtime.ranks.stage_chain import Chain, ChainFacts


def encode_facts(chain: Chain) -> dict[str, Any]:
    """Encode the facts of a chain; of its values only those that cross a border, and the outputs.

    Raises:
        PipelineError: SK801 for a value that cannot be sent.
    """
    facts = chain.facts
    wanted = chain.split.module.graph.output_node().all_input_nodes
    crossing = dict.fromkeys(n for stage in range(chain.stages - 1) for n in chain.border(stage, wanted))
    outputs = dict.fromkeys(n for n in wanted if n in chain.stage_of and not chain.value(n).unsendable)
    return {
        "values": {node.name: _encode_value(chain.value(node).sent(True)) for node in {**crossing, **outputs}},
        "inputs": {name: None if like is None else _encode_like(like) for name, like in facts.inputs.items()},
        "draws": list(facts.draws),
        "writes": list(facts.writes),
        "identity": dict(facts.identity),
        **({"sizes": encode_sizes(facts.sizes)} if facts.sizes.inputs else {}),
        "captured": sorted(facts.captured),
        **({"costly": facts.costly} if facts.costly is not None else {}),
        **({"constants": dict(facts.constants)} if facts.constants else {}),
    }


def decode_facts(data: JsonField) -> ChainFacts:
    """Decode the facts of a chain.

    Raises:
        FileError: SK505 for damaged data.
    """
    inputs = {name: None if like.value is None else like_of(like) for name, like in data["inputs"].fields()}
    sizes = decode_sizes(data["sizes"]) if "sizes" in data.value else GraphSizes()
    return ChainFacts(
        {name: _decode_value(value, sizes.captured) for name, value in data["values"].fields()},
        inputs,
        tuple(item.flag() for item in data["draws"].items()),
        tuple(item.text() for item in data["writes"].items()),
        {name: value.text() for name, value in data["identity"].fields()},
        sizes,
        frozenset(item.text() for item in data["captured"].items()),
        data["costly"].whole() if "costly" in data.value else None,
        {name: value.value for name, value in data["constants"].fields()} if "constants" in data.value else {},
    )


def like_of(data: JsonField) -> torch.Tensor:
    """Return a tensor on ``meta`` with the encoded shape and dtype."""
    return torch.empty(data["shape"].sizes(), dtype=dtype_of(data["dtype"]), device="meta")


def _encode_like(like: torch.Tensor) -> dict[str, Any]:
    return {"dtype": name_of_dtype(like.dtype), "shape": list(like.shape)}


def _encode_value(value: BorderValue) -> dict[str, Any]:
    scalar = None if value.scalar is None else value.scalar.__name__
    rest = {
        "requires_grad": value.like.requires_grad,
        "written": value.written,
        "scalar": scalar,
        "order": list(value.order),
        **({"sizes": encode_shape(value.shape)} if value.shape else {}),
    }
    return {"name": value.name, **_encode_like(value.like), **rest}


def _decode_value(data: JsonField, captured: Sizes) -> BorderValue:
    scalar = data["scalar"]
    kind = next((kind for kind in SCALARS if kind.__name__ == scalar.value), None)
    if kind is None and scalar.value is not None:
        raise scalar.damaged("null, bool, int or float")
    like, grad = like_of(data), data["requires_grad"].flag()
    if grad and not like.is_floating_point() and not like.is_complex():
        raise data["requires_grad"].damaged("false, for it is not a float")
    order = tuple(data["order"].sizes())
    if order and sorted(order) != list(range(like.dim())):
        raise data["order"].damaged("the dimensions of the shape, each once")
    shape = decode_shape(data["sizes"], captured) if "sizes" in data.value else ()
    if shape and len(shape) != like.dim():
        raise data["sizes"].damaged("a size for each dimension")
    like = like.requires_grad_(grad)
    return BorderValue(data["name"].text(), like, kind, data["written"].flag(), order=order, shape=shape)
