"""Division of a line into stages of which each rank has two, with a nearly minimal greatest load of a rank.

For a load of at most ``most`` on each rank, the ends of the ranks' first stages decide how far the second ones reach::

    V, ranks 0 1 1 0      |--0--|--1--| ... |--1--|--0--|     least place where the later stages can begin
    loop, ranks 0 1 0 1   |--0--|--1--|--0--|--1--|           furthest place that the second round can reach

Bisection finds the least ``most`` for which the stages meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from splitkit.solvers.placement.problem import Floats, Ints

_HALVINGS = 16  # of the greatest load; with 8 or 32, three requests had the same plans, with 1 other cuts for one
_MOST_PLACES = 72  # their pairs are tables; with 36 to 576, seven requests had the same plans, with 4 one had others
_TINY = 1e-12  # relative; the rounding errors of sums


def even_pairs(total: Floats, rank_of: Sequence[int]) -> Iterator[list[int]]:
    """Where to cut: indices of inner places; nothing where ranks do not have two stages in one of two known ways.

    In a V (``0 1 1 0``) the stages of a rank lie at the same distance from both ends; in a loop (``0 1 0 1``) the
    second lies as many stages behind the first as there are ranks. From rank to rank, the places that the first stage
    can reach are held with the furthest that the second one then can. That is the least load but where so few items are
    left between that a stage would be empty: a start for a search, which proves nothing.

    Args:
        total: (b,) the work before each place, from 0 to all of it.
        rank_of: stage -> its rank.
    """
    ranks = len(rank_of) // 2
    if not ranks or len(total) > _MOST_PLACES or len(total) <= len(rank_of):
        return
    forth = list(range(ranks))
    if list(rank_of) == forth + forth[::-1]:
        cuts = _least(lambda most: _v(total, ranks, most), total)
    elif list(rank_of) == forth + forth:
        cuts = _least(lambda most: _loop(total, ranks, most), total)
    else:
        return
    if cuts is not None:
        yield cuts


def _least(cut: Callable[[float], list[int] | None], total: Floats) -> list[int] | None:
    """Return the division with the least load of a rank that bisection finds."""
    low, high = 0.0, float(total[-1])
    best = cut(high)
    for _ in range(_HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        found = cut(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _v(total: Floats, ranks: int, most: float) -> list[int] | None:
    """Return stages from both ends to the middle: the least place at which the later stage of each rank can begin."""
    places = np.arange(len(total))
    ahead = [np.where(places == 0, len(total) - 1, -1)]  # by where the earlier stages end; -1: they cannot end there
    came: list[Ints] = []
    for rank in range(ranks - 1):
        start, left = ahead[-1], 2 * (ranks - 1 - rank)
        room = most - (total[None, :] - total[:, None])
        begin = np.searchsorted(total, total[start][:, None] - room - _TINY * total[-1])
        begin = np.maximum(begin, places[None, :] + left)
        able = (start[:, None] >= 0) & (places[None, :] > places[:, None]) & (room >= 0) & (begin < start[:, None])
        begin = np.where(able, begin, len(total))
        came.append(begin.argmin(axis=0).astype(np.int64))
        ahead.append(np.where(able.any(axis=0), begin.min(axis=0), -1))
    last = ahead[-1]
    ends = (last >= places + 2) & (total[last] - total[places] <= most * (1 + _TINY))
    if not ends.any():
        return None
    at = int(np.flatnonzero(ends)[0])
    middle = int(np.abs(total - (total[at] + total[last[at]]) / 2)[at + 1 : last[at]].argmin()) + at + 1
    first, second = [at], [int(last[at])]
    for rank in reversed(range(ranks - 1)):
        at = int(came[rank][at])
        first.append(at)
        second.append(int(ahead[rank][at]))
    return sorted({*first, middle, *second} - {0, len(total) - 1})


def _loop(total: Floats, ranks: int, most: float) -> list[int] | None:
    """Return two rounds of stages: for each place between them, the furthest place that the second round can reach."""
    return next(
        (cuts for half in range(ranks, len(total) - ranks) if (cuts := _rounds(total, ranks, most, half))), None
    )


def _rounds(total: Floats, ranks: int, most: float, half: int) -> list[int] | None:
    places = np.arange(half + 1)
    reach = [np.where(places == 0, half, -1)]
    came: list[Ints] = []
    for rank in range(ranks):
        start, left = reach[-1], ranks - 1 - rank
        room = most - (total[None, : half + 1] - total[: half + 1, None])
        end = np.searchsorted(total, total[start][:, None] + room + _TINY * total[-1], side="right") - 1
        end = np.minimum(end, len(total) - 1 - left)
        able = (start[:, None] >= 0) & (places[None, :] > places[:, None]) & (room >= 0) & (end > start[:, None])
        able &= places[None, :] <= half - left
        end = np.where(able, end, -1)
        came.append(end.argmax(axis=0).astype(np.int64))
        reach.append(end.max(axis=0))
    if reach[-1][half] < len(total) - 1:
        return None
    cuts, at = [half], half
    for rank in reversed(range(ranks)):
        at = int(came[rank][at])
        cuts += [at, int(reach[rank][at])]
    return sorted(set(cuts) - {0, len(total) - 1})
