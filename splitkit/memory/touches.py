"""Which positions of a line of nodes touch what, as pairs of numbers in order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
BEFORE = -1


@dataclass(frozen=True)
class Touches:
    """Pairs of a position and what is touched there, by position; each pair once.

    Attributes:
        position: where the first of the pair stands in the line.
        item: what is touched, by number.
        starts: the pairs of position p are ``starts[p]`` to ``starts[p + 1]``.
        before: the position before that touches the same item, -1 if there is none.
        after: the next position that does, the length of the line if there is none.
    """

    position: Ints
    item: Ints
    starts: Ints
    before: Ints
    after: Ints

    @classmethod
    def of_pairs(cls, position: Ints, item: Ints, length: int) -> Touches:
        """The pairs in order, each once."""
        count = int(item.max(initial=0)) + 1
        keys = np.unique(position * count + item)
        return cls.in_order(keys // count, keys % count, length)

    @classmethod
    def in_order(cls, position: Ints, item: Ints, length: int) -> Touches:
        """Pairs that are in order, by position and then by item, each once."""
        before, after = np.full(len(item), BEFORE, np.int64), np.full(len(item), length, np.int64)
        by_item = np.argsort(item, kind="stable")
        same = np.flatnonzero(item[by_item][1:] == item[by_item][:-1])
        before[by_item[same + 1]] = position[by_item[same]]
        after[by_item[same]] = position[by_item[same + 1]]
        return cls(position, item, np.searchsorted(position, np.arange(length + 1)), before, after)

    def within(self, start: int, end: int) -> slice:
        """The pairs of a stretch."""
        return slice(int(self.starts[start]), int(self.starts[end]))
