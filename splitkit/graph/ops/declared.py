"""What users say of functions, methods, operators and modules of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit.graph.ops.facts import Effects, Facts, Slot
from splitkit.graph.ops.modules import lookup, state
from splitkit.graph.ops.schema import members
from splitkit.inputkinds import refuse_objects
from splitkit.sharing import CHECKS

_DECLARED: dict[Any, Facts] = dict.fromkeys((*CHECKS, refuse_objects), Facts(check=True))
_WATCHERS: list[Callable[[], None]] = []


def on_declare(forget: Callable[[], None]) -> None:
    """Call ``forget`` at each declaration: what was known of targets may no longer hold."""
    _WATCHERS.append(forget)


def declare(
    target: Callable[..., Any] | str | OpOverload | type[nn.Module],
    *,
    writes: tuple[int | str, ...] = (),
    aliases: tuple[int | str, ...] = (),
    random: bool = False,
    impure: bool = False,
) -> None:
    """Say what a function, method, operator or leaf-module type of your own does; it overrides what splitkit knows.

    Args:
        target: a function, the name of a method, an operator, or a module class (exactly that class).
        writes: positions or keyword names of the arguments that it writes.
        aliases: positions or keyword names of the arguments that its output may share memory with.
        random: it draws random numbers.
        impure: it acts on the outside world.

    A custom operator (any namespace but those of torch and torchvision) that is not declared is taken to be random: its
    schema says what it writes but not what it draws. A function or leaf module that is not declared is taken to read
    and write every parameter and buffer of the model, which it may hold in a list or a closure. Buffers of a declared
    module are taken to be written.
    """
    spellings = _spellings(target)
    names = _parameters(spellings[-1])
    facts = Facts(
        writes=tuple(_slot(item, names) for item in writes),
        aliases=tuple(_slot(item, names) for item in aliases),
        random=random,
        impure=impure,
    )
    _DECLARED.update(dict.fromkeys(spellings, facts))
    for forget in _WATCHERS:
        forget()


def _spellings(target: Any) -> tuple[Any, ...]:
    """The targets that mean it: a custom operator is the object that was defined, its packet and its overloads."""
    packet = getattr(getattr(target, "_opoverload", None), "overloadpacket", target)
    return (target, packet, *members(packet)) if isinstance(packet, OpOverloadPacket) else (target,)


def _slot(item: int | str, names: tuple[str, ...]) -> Slot:
    if isinstance(item, int):
        return item, names[item] if item < len(names) else ""
    return names.index(item) if item in names else -1, item


def _parameters(target: Any) -> tuple[str, ...]:
    if isinstance(target, OpOverload):
        return tuple(a.name for a in target._schema.arguments)
    if isinstance(target, type):
        return tuple(inspect.signature(cast(Any, target).forward).parameters)[1:]
    try:
        return tuple(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return ()


def declared_facts(target: Any) -> Facts | None:
    """What users say of a function, method or operator."""
    return _DECLARED.get(target)


def declared_effects(node: Node, root: nn.Module) -> Effects | None:
    """What a node does by its declaration; ``None`` if there is none."""
    if node.op != "call_module":
        facts = declared_facts(node.target)
        return None if facts is None else facts.of(node)
    module = lookup(root, node.target)
    facts = _DECLARED.get(type(module))
    if facts is None:
        return None
    return replace(facts.of(node), reads_state=state(module), writes_state=tuple(module.buffers()))
