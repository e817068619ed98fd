"""Describe what one node does (`Effects`), and what is known about a callable before a call is seen (`Facts`)."""

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


def cache_by_target(about: Callable[..., Answer]) -> Callable[..., Answer]:
    """Cache a function of a target, except for users' targets: a cache would keep the tensors that they hold alive."""
    remember = cache(about)

    @wraps(about)
    def answer(target: Any, *rest: Any) -> Answer:
        return remember(target, *rest) if _lives_on(target) else about(target, *rest)

    return answer


def _lives_on(target: Any) -> bool:
    """Whether a target lives as long as the process: a name, or a function of a module of torch or Python."""
    if isinstance(target, (str, type, OpOverload, OpOverloadPacket)):
        return True
    if not isinstance(getattr(target, "__self__", None), (type, ModuleType, NoneType)):
        return False
    return str(getattr(target, "__module__", None) or "builtins").split(".")[0] in _MODULES


_MODULES = frozenset(("torch", "builtins", "operator", "_operator", "math"))

UNKNOWN: Any = object()  # a missing argument without a default, which may be anything
Slot = tuple[int, str]  # a parameter: its position (-1: by keyword only) and its name


@dataclass(frozen=True)
class Effects:
    """What one node may do.

    Attributes:
        writes: argument nodes whose storage may be written.
        aliases: argument nodes that an output may share storage with.
        reads_state: parameters and buffers of a called module.
        writes_state: parameters and buffers of a called module that may be written.
        random: the node draws from a random generator; the order and number of such calls matter.
        impure: the node acts on the outside world (print, hooks, unknown code); such nodes keep their order.
        check: the node does nothing but raise: it must run, in any order among checks.
        known: ``False`` if nothing is known about the target, so that every effect is assumed.
        ambient: the node changes the state in which later nodes run (default dtype, streams, vmap levels); no node may
            move across it.
        same_sizes: the tensors that the node writes keep their sizes, strides, dtype and device.
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
    """A target that describes the effects of its calls itself."""

    def effects(self, node: Node) -> Effects:
        """Return the effects of ``node``, which calls this target."""
        raise NotImplementedError


def replace_effects(effects: Effects, **changes: Any) -> Effects:
    """Return ``dataclasses.replace(effects, **changes)`` in a tenth of its time; most nodes of a graph need a call."""
    made = Effects.__new__(Effects)
    made.__dict__.update(effects.__dict__, **changes)
    return made


def union_effects(effects: Iterable[Effects]) -> Effects:
    """Return the effects that any of the given ones has."""
    found = [e for e in effects if e is not PURE]
    if len(found) < 2:
        return found[0] if found else PURE
    return Effects(
        tuple(dict.fromkeys(n for e in found for n in e.writes)),
        tuple(dict.fromkeys(n for e in found for n in e.aliases)),
        distinct_tensors(t for e in found for t in e.reads_state),
        distinct_tensors(t for e in found for t in e.writes_state),
        random=any(e.random for e in found),
        impure=any(e.impure for e in found),
        check=any(e.check for e in found),
        known=all(e.known for e in found),
        ambient=any(e.ambient for e in found),
        same_sizes=all(e.same_sizes for e in found),
    )


def distinct_tensors(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors, each object once."""
    return tuple({id(t): t for t in tensors}.values())


def unknown_effects(node: Node, state: tuple[torch.Tensor, ...] = ()) -> Effects:
    """Return all effects that a node could have on its arguments, on ``state`` and on the ambient state."""
    reads = tuple(node.all_input_nodes)
    return Effects(reads, reads, state, state, random=True, impure=True, known=False, ambient=True)


def argument_nodes(value: object) -> tuple[Node, ...]:
    """Return the nodes inside an argument, each once."""
    if isinstance(value, Node):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(dict.fromkeys(n for v in value for n in argument_nodes(v)))
    if isinstance(value, dict):
        return argument_nodes(tuple(value.values()))
    return argument_nodes((value.start, value.stop, value.step)) if isinstance(value, slice) else ()


def first_argument(node: Node) -> tuple[Node, ...]:
    """Return the nodes in the first argument, or all argument nodes if there are only keyword arguments."""
    return argument_nodes(node.args[0]) if node.args else tuple(node.all_input_nodes)


@dataclass(frozen=True)
class Facts:
    """What is known about a callable without looking at a call.

    Attributes:
        name: its name without namespace and overload.
        names: the names of its parameters, in order.
        types: the types of its parameters, as a schema writes them.
        positional: how many parameters may be given by position.
        defaults: parameter name -> default value.
        writes: the parameters that it writes.
        aliases: the parameters that an output may share memory with.
        everything: whether an output may share memory with any argument.
        random, impure, check, ambient, same_sizes: as in `Effects`.
        rule: function that corrects the effects of a call by its arguments.
        yields_tuple: whether it returns a tuple or list.
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
        """Whether it computes fresh outputs and does nothing else."""
        effects = self.random or self.impure or self.check or self.ambient
        return not (self.writes or self.aliases or self.everything or effects or self.rule)

    def of(self, node: Node) -> Effects:
        """Return the effects of ``node``, which calls it."""
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
    return argument_nodes([_value_at(node, i, name) for i, name in slots])


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
        """Return the argument for the first of ``names`` that is a parameter, or ``default`` if none is."""
        facts, node = self.facts, self.node
        for name in names:
            if name in node.kwargs:
                return node.kwargs[name]
            if name in facts.names:
                i = facts.names.index(name)
                return node.args[i] if i < len(node.args) else facts.defaults.get(name, UNKNOWN)
        return default

    def nodes(self, *names: str) -> tuple[Node, ...]:
        """Return the nodes in the arguments of these parameters."""
        return argument_nodes([self.get(name, default=None) for name in names])

    def may(self, *names: str, default: object = UNKNOWN) -> bool:
        """Whether the argument could be true."""
        value = self.get(*names, default=default)
        return _open(value) or bool(value)

    def may_not(self, *names: str, default: object = UNKNOWN) -> bool:
        """Whether the argument could be false."""
        value = self.get(*names, default=default)
        return _open(value) or not value


def _open(value: object) -> bool:
    return value is UNKNOWN or isinstance(value, Node)


Rule = Callable[[Call, Effects], Effects]
