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

from splitkit.memory.stretch import Ints, Line


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
        given = inner & (line.last > line.made) & (line.last < line.length)
        if not line.training:  # what is given stays to its last reader, and that is in the stretch by then
            ends = np.zeros(len(line.made), np.int64)
            starts = lie + line.loose
        else:
            ends = flights * lie + _gradients(line)
            starts = flights * (lie + line.loose)
        return cls(
            _sums(line.last[given], ends[given], line.length), _sums(line.made[inner], starts[inner], line.length)
        )


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
