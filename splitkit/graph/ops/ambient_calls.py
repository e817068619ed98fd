"""Recognize calls that change the state in which later nodes run: default dtype, streams, vmap levels, gradients."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from splitkit.errors import GraphError
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, cache_by_target
from splitkit.graph.scope import NEUTRAL, scopes

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
