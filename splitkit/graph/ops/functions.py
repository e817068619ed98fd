"""Effects of functions and methods without a schema: torch's own, and Python's operators and builtins."""

from __future__ import annotations

import builtins
import inspect
import logging
import math
import operator
import re
import warnings
from collections.abc import Callable, Hashable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.errors import GraphError
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import (
    PURE,
    Call,
    Effects,
    Facts,
    cache_by_target,
    first_argument,
    union_effects,
    unknown_effects,
)
from splitkit.graph.ops.schemas import dropout, matching_overloads, named_facts, rule_for
from splitkit.graph.scope import NEUTRAL, scopes

# ---------------------------------------------------------------- Python


class _Does(Enum):
    """What a Python function does to its arguments."""

    NOTHING = 0
    ALIAS = 1  # passes on its first argument
    ALIAS_ALL = 2
    WRITE = 3  # writes its first argument
    OUTSIDE = 4  # acts on the outside world


def _functions_of(module: Any) -> list[Callable[..., Any]]:
    opaque = (operator.call, operator.attrgetter, operator.itemgetter, operator.methodcaller)
    return [f for name, f in vars(module).items() if callable(f) and not name.startswith("__") and f not in opaque]


_PYTHON: dict[Any, _Does] = {
    **dict.fromkeys((*_functions_of(operator), *_functions_of(math)), _Does.NOTHING),
    **{f: _Does.WRITE for f in _functions_of(operator) if f"__{f.__name__}__" in op_tables.IN_PLACE_METHODS},
    **dict.fromkeys((operator.imatmul, operator.iconcat), _Does.WRITE),
    **dict.fromkeys((operator.getitem, operator.pos, getattr, next, iter, enumerate, reversed, sorted), _Does.ALIAS),
    **dict.fromkeys((tuple, list, dict, zip, max, min, sum, operator.concat, set, frozenset), _Does.ALIAS_ALL),
    **dict.fromkeys((print, setattr, delattr, warnings.warn, input, open), _Does.OUTSIDE),
    **dict.fromkeys((torch.device, torch.Size, torch.finfo, torch.iinfo, slice), _Does.NOTHING),
    **{getattr(builtins, k): _Does.NOTHING for k in op_tables.PURE_BUILTINS},
}


def is_python(node: Node) -> bool:
    """Whether a node calls one of the Python functions that `python_effects` knows."""
    return node.op == "call_function" and node.target in _PYTHON


def is_pure_python(target: object) -> bool:
    """Whether a target is a Python function that only computes when given tensors or numbers."""
    return isinstance(target, Hashable) and _PYTHON.get(target) is _Does.NOTHING


def python_effects(node: Node) -> Effects:
    """Return the effects of a Python function on tensors or numbers; `containers` knows lists and iterators."""
    what, first = _PYTHON[node.target], first_argument(node)
    if what is _Does.OUTSIDE:
        touched = tuple(node.all_input_nodes) if node.target in (setattr, delattr) else ()
        return Effects(touched, touched, impure=True)  # x.data = y: both share memory from now on
    if what is _Does.WRITE:
        aliases = tuple(node.all_input_nodes) if node.target is operator.setitem else first
        return Effects(first, aliases, same_sizes=True)
    if what is _Does.ALIAS_ALL:
        return Effects(aliases=tuple(node.all_input_nodes))
    if node.target is getattr and node.args[1:2] == ("grad",):  # written by `backward`, so the order matters
        return Effects(aliases=first, impure=True)
    if node.target is getattr and node.args[1:2] and node.args[1] in op_tables.SIZE_ATTRIBUTES:
        return PURE
    return Effects(aliases=first) if what is _Does.ALIAS else PURE


# ---------------------------------------------------------------- torch


_TORCH_FILES = str(Path(torch.__file__).parent)


@cache_by_target
def torch_name(target: Any) -> str | None:
    """Return the name of a function or method that torch itself defines, ``None`` for all others."""
    if isinstance(target, str):
        return target
    owner = getattr(target, "__objclass__", None)
    if owner is not None:
        return str(target.__name__) if issubclass(torch.Tensor, owner) else None
    name, module = getattr(target, "__name__", None), getattr(target, "__module__", None)
    if inspect.isfunction(target) and not target.__code__.co_filename.startswith(_TORCH_FILES):
        return None  # a user's wrapper: functools.wraps gives it the name of the wrapped function
    return (
        name if isinstance(name, str) and module in op_tables.TORCH_MODULES and not isinstance(target, type) else None
    )


def named_effects(node: Node) -> Effects:
    """Return the effects of a function or method by its name."""
    target: Any = node.target
    name = torch_name(target)
    if isinstance(getattr(target, "__self__", None), logging.Logger):
        return Effects(impure=True)
    if name not in op_tables.GENERATOR_STATE and is_ambient(target):
        return replace(unknown_effects(node), known=True, ambient=True)
    if name is None or name in op_tables.CALLS_BACK:
        return unknown_effects(node)
    if name in op_tables.CHECKS:
        return Effects(check=True)
    if name in op_tables.GENERATOR_STATE:
        return Effects(random=True, impure=True)
    facts = signature_facts(target, name)
    effects = _computed(node, name, facts)
    return unknown_effects(node) if effects is None else union_effects((effects, *_optional(node, name, facts)))


@cache_by_target
def signature_facts(target: Any, name: str) -> Facts:
    """Return the parameter names and defaults of a Python function, and the rule for its effects."""
    if not inspect.isfunction(target):
        return Facts()
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # a wrapper around a builtin: torch.Tensor.__pow__
        return Facts()
    defaults = {k: p.default for k, p in parameters.items() if p.default is not p.empty}
    return Facts(name, tuple(parameters), defaults=defaults, rule=rule_for(name, parameters))


def _computed(node: Node, name: str, facts: Facts) -> Effects | None:
    first = first_argument(node)
    if facts.rule:
        return facts.of(node)
    if name in op_tables.IN_PLACE_METHODS:
        return Effects(first, first, same_sizes=True)
    if name in op_tables.ALIASING:
        return Effects(aliases=first)
    if name in op_tables.FUNCTIONS:
        return PURE
    overloads = named_facts(name)
    if any(f.rule for f in overloads):
        overloads = matching_overloads(node, overloads)
    return union_effects(f.of(node) for f in overloads if not f.plain) if overloads else None


def _optional(node: Node, name: str, facts: Facts) -> list[Effects]:
    """Return the additional effects of the arguments ``inplace`` and ``out``, and of autograd's switches."""
    added, first, call = [], first_argument(node), Call(node, facts)
    if name in ("retain_grad", "requires_grad_"):
        added.append(Effects(first, first, impure=True))
    if facts.rule is not dropout and call.may("inplace", default=False):
        added.append(Effects(first, first, same_sizes=True))
    if out := call.nodes("out"):
        added.append(Effects(out, out))
    return added


# Recognize calls that change the state in which later nodes run: default dtype, streams, vmap levels, gradients.


_SAYS_SO = re.compile("(^|_)(set|enter|exit|push|pop|enable|disable|increment|decrement)(?=_|[A-Z]|$)|Disable|Guard")


def says_ambient(name: str) -> bool:
    """Whether the name of an attribute that code loads suggests that it changes the ambient state."""
    return name not in _OF_CONTAINERS and (name in op_tables.AMBIENT or _SAYS_SO.search(name) is not None)


_OF_CONTAINERS = frozenset(("pop", "set", "set_"))


@cache_by_target
def is_ambient(target: Any) -> bool:
    """Whether a function of torch, or a method such as ``__enter__``, changes the ambient state, judged by its name."""
    if isinstance(target, str):
        return target in op_tables.AMBIENT
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    if module.split(".")[0] != "torch":
        return False
    if "_functorch" in module:
        return name not in op_tables.BATCHED_VIEWS
    return name in op_tables.AMBIENT or _SAYS_SO.search(name) is not None


@cache_by_target
def is_level(target: Any) -> bool:
    """Whether a function opens or closes a level of functorch, or prepares one; that changes no region and no setting.

    ``torch._functorch.predispatch`` has what a captured ``vmap`` or ``jvp`` leaves in a graph: 2.11, 2.13, 2.15.
    """
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    return module == "torch._functorch.predispatch" or ("_functorch" in module and name.endswith("crement_nesting"))


def may_change_modes(node: fx.Node, effects: Effects) -> bool:
    """Whether a node may leave regions or settings (`splitkit.graph.scope`) in another state than it found them."""
    return effects.ambient and not is_level(node.target)


def is_restored(graph: fx.Graph) -> bool:
    """Whether a graph leaves the regions and settings of `splitkit.graph.scope` as it found them."""
    try:
        return scopes(graph)[1] == NEUTRAL
    except GraphError:
        return False
