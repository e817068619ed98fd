"""What one node does (`Effects`), and what is known about a callable before a call is looked at (`Facts`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from types import ModuleType, NoneType
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

Answer = TypeVar("Answer")


def remembered(about: Callable[..., Answer]) -> Callable[..., Answer]:
    """``functools.cache`` for functions of a target, but not for users' targets, which may hold on to tensors."""
    remember = cache(about)

    @wraps(about)
    def answer(target: Any, *rest: Any) -> Answer:
        return remember(target, *rest) if _lives_on(target) else about(target, *rest)

    return answer


def _lives_on(target: Any) -> bool:
    """Is it a name, or a function that a module of torch or Python holds?"""
    if isinstance(target, (str, type, OpOverload, OpOverloadPacket)):
        return True
    if not isinstance(getattr(target, "__self__", None), (type, ModuleType, NoneType)):
        return False
    return str(getattr(target, "__module__", None) or "builtins").split(".")[0] in _MODULES


_MODULES = frozenset(("torch", "builtins", "operator", "_operator", "math"))

UNKNOWN: Any = object()  # an argument that is not there: it may be anything
Slot = tuple[int, str]  # a parameter: its position (-1: by keyword only) and its name


@dataclass(frozen=True)
class Effects:
    """What one node may do.

    Attributes:
        writes: argument nodes whose storage may be written.
        aliases: argument nodes that an output may share storage with.
        reads_state: parameters and buffers of a called module.
        writes_state: those of them that may be written.
        random: draws from a random generator; the order and number of such calls matter.
        impure: visible outside (print, hooks, unknown code); keeps its order among its like.
        check: only raises: must run, in any order among checks.
        known: ``False`` if nothing is known about the target, so that everything is assumed.
        ambient: changes the state in which later nodes run (default dtype, streams, vmap levels): nothing may move
            across it.
        same_sizes: what it writes keeps its size, strides, dtype and device.
    """

    writes: tuple[Node, ...] = ()
    aliases: tuple[Node, ...] = ()
    reads_state: tuple[torch.Tensor, ...] = ()
    writes_state: tuple[torch.Tensor, ...] = ()
    random: bool = False
    impure: bool = False
    check: bool = False
    known: bool = True
    ambient: bool = False
    same_sizes: bool = False


PURE = Effects()


class Described:
    """A target that says itself what a call of it does."""

    def effects(self, node: Node) -> Effects:
        """What ``node``, which calls it, does."""
        raise NotImplementedError


def view_of(node: Node) -> Effects:
    """``Effects(aliases=(node,))``, which is so common that the checks of a frozen dataclass are felt."""
    effects = Effects.__new__(Effects)
    effects.__dict__.update(PURE.__dict__, aliases=(node,))
    return effects


def union(effects: Iterable[Effects]) -> Effects:
    """All that any of them does."""
    found = [e for e in effects if e is not PURE]
    if len(found) < 2:
        return found[0] if found else PURE
    return Effects(
        tuple(dict.fromkeys(n for e in found for n in e.writes)),
        tuple(dict.fromkeys(n for e in found for n in e.aliases)),
        distinct(t for e in found for t in e.reads_state),
        distinct(t for e in found for t in e.writes_state),
        random=any(e.random for e in found),
        impure=any(e.impure for e in found),
        check=any(e.check for e in found),
        known=all(e.known for e in found),
        ambient=any(e.ambient for e in found),
        same_sizes=all(e.same_sizes for e in found),
    )


def distinct(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors, each object once."""
    return tuple({id(t): t for t in tensors}.values())


def unknown(node: Node, state: tuple[torch.Tensor, ...] = ()) -> Effects:
    """Everything that a node could do to its arguments, to the state that it reaches and to the ambient state."""
    reads = tuple(node.all_input_nodes)
    return Effects(reads, reads, state, state, random=True, impure=True, known=False, ambient=True)


def nodes_in(value: object) -> tuple[Node, ...]:
    """The nodes inside an argument, each once."""
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(dict.fromkeys(n for v in value for n in nodes_in(v)))
    if isinstance(value, dict):
        return nodes_in(tuple(value.values()))
    return nodes_in((value.start, value.stop, value.step)) if isinstance(value, slice) else ()


def first_argument(node: Node) -> tuple[Node, ...]:
    """The nodes in the first argument; all of them if there are keywords only."""
    return nodes_in(node.args[0]) if node.args else tuple(node.all_input_nodes)


@dataclass(frozen=True)
class Facts:
    """What is known about a callable without looking at a call.

    Attributes:
        name: without namespace and overload.
        names: the names of its parameters, in order.
        types: of its parameters, in the words of a schema.
        positional: how many parameters may be given by position.
        defaults: parameter name -> value.
        writes: parameters that it writes.
        aliases: parameters that an output may share memory with.
        everything: an output may share memory with any argument.
        random, impure, check, ambient, same_sizes: as in `Effects`.
        rule: amends the effects after a look at the arguments.
        yields_tuple: it returns a tuple or list.
    """

    name: str = ""
    names: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    positional: int = 0
    defaults: Mapping[str, object] = field(default_factory=dict)
    writes: tuple[Slot, ...] = ()
    aliases: tuple[Slot, ...] = ()
    everything: bool = False
    random: bool = False
    impure: bool = False
    check: bool = False
    ambient: bool = False
    same_sizes: bool = False
    rule: Rule | None = None
    yields_tuple: bool = False

    @property
    def plain(self) -> bool:
        """It computes fresh outputs and does nothing else."""
        effects = self.random or self.impure or self.check or self.ambient
        return not (self.writes or self.aliases or self.everything or effects or self.rule)

    def of(self, node: Node) -> Effects:
        """What a call of it does."""
        if self.plain:
            return PURE
        effects = Effects(
            _at(node, self.writes),
            tuple(node.all_input_nodes) if self.everything else _at(node, self.aliases),
            random=self.random,
            impure=self.impure,
            check=self.check,
            ambient=self.ambient,
            same_sizes=self.same_sizes,
        )
        return self.rule(Call(node, self), effects) if self.rule else effects


def _at(node: Node, slots: Iterable[Slot]) -> tuple[Node, ...]:
    return nodes_in([_value_at(node, i, name) for i, name in slots])


def _value_at(node: Node, position: int, name: str) -> object:
    if 0 <= position < len(node.args):
        return node.args[position]
    if position == 0 and name not in node.kwargs:  # schemas say `self`; in Python it is `input`, `tensor`, `x` ...
        return tuple(node.all_input_nodes)
    return node.kwargs.get(name)


class Call:
    """The arguments of a node by parameter name, defaults included."""

    def __init__(self, node: Node, facts: Facts) -> None:
        self.node, self.facts = node, facts

    def get(self, *names: str, default: object = UNKNOWN) -> object:
        """The argument of the first parameter that there is, or the default if there is none of them."""
        facts, node = self.facts, self.node
        for name in names:
            if name in node.kwargs:
                return node.kwargs[name]
            if name in facts.names:
                i = facts.names.index(name)
                return node.args[i] if i < len(node.args) else facts.defaults.get(name, UNKNOWN)
        return default

    def nodes(self, *names: str) -> tuple[Node, ...]:
        """The nodes in the arguments of these parameters."""
        return nodes_in([self.get(name, default=None) for name in names])

    def may(self, *names: str, default: object = UNKNOWN) -> bool:
        """Could the argument be true?"""
        value = self.get(*names, default=default)
        return _open(value) or bool(value)

    def may_not(self, *names: str, default: object = UNKNOWN) -> bool:
        """Could the argument be false?"""
        value = self.get(*names, default=default)
        return _open(value) or not value


def _open(value: object) -> bool:
    return value is UNKNOWN or isinstance(value, Node)


Rule = Callable[[Call, Effects], Effects]
