"""Effects of operators from their schemas and tags, corrected by `op_tables`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit._torch import is_written
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.argument_rules import rule_for
from splitkit.graph.ops.facts import UNKNOWN, Facts, Slot

_BITS = frozenset(f"__{i}{op}__" for i in ("", "i") for op in ("and", "or", "xor", "lshift", "rshift"))
_MAYBE_ALIASING = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)


@cache
def schema_facts(op: OpOverload) -> Facts:
    """Return what is known about an overload."""
    schema, namespace = op._schema, op.namespace
    arguments, name = schema.arguments, schema.name.split("::")[-1]
    key = name if namespace == "aten" else f"{namespace}::{name}"
    names = tuple(a.name for a in arguments)
    slots = [((-1 if a.kwarg_only else i), a.name) for i, a in enumerate(arguments)]
    writes = _written(op, key, slots)
    check = "_assert" in name or name.startswith(("sym_constrain", "_async_error", "_linalg_check"))
    # an op without results, writes or checks can only be called for its effect on the outside world
    silent = not schema.returns and not writes and not check
    rule, lies = rule_for(name, names), op_tables.LIES.get(key, ())
    aliases = [s for i, s in enumerate(slots) if i in lies or may_share(arguments[i], schema.returns)]
    # a rule knows why an op is tagged (dropout: returns its input in eval mode; batch_norm: its running statistics)
    tagged = _MAYBE_ALIASING in op.tags and rule is None
    return Facts(
        name=name,
        names=names,
        types=tuple(str(a.type) for a in arguments),
        positional=sum(not a.kwarg_only for a in arguments),
        defaults={a.name: a.default_value for a in arguments if a.has_default_value()},
        writes=tuple(sorted(writes)),
        aliases=tuple(sorted(aliases)),
        everything=lies is op_tables.ALL or tagged or namespace == "c10d",
        random=_packet_random(namespace, name) or not (namespace in op_tables.TRUSTED or key in op_tables.READ),
        impure=namespace in op_tables.COLLECTIVES or namespace == "profiler" or silent,
        check=check,
        ambient=namespace == "streams" or name == "_backward",
        same_sizes=bool(writes) and namespace == "aten" and not _resizes(op, name),
        rule=rule,
        yields_tuple=len(schema.returns) > 1 or any("List[" in str(r.type) for r in schema.returns),
    )


def _written(op: OpOverload, key: str, slots: list[Slot]) -> set[Slot]:
    if op.namespace == "c10d":  # its schemas declare no write at all: allreduce_(Tensor[] tensors, ...)
        return set(slots)
    declared = {s for s, a in zip(slots, op._schema.arguments, strict=True) if is_written(a)}
    return declared | {slots[i] for i in op_tables.LIES_WRITE.get(key, ())}


def may_share(argument: Any, returns: Iterable[Any]) -> bool:
    """Whether a return may share memory with an argument; lists of tensors have no alias set and match any."""
    info = argument.alias_info
    if info is None:
        return False
    mine = info.before_set | info.after_set
    theirs = [r.alias_info.before_set | r.alias_info.after_set for r in returns if r.alias_info is not None]
    return any(not mine or not t or "*" in mine | t or mine & t for t in theirs)


@cache
def _packet_random(namespace: str, name: str) -> bool:
    """Whether any overload of the op, or of the op without its trailing underscore, is random."""
    if name in op_tables.RANDOM:
        return True
    for candidate in {name, name.rstrip("_")}:
        packet = getattr(getattr(torch.ops, namespace), candidate, None)
        if isinstance(packet, OpOverloadPacket) and any(map(_tagged_random, overloads_of(packet))):
            return True
    return False


def _tagged_random(op: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return True
    return any("Generator" in str(a.type) for a in op._schema.arguments)


def overloads_of(packet: Any) -> list[OpOverload]:
    """Return the overloads of a packet."""
    return [getattr(packet, o) for o in packet.overloads()]


@cache
def packet_facts(packet: OpOverloadPacket, outs: bool = False) -> tuple[Facts, ...]:
    """Return the facts of a packet's functional and in-place overloads, and of those with ``out`` if ``outs``."""
    return tuple(schema_facts(op) for op in overloads_of(packet) if is_registered(op) and (outs or not _is_out(op)))


@cache
def named_facts(name: str) -> tuple[Facts, ...]:
    """Return the `packet_facts` of ``aten::name``; empty if there is no such op."""
    packet = getattr(torch.ops.aten, name, None) if name in _BITS or not name.startswith("__") else None
    return packet_facts(packet) if isinstance(packet, OpOverloadPacket) else ()


def is_registered(op: OpOverload) -> bool:
    """Whether an overload is an operator; TorchScript has others without tensors, such as aten::sort.int of lists."""
    schema = op._schema
    key = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return key in _registered()


@cache
def _registered() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def _resizes(op: OpOverload, name: str) -> bool:
    """Whether an op may change the size of what it writes; one with ``out`` does if that has another size."""
    return torch.Tag.inplace_view in op.tags or name in op_tables.RESIZES or _is_out(op)


def _is_out(op: OpOverload) -> bool:
    return any(a.is_out for a in op._schema.arguments)


def matching_overloads(node: Node, overloads: tuple[Facts, ...]) -> tuple[Facts, ...]:
    """Return the overloads that a call could mean; all of them if it contradicts each."""
    return tuple(f for f in overloads if _fits(node, f)) or overloads


def _fits(node: Node, facts: Facts) -> bool:
    """Whether a call could mean an overload; only a clear contradiction excludes it."""
    given = dict(zip(facts.names[: facts.positional], node.args, strict=False))
    if len(node.args) > facts.positional or not (node.kwargs.keys() <= {*facts.names, "out", "inplace"}):
        return False
    given.update(node.kwargs)
    for name, kind in zip(facts.names, facts.types, strict=True):
        value = given.get(name, UNKNOWN)
        if value is UNKNOWN:
            if name not in facts.defaults:
                return False
        elif isinstance(value, (bool, int, float)):
            if kind in ("Tensor", "Optional[Tensor]", "List[Tensor]"):
                return False
        elif isinstance(value, (tuple, list)) and "List[" not in kind:
            return False
    return True
