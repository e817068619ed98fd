"""Recognize calls that change the state in which later nodes run: default dtype, streams, vmap levels, gradients."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from splitkit.errors import GraphError
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import cache_by_target
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
    return "_functorch" in module or name in op_tables.AMBIENT or _SAYS_SO.search(name) is not None


def is_restored(graph: fx.Graph) -> bool:
    """Whether a graph leaves the regions and settings of `splitkit.graph.scope` as it found them."""
    try:
        return scopes(graph)[1] == NEUTRAL
    except GraphError:
        return False
