"""A saved value that waits for backward in the memory of the host, and when it leaves the device and comes back."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from splitkit.errors import FileError

_FIELDS = ("value", "release", "fetch")


@dataclass(frozen=True)
class Offloaded:
    """A saved value of a training step that is moved to the host in forward, and back in backward.

    The copy to the host starts right after the value is made. It runs beside the computation, and so does the copy
    back.

    Attributes:
        value: the node that makes the value.
        release: the node of forward after which the memory on the device is free; if the copy is not complete by then,
            the device waits for it. ``None``: the last node of forward that reads the value.
        fetch: the node of backward before which the copy back starts. ``None``: the first that reads the value.
    """

    value: Node
    release: Node | None = None
    fetch: Node | None = None


def offloaded_to_json(offloaded: Iterable[Offloaded]) -> list[dict[str, str | None]]:
    """Return the JSON form, by node name."""
    return [dict(zip(_FIELDS, _names(one), strict=True)) for one in offloaded]


def _names(one: Offloaded) -> tuple[str | None, ...]:
    return tuple(None if node is None else node.name for node in (one.value, one.release, one.fetch))


def names_of_offloaded(data: object) -> Iterator[str]:
    """Yield the names of nodes in the JSON form; files that predate offload have none.

    Raises:
        FileError: SK501 if the data is damaged.
    """
    for entry in data if isinstance(data, list) else [data] if data is not None else []:
        if not isinstance(entry, Mapping) or entry.keys() != set(_FIELDS) or not isinstance(entry["value"], str):
            raise _damaged(entry)
        for name in filter(None, map(entry.__getitem__, _FIELDS)):
            if not isinstance(name, str):
                raise _damaged(entry)
            yield name


def offloaded_from_json(data: Sequence[Mapping[str, Any]] | None, nodes: Mapping[str, Node]) -> tuple[Offloaded, ...]:
    """Return what `offloaded_to_json` wrote, after `names_of_offloaded` has checked it."""
    found = tuple(Offloaded(*(nodes[entry[n]] if entry[n] else None for n in _FIELDS)) for entry in data or ())  # type: ignore[arg-type]
    if len({one.value for one in found}) < len(found):
        raise _damaged(data)
    return found


def _damaged(entry: object) -> FileError:
    wanted = "a list of distinct values with the nodes after which they leave and before which they return"
    return FileError("SK501", f"the plan is damaged: offloaded has {reprlib.repr(entry)}, not {wanted}", "Plan again.")
