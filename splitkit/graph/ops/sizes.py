"""Which arguments a node asks only for their size, dtype and device: ``empty_like`` reads no memory."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import nodes_in
from splitkit.graph.ops.names import torch_name
from splitkit.graph.symbols import value_of

_NAMES = (("self", "input", "tensor"), ("other", "the_template"))  # of the first argument and the second


def sizes_only(node: Node) -> tuple[Node, ...]:
    """The arguments whose memory a node does not read, although it takes them: only what describes a tensor."""
    positions = _positions(node)
    if not positions:
        return ()
    args, kwargs = list[object](node.args), dict[str, object](node.kwargs)
    asked: dict[Node, None] = {}
    for position in positions:
        given = args[position] if position < len(args) else _pop(kwargs, _NAMES[position])
        if position < len(args):
            args[position] = None
        if isinstance(given, Node) and _is_plain(given):
            asked[given] = None
        else:
            args.append(given)
    return tuple(a for a in asked if a not in nodes_in((args, kwargs)))


def _pop(kwargs: dict[str, object], names: tuple[str, ...]) -> object:
    return next((kwargs.pop(name) for name in names if name in kwargs), None)


def _positions(node: Node) -> tuple[int, ...]:
    """The positions of arguments of which sizes alone are read."""
    target: Any = node.target
    if target is getattr:
        return (0,) if len(node.args) > 1 and node.args[1] in tables.SIZE_ATTRIBUTES else ()
    if target is len:
        first = node.args[0] if node.args else None
        return (0,) if isinstance(first, Node) and isinstance(value_of(first), torch.Tensor) else ()
    if node.op == "call_module":
        return ()
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        schema = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
        return tables.SIZES_OF.get(schema.removeprefix("aten::"), ())
    name = torch_name(target)
    return tables.SIZES_OF.get(name, ()) if name else ()


def _is_plain(argument: Node) -> bool:
    """Is it a tensor with strides, as far as is known? Sparse and nested ones keep indices and offsets in memory."""
    value = value_of(argument)
    if value is None:
        return True
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
