"""Describes a set of nodes by as few module names as possible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass
class _Module:
    """The number of nodes at or below a module: in the part, and in the whole model."""

    here: int = 0
    everywhere: int = 0
    children: dict[str, _Module] = field(default_factory=dict)


def collapse(here: Iterable[str], everywhere: Iterable[str]) -> list[str]:
    """Name the modules of a part.

    A module all of whose nodes are in the part stands for its children, and consecutive layers become a range. A
    numbered layer or a module without children that is only partly there carries the count::

        h.0.attn h.0.mlp h.1.attn h.1.mlp h.2.attn    ->    h.0-1, h.2 (1 of 2)

    Args:
        here: the module path of each node of the part; ``""`` is the model itself.
        everywhere: the module path of every node of the model.
    """
    tree = _Module()
    for path in everywhere:
        for module in _walk(tree, path):
            module.everywhere += 1
    for path in here:
        for module in _walk(tree, path):
            module.here += 1
    return list(_joined(_covered(tree, ())))


def joined_layers(modules: Iterable[str]) -> list[str]:
    """Name modules in order, with a range for consecutive layers: ``h.0 h.1 h.2`` becomes ``h.0-2``."""
    return list(_joined((tuple(module.split(".")) if module else (), "") for module in modules))


def _walk(tree: _Module, path: str) -> Iterator[_Module]:
    yield tree
    for atom in path.split(".") if path else []:
        tree = tree.children.setdefault(atom, _Module())
        yield tree


def _covered(module: _Module, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, ``""`` if the module is here as a whole, else the count)."""
    if not module.here:
        return
    if module.here == module.everywhere:
        yield path, ""
        return
    if not module.children or (path and path[-1].isdigit()):
        yield path, f"{module.here} of {module.everywhere}"
        return
    for atom, child in module.children.items():
        yield from _covered(child, (*path, atom))
    own = module.here - sum(c.here for c in module.children.values())
    if own:
        yield path, f"{own} of {module.everywhere - sum(c.everywhere for c in module.children.values())} own"


def _joined(covered: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[str]:
    """Join whole consecutive layers: ``h.0 h.1 h.2`` becomes ``h.0-2``."""
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    # first and last are the ends of the range that is open; the extra entry at the end closes the last one
    for path, count in [*covered, ((), "end")]:
        if last and not count and path[:-1] == last[:-1] and _follows(last[-1], path[-1]):
            last = path
            continue
        if last:
            yield ".".join(first) if first == last else f"{'.'.join(first)}-{last[-1]}"
        first = last = ()
        if count and count != "end":
            yield f"{'.'.join(path) or '(top level)'} ({count})"
        elif not count and path and path[-1].isdigit():
            first = last = path
        elif not count:
            yield ".".join(path) or "(the whole model)"


def _follows(number: str, other: str) -> bool:
    return other.isdigit() and int(other) == int(number) + 1
