"""Bounds on how much a segment's peak can shrink when the segment is extended.

A longer segment takes less memory only where it makes a value that the shorter one received, or contains the last
reader of a value that the shorter one sent. Everything else only grows (`splitkit.memory.segments.segment`)::

    peak(inner) <= peak(outer) + possible decrease at the nodes that only the outer segment has

So one exact peak answers for many segments near it: where a segment is over the limit by some bytes, every extension
whose possible decrease is smaller is over it too; where one fits with bytes to spare, so do the segments inside it that
can be larger by no more than these bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitkit.memory.segments.segment import BEFORE, Ints, OrderMemory


@dataclass(frozen=True)
class PeakBounds:
    """Prefix sums of the bytes by which a segment can shrink, for a number of microbatches in flight.

    Attributes:
        ends: (length + 1,) extending a segment from end i to end j lowers its peak by at most ``ends[j] - ends[i]``.
        starts: (length + 1,) extending one from start j to start i < j lowers it by at most ``starts[j] - starts[i]``.
    """

    ends: Ints
    starts: Ints

    @classmethod
    def of(cls, order: OrderMemory, in_flight: int) -> PeakBounds:
        """Return the bounds for one order."""
        nbytes = np.zeros(len(order.made), np.int64)
        np.add.at(nbytes, order.value_storages[0], order.storage_bytes[order.value_storages[1]])
        inner = order.made >= 0
        sent = inner & (order.last > order.made)
        ends = np.where(order.copied_from != BEFORE, order.value_bytes, 0)  # even for what the graph returns
        within = order.last < order.length
        if not order.training:
            # A value that is sent is held to its last reader, which the longer segment has: nothing else is freed.
            starts = nbytes + order.value_bytes
        else:
            ends = in_flight * (ends + np.where(within, nbytes, 0)) + np.where(within, _gradients(order), 0)
            starts = in_flight * (nbytes + order.value_bytes)
        last = np.minimum(order.last, order.length - 1)
        return cls(_sums(last[sent], ends[sent], order.length), _sums(order.made[inner], starts[inner], order.length))


def _gradients(order: OrderMemory) -> Ints:
    """Return the bytes of the gradient that a sent value receives, and of adding to it, shape (values,)."""
    has = order.gradient_of >= 0
    sums = np.zeros(len(has), np.int64)
    sums[has] = order.value_bytes[has] + order.gradient_bytes[order.gradient_of[has]]
    return sums


def _sums(position: Ints, nbytes: Ints, length: int) -> Ints:
    at = np.zeros(length + 1, np.int64)
    np.add.at(at, position + 1, nbytes)
    return at.cumsum()
