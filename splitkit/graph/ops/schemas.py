"""Effects of operators from their schemas and tags, corrected by `op_tables`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit._torch import is_written
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import UNKNOWN, Call, Effects, Facts, Rule, Slot, first_argument

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
    # an op with `out` does if that has another size
    resizes = torch.Tag.inplace_view in op.tags or name in op_tables.RESIZES or _is_out(op)
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
        same_sizes=bool(writes) and namespace == "aten" and not resizes,
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
        for op in overloads_of(packet) if isinstance(packet, OpOverloadPacket) else ():
            generators = ("Generator" in str(a.type) for a in op._schema.arguments)
            if torch.Tag.nondeterministic_seeded in op.tags or any(generators):
                return True
    return False


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


# Rules for operators and functions whose effects depend on their arguments: a mode, a probability or an option.


def rule_for(name: str, parameters: Collection[str]) -> Rule | None:
    """Return the rule of an operator or function, by its name and the names of its parameters."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    if "dropout_p" in parameters:
        return _attention
    if "running_mean" in parameters and not any(w in name for w in _NO_STATISTICS):
        return _running_stats
    if "max_norm" in parameters and name in ("embedding", "embedding_bag"):
        return _embedding
    if name.startswith("fractional_max_pool") and "random_samples" not in parameters:
        return _random_samples
    return None


def dropout(call: Call, effects: Effects) -> Effects:
    """Dropout returns its input itself in eval mode and at p=0, whatever the schema says."""
    first, name = first_argument(call.node), call.facts.name
    inplace = name.endswith("_") or call.may("inplace", default=False)
    # 1d and 3d unsqueeze their input in place, whatever the mode
    written = inplace and (call.may("train", "training") or name.endswith("d"))
    kept = inplace or call.may_not("p") or call.may_not("train", "training")
    out = call.nodes("out")
    return Effects(
        (*out, *(first if written else ())),
        (*out, *(first if kept else ())),
        random=call.may("p") and call.may("train", "training"),
    )


def _rnn(call: Call, effects: Effects) -> Effects:
    random = call.may("dropout") and call.may("train")
    state = call.nodes("dropout_state") if random else ()  # cudnn keeps its generator in a tensor
    return replace(effects, random=random, writes=(*effects.writes, *state))


def _attention(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.may("dropout_p") and call.may("training", default=True))


_NO_STATISTICS = ("backward", "functional", "no_update", "no_training")


def _running_stats(call: Call, effects: Effects) -> Effects:
    running = call.nodes("running_mean", "running_var")
    others = tuple(n for n in effects.writes if n not in running)
    training = call.may("training", "train", "use_input_stats")
    return replace(effects, writes=(*others, *running) if training else others)


def _embedding(call: Call, effects: Effects) -> Effects:
    # with a max_norm the rows that are looked up are renormalized in place (embedding_bag takes its two in any order)
    if call.get("max_norm", default=None) is None:
        return effects
    return replace(effects, writes=(*effects.writes, *call.nodes("weight", "input")))


def _random_samples(call: Call, effects: Effects) -> Effects:
    return replace(effects, random=call.node.kwargs.get("_random_samples") is None)


def _einsum(call: Call, effects: Effects) -> Effects:
    if not call.node.args:
        return replace(effects, aliases=tuple(call.node.all_input_nodes))
    equation, *operands = call.node.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    several = isinstance(equation, str) and len(operands) > 1
    return effects if several else replace(effects, aliases=tuple(call.node.all_input_nodes))  # of one: a view


_BY_NAME: dict[str, Rule] = {
    **dict.fromkeys(op_tables.DROPOUTS, dropout),
    "native_dropout": lambda call, effects: replace(effects, random=call.get("train") is None or call.may("train")),
    **dict.fromkeys(op_tables.RNNS, _rnn),
    **dict.fromkeys(op_tables.RRELUS, lambda call, effects: replace(effects, random=call.may("training"))),
    "einsum": _einsum,
    "gumbel_softmax": lambda call, effects: replace(effects, random=True),
}
