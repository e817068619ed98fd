"""The best stages along one order of the groups, over all orders of devices at once.

A stage receives what it reads from the stage before it and sends what it makes to the stage after it. That is exact for
a chain; elsewhere it is an approximation, and the loads of the result are computed from the definition.

A state is the set of devices used, the device of the last stage and the one before it; for a next device::

    best[used + then, then, now][j] = min over i < j of max(best[used, now, before][i], load(i, j | before, now, then))
"""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.problem import Floats, Ints
from splitkit.solvers.placement.unequal.link_model import UnequalLinks

_WORK = 4e7  # additions; this limits the number of borders
_FEWEST = 6  # borders; with fewer the search is not worth it

State = tuple[int, int, int]
"""The used devices as bits, the device of the last stage, and the device of the stage before it (or the same)."""


def best_on_order(linked: UnequalLinks, order: Ints) -> Ints | None:
    """Return (n,) the device of each group, with the least greatest load along an order; None if nothing fits.

    Stages may begin at any group if there are few, otherwise where few bytes cross.
    """
    places = int((_WORK / (linked.devices**3 * 2.0**linked.devices)) ** 0.5)
    return None if places < _FEWEST else _Line(linked, order, _cuts(linked, order, places)).best()


def _cuts(linked: UnequalLinks, order: Ints, most: int) -> Ints:
    """Return (c,) where stages may begin: in each segment with an equal share of the work, where the fewest bytes
    cross.

    Args:
        linked: the problem.
        order: the groups.
        most: the most borders.
    """
    size = linked.size
    if size + 1 <= most:
        return np.arange(size + 1)
    place = np.empty(size, np.int64)
    place[order] = np.arange(size)
    crossing = np.zeros(size + 2)
    for maker, readers, nbytes in zip(linked.makers.tolist(), linked.readers, linked.sizes.tolist(), strict=True):
        ends = place[maker], place[readers].min(), place[readers].max()
        crossing[min(ends) + 1] += nbytes
        crossing[max(ends) + 1] -= nbytes
    crossing = np.cumsum(crossing)
    work = np.concatenate([[0.0], np.cumsum(np.min(linked.work, axis=0)[order])])
    window = np.minimum((work / max(work[-1], 1e-300) * (most - 2)).astype(np.int64), most - 3)
    best: dict[int, int] = {}
    for cut in range(1, size):
        known = best.setdefault(int(window[cut]), cut)
        if crossing[cut] < crossing[known]:
            best[int(window[cut])] = cut
    return np.array([0, *sorted(best.values()), size])


class _Line:
    """The loads of stages, by the borders where they begin and end.

    Args:
        linked: the problem.
        order: the groups.
        cuts: (c,) positions where a stage may begin or end, 0 and n among them.
    """

    def __init__(self, linked: UnequalLinks, order: Ints, cuts: Ints) -> None:
        self._linked, self._order, self._cuts = linked, order, cuts
        barred = ~np.isfinite(linked.work)
        work, closed = (_sums(row[:, order]) for row in (np.where(barred, 0.0, linked.work), barred.astype(float)))
        held = _sums(linked.nbytes[None, order].astype(np.float64))[0]
        first, last = cuts[:, None], cuts[None, :]
        bad = (closed[:, last] > closed[:, first]) | (last <= first)
        bad |= (held[last] - held[first])[None] > linked.capacity[:, None, None]
        self._own: Floats = np.where(bad, np.inf, work[:, last] - work[:, first])
        self._taken, self._given = self._crossing()

    def _crossing(self) -> tuple[Floats, Floats]:
        """Return (2, c, c) how many values, and bytes, a stage receives from before it and sends behind it."""
        linked, cuts = self._linked, self._cuts
        place = np.empty(linked.size, np.int64)
        place[self._order] = np.arange(linked.size)
        count = len(cuts)
        taken, given = np.zeros((2, count + 1, count + 1)), np.zeros((2, count + 1, count + 1))
        for maker, readers, nbytes in zip(linked.makers.tolist(), linked.readers, linked.sizes.tolist(), strict=True):
            amount = np.array([1.0, nbytes])
            made = begin = int(np.searchsorted(cuts, place[maker], side="right"))  # the first cut after its maker
            ends = np.unique(np.searchsorted(cuts, place[readers], side="right")).tolist()  # and after each reader
            for end in ends:
                _add(taken, amount, (begin, end), (end, count))
                begin = max(begin, end)
            _add(given, amount, (0, made), (made, ends[-1]))
        return _filled(taken), _filled(given)

    def best(self) -> Ints | None:
        """Return the device of each group in the stages of the least greatest load."""
        devices, count = self._linked.devices, len(self._cuts)
        nowhere, start = np.full(count, -1), np.where(np.arange(count) == 0, 0.0, np.inf)
        # the greatest load of the stages before one that begins at a cut; where the one before began, and its `before`
        reached: dict[State, tuple[Floats, Ints, Ints]] = {
            (1 << now, now, now): (start, nowhere, nowhere) for now in range(devices)
        }
        best, ending = np.inf, None
        for used in range(1, 1 << devices):
            for now, before in np.ndindex(devices, devices):
                state = used, now, before
                if state not in reached:
                    continue
                value = reached[state][0]
                last = np.maximum(value, self._loads(state, None)[:, -1])
                if last.min() < best:
                    best, ending = float(last.min()), (state, int(last.argmin()))
                for then in range(devices):
                    if not used >> then & 1:
                        self._step(reached, state, then)
        return None if ending is None else self._placed(reached, *ending)

    def _step(self, reached: dict[State, tuple[Floats, Ints, Ints]], state: State, then: int) -> None:
        """Begin a stage on another device behind the last stage of a state."""
        used, now, before = state
        loads = np.maximum(reached[state][0][:, None], self._loads(state, then))
        start = loads.argmin(axis=0)
        value, came = loads[start, np.arange(len(start))], np.full(len(start), before)
        following = used | 1 << then, then, now
        if following in reached:
            old, began, whence = reached[following]
            less = value < old
            value, start, came = np.where(less, value, old), np.where(less, start, began), np.where(less, came, whence)
        reached[following] = value, start, came

    def _loads(self, state: State, then: int | None) -> Floats:
        """Return (c, c) the load of the last stage of a state, given the next device, or none."""
        _, now, before = state
        linked = self._linked
        load: Floats = self._own[now]
        if linked.cpu[now]:
            return load
        if before != now:
            load = load + linked.latency[before, now] * self._taken[0] + linked.slowness[before, now] * self._taken[1]
        if then is not None:
            load = load + linked.latency[now, then] * self._given[0] + linked.slowness[now, then] * self._given[1]
        return load

    def _placed(self, reached: dict[State, tuple[Floats, Ints, Ints]], state: State, start: int) -> Ints:
        device, end = np.empty(self._linked.size, np.int64), len(self._cuts) - 1
        while True:
            used, now, before = state
            device[self._order[self._cuts[start] : self._cuts[end]]] = now
            _, began, whence = reached[state]
            if before == now:
                return device
            end, state, start = start, (used & ~(1 << now), before, int(whence[start])), int(began[start])


def _sums(rows: Floats) -> Floats:
    """Return (r, n + 1) prefix sums of (r, n) rows."""
    sums: Floats = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
    return sums


def _add(table: Floats, amount: Floats, first: tuple[int, int], last: tuple[int, int]) -> None:
    """Add to a rectangle of a table of differences: ``first`` and ``last`` are its sides, without their ends."""
    if first[0] < first[1] and last[0] < last[1]:
        for row, sign in zip(first, (1, -1), strict=True):
            table[:, row, last[0]] += sign * amount
            table[:, row, last[1]] -= sign * amount


def _filled(table: Floats) -> Floats:
    """Return the table whose differences `_add` has collected."""
    filled: Floats = np.cumsum(np.cumsum(table, axis=1), axis=2)[:, :-1, :-1]
    return filled
