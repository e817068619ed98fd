"""Keep the effects that users declare for functions, methods, operators and modules of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch._ops import OpOverload  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.input_overlap import CHECKS, refuse_objects
from splitkit.graph.ops.facts import Effects, Facts, Slot, distinct_tensors, replace_effects
from splitkit.graph.ops.state_scans import SCANS
from splitkit.graph.ops.tuples import is_changed, module_tensors
from splitkit.graph.storages import held_in

_DECLARED: dict[Any, Facts] = {
    **dict.fromkeys((*CHECKS, refuse_objects), Facts(check=True)),
    **dict.fromkeys(SCANS, Facts()),
}
QUICK: dict[int, Any] = {}
"""What `splitkit.graph.ops.fast_path` has found about targets; each declaration empties it."""


def declare(
    target: Callable[..., Any] | str | OpOverload | type[nn.Module],
    *,
    writes: tuple[int | str, ...] = (),
    aliases: tuple[int | str, ...] = (),
    random: bool = False,
    impure: bool = False,
) -> None:
    """Declare the side effects of a function, method, operator or leaf-module class of your own.

    Args:
        target: a function, the name of a method, an operator, or a module class (not its subclasses).
        writes: positions or keyword names of the arguments that it writes.
        aliases: positions or keyword names of the arguments that its output may share memory with.
        random: whether it draws random numbers.
        impure: whether it has effects outside the graph, such as printing.

    Without a declaration, a custom operator (outside the namespaces of torch and torchvision) is assumed to be random,
    since its schema says what it writes but not whether it draws random numbers. A function or leaf module is assumed
    to read and write every parameter and buffer of the model, which it may hold in a list or a closure. The buffers of
    a declared module are assumed to be written. A declaration does not cover hooks, parametrizations or a ``forward``
    that replaces the class's: a module that has them, or contains one that does, counts as undeclared.
    """
    spellings = (target,) if isinstance(target, OpOverload) else _torch.spellings(target)
    names = _parameters(spellings[-1])
    facts = Facts(
        writes=tuple(_slot(item, names) for item in writes),
        aliases=tuple(_slot(item, names) for item in aliases),
        random=random,
        impure=impure,
    )
    _DECLARED.update(dict.fromkeys(spellings, facts))
    QUICK.clear()


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
    """Return what users have declared about a function, method or operator."""
    return _DECLARED.get(target)


def declared_module(node: Node, module: nn.Module) -> Effects | None:
    """Return the effects of a module call by the declaration of its class; ``None`` if none covers the module."""
    facts = _DECLARED.get(type(module))
    if facts is None or any(map(is_changed, module.modules())):
        return None
    in_lists = (t for m in module.modules() for value in vars(m).values() for t in held_in(value))
    read = distinct_tensors((*module_tensors(module), *in_lists))
    return replace_effects(facts.of(node), reads_state=read, writes_state=tuple(module.buffers()))
