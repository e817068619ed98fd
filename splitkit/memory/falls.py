"""By how much the memory of a stretch may fall as it grows: one stretch then answers for many beside it.

A longer stretch takes less where it makes what it took, and gives less where it holds the last reader of what it gave;
all else only grows (`splitkit.memory.stretch`)::

    peak(inner) <= peak(outer) + what falls at the nodes that outer has and inner has not

So where one does not fit by some bytes, none around it fits within these bytes of falls; and where one fits with some
to spare, so do those inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitkit.memory.stretch import Line
from splitkit.memory.touches import BEFORE, Ints


@dataclass(frozen=True)
class Falls:
    """Sums along a line of the bytes by which a stretch may fall, with some microbatches in flight.

    Attributes:
        ends: (length + 1,) as a stretch that ends at i grows to end at j: at most ``ends[j] - ends[i]``.
        starts: (length + 1,) as one that starts at j grows to start at i < j: at most ``starts[j] - starts[i]``.
    """

    ends: Ints
    starts: Ints

    @classmethod
    def of(cls, line: Line, flights: int) -> Falls:
        """The falls of one line."""
        lie = np.zeros(len(line.made), np.int64)
        np.add.at(lie, line.lies[0], line.storage_bytes[line.lies[1]])
        inner = line.made >= 0
        given = inner & (line.last > line.made)
        ends = np.where(line.copied_from != BEFORE, line.value_bytes, 0)  # also of what the graph yields
        within = line.last < line.length
        if not line.training:  # what is given stays to its last reader, and that is in the stretch by then
            starts = lie + line.value_bytes
        else:
            ends = flights * (ends + np.where(within, lie, 0)) + np.where(within, _gradients(line), 0)
            starts = flights * (lie + line.value_bytes)
        last = np.minimum(line.last, line.length - 1)
        return cls(_sums(last[given], ends[given], line.length), _sums(line.made[inner], starts[inner], line.length))


def _gradients(line: Line) -> Ints:
    """(values,) the gradient that comes of a value that is given, and what adding to it takes."""
    has = line.gradient_of >= 0
    sums = np.zeros(len(has), np.int64)
    sums[has] = line.value_bytes[has] + line.gradient_bytes[line.gradient_of[has]]
    return sums


def _sums(position: Ints, nbytes: Ints, length: int) -> Ints:
    at = np.zeros(length + 1, np.int64)
    np.add.at(at, position + 1, nbytes)
    return at.cumsum()
