"""Which calls change the state in which later nodes run: default dtype, streams, vmap levels, every gradient."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from splitkit.errors import GraphError
from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import remembered
from splitkit.graph.scope import NEUTRAL, scopes

_SAYS_SO = re.compile("(^|_)(set|enter|exit|push|pop|enable|disable|increment|decrement)(?=_|[A-Z]|$)|Disable|Guard")


def says_ambient(name: str) -> bool:
    """Does a name, of an attribute that code asks for, say that it changes the ambient state?"""
    return name not in _OF_CONTAINERS and (name in tables.AMBIENT or _SAYS_SO.search(name) is not None)


_OF_CONTAINERS = frozenset(("pop", "set", "set_"))


@remembered
def is_ambient(target: Any) -> bool:
    """Does a function of torch change the ambient state, as far as its name says? Or a method, like ``__enter__``?"""
    if isinstance(target, str):
        return target in tables.AMBIENT
    module, name = str(getattr(target, "__module__", "")), str(getattr(target, "__name__", ""))
    if module.split(".")[0] != "torch":
        return False
    return "_functorch" in module or name in tables.AMBIENT or _SAYS_SO.search(name) is not None


def is_restored(graph: fx.Graph) -> bool:
    """Does a graph leave the regions and modes of `splitkit.graph.scope` as it found them?"""
    try:
        return scopes(graph)[1] == NEUTRAL
    except GraphError:
        return False
