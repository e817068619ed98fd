"""The search for a placement on devices whose links differ, or whose memory the sums of the units do not tell.

Measured on T5 and GPT-2 over three unequal links: without stages over all orders of devices all plans are 17 to 22 %
worse, without moves of single nodes 0.05 to 0.5 %.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import acyclic_groups, colour_groups, core_of, order_by_key, orders, value_lists
from splitkit.solvers.placement.link_model import LinkPrices, UnequalLinks
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.solution import Solution, cycles

# Exhaustive search for the best placement: group by group, pruned by the best value so far.
#
# The groups are placed in topological order. Loads never shrink when another group is placed, so a partial placement
# whose greatest load reaches the best value cannot be completed to a better one. Empty devices that can be exchanged
# without changing anything are interchangeable: only the first is tried.


_ROOM = 2.0**52  # the sum of all work and transfers, in whole numbers that floats hold exactly
_EVERY = 256  # steps between two checks of the clock
_ENUMERATION_CHECKED = 100  # steps that cost as much as the true memory of one placement

Paid = tuple[int, ...]
"""What each device pays for one value."""


class Enumeration:
    """A depth-first search over groups; the loads only grow, so a branch whose load is no better is cut off.

    All sums are over whole numbers. A branch is also cut off if the work that is left does not fit between the loads
    and the best value.

    Args:
        linked: the problem.
        order: the groups in topological order.
        steps: how many placements of a single group are tried.
        clock: the deadline.
        has_room: (n,) devices -> whether they have room, if the groups' bytes do not tell.

    Attributes:
        best: (n,) devices; None if nothing better than the known value was found.
        proven: whether all placements were tried or cut off.
    """

    def __init__(
        self,
        linked: UnequalLinks,
        order: Ints,
        steps: int,
        clock: Clock,
        has_room: Callable[[Ints], bool] | None = None,
    ) -> None:
        self.best: Ints | None = None
        self.proven = False
        self._linked, self._order, self._left, self._clock = linked, order.tolist(), steps, clock
        self._has_room = has_room
        supported = np.isfinite(linked.work)
        most = np.where(supported, linked.work, 0.0).sum() + linked.devices * linked.prices.sum()
        self.scale = _ROOM / most if most else 1.0
        self._work = [[int(t * self.scale) if np.isfinite(t) else None for t in row] for row in linked.work.tolist()]
        self._price = [[[int(t * self.scale) for t in row] for row in table] for table in linked.prices.tolist()]
        self._touches: list[list[tuple[int, bool]]] = [[] for _ in range(linked.size)]
        for value, (maker, readers) in enumerate(zip(linked.makers.tolist(), linked.readers, strict=True)):
            self._touches[maker].append((value, True))
            for reader in readers.tolist():
                self._touches[reader].append((value, False))
        edges = linked.edges if linked.acyclic else linked.edges[:0]
        self._before = value_lists(edges[:, 1], edges[:, 0], linked.size)
        self._paid: dict[tuple[int, int, int], Paid] = {}
        self._alike = _alike(linked)
        self._prepare_rest()

    def _prepare_rest(self) -> None:
        """Compute the least work left at each place in the order, and the speed of each device at it."""
        work = np.array([[np.inf if t is None else t for t in row] for row in self._work], np.float64)
        least = work.min(axis=0, initial=np.inf)
        coming = least[self._order]
        self._rest: list[float] = [*np.cumsum(coming[::-1])[::-1].tolist(), 0.0]
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(work > 0, least / work, np.where(least > 0, 0.0, 1.0))
        counted = np.where(least > 0, ratio, 0.0)
        self._speed: list[float] = counted.max(axis=1, initial=0.0).tolist()

    def run(self, value: float) -> None:
        """Search for a placement that beats a value by more than rounding."""
        linked = self._linked
        self._most = int(value * self.scale * (1 - 1e-9)) if np.isfinite(value) else int(_ROOM)
        self._device = [-1] * linked.size
        self._held = [0] * linked.devices
        self._maker = [-1] * len(linked.sizes)
        self._readers = [0] * len(linked.sizes)
        self._nothing: Paid = (0,) * linked.devices
        self.proven = self._place(0, [0] * linked.devices, [0] * linked.devices)

    def _place(self, position: int, loads: list[int], after: list[int]) -> bool:
        """Place the remaining groups; return False if the steps ran out. ``after`` has the devices behind
        each device.
        """
        if position == len(self._order):
            whole = np.array(self._device, np.int64)
            self._left -= 0 if self._has_room is None else _ENUMERATION_CHECKED
            if self._has_room is None or self._has_room(whole):
                self._most, self.best = max(loads), whole
            return True
        group, ways = self._order[position], []
        for device in self._choices(group):
            way = self._with(group, device, loads, after)
            if way is not None:
                ways.append((max(way[0]), device, *way))
        for most, device, grown, closed, states in sorted(ways, key=lambda way: way[:2]):
            if most >= self._most or not self._fits_rest(position + 1, grown):
                continue
            self._left -= 1
            if self._left < 0 or (self._left % _EVERY == 0 and self._clock.is_over()):
                return False
            saved = [(value, self._maker[value], self._readers[value]) for value, _, _ in states]
            self._device[group] = device
            self._held[device] += int(self._linked.nbytes[group])
            for value, maker, readers in states:
                self._maker[value], self._readers[value] = maker, readers
            done = self._place(position + 1, grown, closed)
            for value, maker, readers in saved:
                self._maker[value], self._readers[value] = maker, readers
            self._held[device] -= int(self._linked.nbytes[group])
            self._device[group] = -1
            if not done:
                return False
        return True

    def _choices(self, group: int) -> list[int]:
        """Return the devices that support the group and have room; of equal empty devices only the first."""
        found: list[int] = []
        used = {device for device in self._device if device >= 0}
        for device in range(self._linked.devices):
            if self._work[device][group] is None:
                continue
            if self._held[device] + self._linked.nbytes[group] > self._linked.capacity[device]:
                continue
            if device not in used and any(other not in used for other in self._alike[device]):
                continue
            found.append(device)
        return found

    def _with(
        self, group: int, device: int, loads: list[int], after: list[int]
    ) -> tuple[list[int], list[int], list[tuple[int, int, int]]] | None:
        """Return the loads with a group on a device, the devices behind each device, and the changed values."""
        closed = after
        for first in self._before[group]:
            home = self._device[first]
            if home != device and not closed[home] >> device & 1:
                if closed[device] >> home & 1:
                    return None
                gained = closed[device] | 1 << device
                closed = [
                    later | gained if place == home or later >> home & 1 else later
                    for place, later in enumerate(closed)
                ]
        grown, states = loads.copy(), []
        work = self._work[device][group]
        assert work is not None
        grown[device] += work
        for value, makes in self._touches[group]:
            maker, readers = self._maker[value], self._readers[value]
            now = (device, readers) if makes else (maker, readers | 1 << device)
            if now == (maker, readers):
                continue
            states.append((value, *now))
            for place, (more, less) in enumerate(
                zip(self._payment(value, *now), self._payment(value, maker, readers), strict=True)
            ):
                grown[place] += more - less
        return grown, closed, states

    def _payment(self, value: int, maker: int, readers: int) -> Paid:
        """Return what each device pays for a value with a given maker and readers; zeros if the maker is unknown."""
        if maker < 0 or not readers:
            return self._nothing
        key = value, maker, readers
        if key not in self._paid:
            price, paid = self._price[value][maker], [0] * self._linked.devices
            for device in range(self._linked.devices):
                if readers >> device & 1 and device != maker:
                    paid[maker] = max(paid[maker], price[device])
                    paid[device] = price[device]
            self._paid[key] = tuple(0 if cpu else p for p, cpu in zip(paid, self._linked.cpu.tolist(), strict=True))
        return self._paid[key]

    def _fits_rest(self, position: int, loads: list[int]) -> bool:
        room = sum((self._most - load) * speed for load, speed in zip(loads, self._speed, strict=True))
        return room * (1 + 1e-9) + 1 >= self._rest[position]


def _alike(linked: UnequalLinks) -> list[list[int]]:
    """Return for each device the earlier devices with which it can be exchanged without changing anything."""
    count = linked.devices
    return [[other for other in range(device) if _exchangeable(linked, device, other)] for device in range(count)]


def _exchangeable(linked: UnequalLinks, a: int, b: int) -> bool:
    swapped = np.arange(linked.devices)
    swapped[[a, b]] = b, a
    return bool(
        np.array_equal(linked.work[a], linked.work[b])
        and linked.capacity[a] == linked.capacity[b]
        and linked.cpu[a] == linked.cpu[b]
        and np.array_equal(linked.latency, linked.latency[np.ix_(swapped, swapped)])
        and np.array_equal(linked.slowness, linked.slowness[np.ix_(swapped, swapped)])
    )


MOST_EXACT = 64
"""Groups; with more there are too many placements to enumerate."""
_STEPS = 60_000  # placements of a single group in a second
_MOVES = 2_000  # placements whose loads are computed in a second
_UNITS = 300  # of which a load costs as much as looking at it
_CHECKED = 4  # loads that cost as much as the true memory of one placement

Fits = Callable[[Ints, tuple[int, ...]], bool]
"""Whether devices have room: (device of each unit, used devices in topological order if they are stages) -> answer."""


def on_unequal_links(
    problem: Problem,
    prices: LinkPrices,
    found: Solution,
    seconds: float,
    *,
    acyclic: bool,
    clock: Clock,
    fits: Fits | None = None,
) -> Solution | None:
    """Return the best placement found when each value is priced by the link it crosses; small problems are proven.

    A solver that knows one price for each value has found a placement and a valid bound. From that placement, and from
    the best stages along some orders of the groups over all orders of devices (exact for chains), groups are moved one
    by one; then all placements are enumerated as far as the steps reach.

    Args:
        problem: the problem.
        prices: what its values cost on each link.
        found: the solver's solution.
        seconds: the time for the search, whose steps are counted.
        acyclic: whether the devices are stages.
        clock: the clock of the whole search that this is a part of.
        fits: what tells whether devices have room, if sums over units do not; ``None`` is returned if none found fits.
    """
    search = _Search(problem, prices, seconds, acyclic=acyclic, clock=clock, fits=fits)
    search.run(found)
    if not search.best.size:
        return None
    proven = search.value if search.proven else 0.0
    solver = "all placements" if search.proven else search.found_by
    return replace(
        found,
        device=search.best[search.group],
        order=search.order(search.best),
        value=search.value,
        bound=min(search.value, max(found.bound, proven)),
        solver=solver or found.solver,
        loads=search.linked.loads(search.best),
        tolerance=max(found.tolerance, 1e-9),
        timed_out=found.timed_out or clock.timed_out,
    )


class _Search:
    """The best placement so far, and whether it is proven."""

    def __init__(
        self,
        problem: Problem,
        prices: LinkPrices,
        seconds: float,
        *,
        acyclic: bool,
        clock: Clock,
        fits: Fits | None,
    ) -> None:
        self.group = acyclic_groups(problem) if acyclic else colour_groups(problem)
        self.core = core_of(problem, self.group)
        self.linked = _linked(problem, prices, self.group, self.core.edges, acyclic=acyclic)
        self.best: Ints = np.zeros(0, np.int64)
        self.value, self.found_by, self.proven = np.inf, "", False
        self._seconds, self._clock, self._fits = seconds, clock, fits

    def run(self, found: Solution) -> None:
        """Start from the given solution, then from orders; move groups; enumerate all placements."""
        _, first = np.unique(self.group, return_index=True)
        self._take(found.device[first], "")
        self._move(found.device[first])
        for order in orders(self.core):
            if self._clock.is_over():
                return
            if (device := best_on_order(self.linked, order)) is not None:
                self._take(device, "lines over all orders of devices")
                self._move(device)
        if self.linked.size <= MOST_EXACT:
            self._try_all()

    def order(self, device: Ints) -> tuple[int, ...]:
        """Return the used devices in topological order; empty where there are no stages."""
        return _order(self.linked, device) if self.linked.acyclic else ()

    def _has_room(self, device: Ints) -> bool:
        """Return whether a legal placement fits by its true memory."""
        return self._fits is None or self._fits(device[self.group], self.order(device))

    def _take(self, device: Ints, solver: str) -> None:
        """Keep a placement if it is better."""
        if self.linked.is_legal(device):
            value = float(self.linked.loads(device).max())
            if value < self.value * (1 - 1e-12) and self._has_room(device):
                self.best, self.value, self.found_by = device.copy(), value, solver

    def _move(self, device: Ints) -> None:
        """Move single groups off the most loaded device as long as that helps."""
        if not self.linked.is_legal(device) or not self._has_room(device):
            return
        linked, now = self.linked, device.copy()
        left = int(_MOVES * self._seconds / max(1.0, linked.size / _UNITS) / 10)
        loads, moved = _key(linked.loads(now)), True
        while moved and left > 0 and not self._clock.is_over():
            moved = False
            for group, to in self._moves(now):
                left -= 1
                trial = now.copy()
                trial[group] = to
                key = _key(linked.loads(trial))
                if key >= loads or not linked.is_legal(trial):
                    continue
                left -= 0 if self._fits is None else _CHECKED
                if self._has_room(trial):
                    now, loads, moved = trial, key, True
                    break
                if left <= 0:
                    break
        self._take(now, "moves")

    def _moves(self, device: Ints) -> list[tuple[int, int]]:
        """Return the groups of the most loaded device, with the other devices that support them."""
        busiest = int(self.linked.loads(device).argmax())
        groups = np.flatnonzero(device == busiest).tolist()
        others = [to for to in range(self.linked.devices) if to != busiest]
        return [(group, to) for group in groups for to in others if np.isfinite(self.linked.work[to, group])]

    def _try_all(self) -> None:
        place = order_by_key(self.core, np.arange(self.core.size, dtype=np.float64))
        room = None if self._fits is None else self._has_room
        exact = Enumeration(self.linked, place, int(_STEPS * self._seconds), self._clock, room)
        exact.run(self.value)
        if exact.best is not None:
            self._take(exact.best, "all placements")
        self.proven = exact.proven


def _linked(problem: Problem, prices: LinkPrices, group: Ints, edges: Ints, *, acyclic: bool) -> UnequalLinks:
    size = int(group.max(initial=-1)) + 1
    work = np.zeros((len(problem.devices), size))
    for row, device in zip(work, problem.devices, strict=True):
        np.add.at(row, group, problem.seconds[device.kind])
    return UnequalLinks.of(
        work=work,
        nbytes=np.bincount(group, problem.nbytes, size).astype(np.int64),
        capacity=np.array([np.inf if device.cpu else device.capacity for device in problem.devices]),
        cpu=np.array([device.cpu for device in problem.devices]),
        edges=edges,
        prices=prices,
        group=group,
        acyclic=acyclic,
    )


def _key(loads: Floats) -> tuple[float, ...]:
    """Return the loads in descending order; of two placements, the lesser key is better."""
    return tuple(sorted(loads.tolist(), reverse=True))


def _order(linked: UnequalLinks, device: Ints) -> tuple[int, ...]:
    """Return the used devices in topological order."""
    ends = device[linked.edges]
    ends = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0)
    assert not cycles(ends, linked.devices)
    left, found = sorted(set(device.tolist())), []
    while left:
        waiting = set(ends[np.isin(ends[:, 0], left)][:, 1].tolist())
        found.append(next(d for d in left if d not in waiting))
        left.remove(found[-1])
    return tuple(found)


# The best stages along one order of the groups, over all orders of devices at once.
#
# A stage receives what it reads from the stage before it and sends what it makes to the stage after it. That is exact
# for a chain; elsewhere it is an approximation, and the loads of the result are computed from the definition.
#
# A state is the set of devices used, the device of the last stage and the one before it; for a next device::
#
# best[used + then, then, now][j] = min over i < j of max(best[used, now, before][i], load(i, j | before, now, then))


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
