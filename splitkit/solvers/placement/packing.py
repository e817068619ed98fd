"""First placements: sets of units that the devices support and have room for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import Core, acyclic_groups, colour_groups, core_of
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages.order_dp import MOST_LEVELS, device_steps, level_count
from splitkit.solvers.placement.stages.stage_solver import StageSearch


def pack_sets(core: Core, places: DeviceTable) -> Ints | None:
    """Put each unit, the largest first, on the device with room whose load is then least; None if that fails."""
    device = np.zeros(core.size, np.int64)
    loads, held = (np.zeros(len(places.work)) for _ in range(2))
    work = np.where(np.isinf(places.work), 0.0, places.work).max(axis=0)
    for unit in np.lexsort((-work, -core.nbytes)).tolist():
        after = loads + places.work[:, unit]
        after[held + places.nbytes[:, unit] > places.capacity] = np.inf
        best = int(after.argmin())
        if not np.isfinite(after[best]):
            return None
        device[unit], loads[best] = best, after[best]
        held[best] += places.nbytes[best, unit]
    return device


def find_sets(core: Core, places: DeviceTable, seconds: float, clock: Clock) -> tuple[Ints | None, bool]:
    """Return some sets, None if none were found, and whether it is proven that there are none."""
    device = pack_sets(core, places)
    if device is not None:
        return device, False
    most = float(np.where(np.isinf(places.work), 0.0, places.work).max(axis=0).sum() + places.costs.max(axis=0).sum())
    found, bound = SetProgram(core, places, most * 2 + 1).solve(seconds, clock, any_will_do=True)
    if found is None:
        return None, bool(np.isinf(bound))
    return (found if is_placeable(core, places, found) else None), False


def is_placeable(core: Core, places: DeviceTable, device: Ints) -> bool:
    """Return whether every device supports its units and has room for them."""
    unit = np.arange(core.size)
    held = np.bincount(device, places.nbytes[device, unit], len(places.work))
    return bool(np.isfinite(places.work[device, unit]).all() and (held <= places.capacity).all())


# The best sets of units for devices as a mixed-integer program, without any order; HiGHS solves it, through scipy.
#
# sum of x[v, d] over d = 1           all[e, d] <= x[v, d] <= some[e, d]    for each pin v of net e
# work[d] @ x[:, d] + cost[d] @ (some[:, d] - all[:, d]) <= L
#
# Nets with the same pins are one; one of two pins has one column, what it holds in part, for ``some - all``.


_MARGIN = 1e-6  # relative; the tolerance of HiGHS
_FAR = 6.0  # the clock's limit, in multiples of the counted time: on a busy machine nodes took four times as long


class SetProgram:
    """The program of a core's units on devices.

    Args:
        core: the core.
        places: the devices.
        limit: seconds; loads must be below it.
    """

    def __init__(self, core: Core, places: DeviceTable, limit: float) -> None:
        self._core = core
        self._places = places
        self._unit = limit / 100 or 1.0
        self._devices = len(places.work)
        self._pins = np.split(core.pins, core.starts[1:-1]) if len(core.pins) else []
        self.rows = rows = Rows()
        self._in = rows.block(core.size, self._devices)
        self._worst = rows.block(1)
        rows.add([(self._in[:, d], 1.0) for d in range(self._devices)], 1.0, 1.0)
        for d in range(self._devices):
            self._device(d)

    @staticmethod
    def columns(core: Core, places: DeviceTable) -> int:
        """Return about how many columns the program would have, without building it."""
        sizes = np.diff(core.starts)
        return sum(core.size + int(np.minimum(sizes[cost > 0] - 1, 2).sum()) for cost in places.costs)

    def solve(
        self, seconds: float, clock: Clock, *, known: float = 0.0, any_will_do: bool = False
    ) -> tuple[Ints | None, float]:
        """The device of each unit in what is found in time, and a bound on the greatest load, in seconds.

        Args:
            seconds: the time for the search.
            clock: the deadline.
            known: seconds; a known lower bound on the greatest load.
            any_will_do: accept any placement, whatever its greatest load and however long it took.
        """
        places, size = self._places, self.rows.columns
        price, low, high = np.zeros(size), np.zeros(size), np.ones(size)
        price[self._worst], high[self._worst] = 1.0, 100.0
        low[self._worst] = min(known / self._unit * (1 - _MARGIN), 100.0)
        high[self._in] = np.where(np.isinf(places.work.T), 0.0, 1.0)
        self._break_symmetry(high)
        whole = np.zeros(size, np.bool_)
        whole[self._in] = True
        result = self.rows.solve(price, whole, low, high, seconds, clock, any_will_do=any_will_do, once=True, far=_FAR)
        if result.status == 2:
            return None, np.inf
        proven = result.mip_dual_bound
        bound = 0.0 if proven is None or not np.isfinite(proven) else float(proven) * self._unit * (1 - _MARGIN)
        return (None if result.x is None else result.x[self._in].argmax(axis=1).astype(np.int64)), bound

    def _device(self, d: int) -> None:
        places, rows = self._places, self.rows
        work = np.where(np.isinf(places.work[d]), 0.0, places.work[d]) / self._unit
        terms = [(self._in[:, d], work), (self._worst, -np.ones(1))]
        nets = Nets.of(self._pins, places.costs[d] / self._unit)
        sizes = np.array([len(pins) for pins in nets.pins], np.int64)
        terms += self._pairs(d, nets, np.flatnonzero(sizes == 2)) + self._larger(d, nets, np.flatnonzero(sizes > 2))
        columns, factors = (np.concatenate(part) for part in zip(*terms, strict=True))
        rows.add_sum(columns, factors, high=0.0)
        most = float(places.nbytes[d].sum())
        if places.capacity[d] < most:
            rows.add_sum(self._in[:, d], places.nbytes[d] / most, high=places.capacity[d] / most)

    def _pairs(self, d: int, nets: Nets, which: Ints) -> list[tuple[Ints, Floats]]:
        """Return what nets of two pins add to the load of a device."""
        partly = self.rows.block(len(which))
        one, other = (self._in[np.array([nets.pins[net][at] for net in which], np.int64), d] for at in (0, 1))
        for first, then in ((one, other), (other, one)):
            self.rows.add([(first, 1.0), (then, -1.0), (partly, -1.0)], high=0.0)
        return [(partly, nets.costs[which])]

    def _larger(self, d: int, nets: Nets, which: Ints) -> list[tuple[Ints, Floats]]:
        """Return what nets of more pins add to the load of a device."""
        some, every = self.rows.block(len(which)), self.rows.block(len(which))
        of_pin = np.repeat(np.arange(len(which)), [len(nets.pins[net]) for net in which])
        here = self._in[np.array([pin for net in which for pin in nets.pins[net]], np.int64), d]
        self.rows.add([(here, 1.0), (some[of_pin], -1.0)], high=0.0)
        self.rows.add([(here, 1.0), (every[of_pin], -1.0)], low=0.0)
        return [(some, nets.costs[which]), (every, -nets.costs[which])]

    def _break_symmetry(self, high: Floats) -> None:
        """Add rows: of equal devices, the i-th in use holds none of the first i units."""
        places = self._places
        seen: dict[bytes, int] = {}
        for d in range(self._devices):
            key = places.work[d].tobytes() + places.costs[d].tobytes() + places.capacity[d].tobytes()
            place = seen.get(key, 0)
            high[self._in[:place, d]] = 0.0
            seen[key] = place + 1


# The set of greatest worth for a device within a load, by dynamic programming along an order of the units.
#
# The load of a set is its work plus the cost of each net that it holds in part. Along an order, all that matters of a
# partial set is its load and, for each net with pins on both sides of the place, whether it has none of the pins so
# far, all of them, or some (which costs). Where few nets cross each place, there are few states. Loads are whole
# multiples of a step, rounded down, so that no set within the load is lost.


_MOST_STATES = 200  # states at one place of the order; nets that would make more are ignored from there on
_NONE, _PACKING_ALL, _SOME = 0, 1, 2  # which of a net's pins so far are in the set
_State = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Nets:
    """Nets with distinct pins.

    Attributes:
        pins: of each net.
        costs: of each net, for a device that holds it in part.
    """

    pins: list[tuple[int, ...]]
    costs: Floats

    @classmethod
    def of(cls, pins: list[Ints], costs: Floats) -> Nets:
        """Merge nets with the same pins, and drop those that cost nothing."""
        summed: dict[tuple[int, ...], float] = {}
        for those, cost in zip(pins, costs.tolist(), strict=True):
            if cost > 0:
                key = tuple(sorted(those.tolist()))
                summed[key] = summed.get(key, 0.0) + cost
        return cls(list(summed), np.array(list(summed.values()), np.float64))

    def of_units(self, size: int) -> list[list[int]]:
        """Return the nets of each of so many units."""
        found: list[list[int]] = [[] for _ in range(size)]
        for net, pins in enumerate(self.pins):
            for pin in pins:
                found[pin].append(net)
        return found


@dataclass(frozen=True, eq=False)
class _Move:
    """Transitions of one place that add alike: rows of states before, and after; each after once."""

    taken: bool
    load: float
    before: Ints
    after: Ints

    def step(self, gain: float, unit: float, price: float) -> tuple[int, float]:
        """Units of load, and worth."""
        shift = int(self.load / unit)
        return shift, (gain if self.taken else 0.0) - price * (self.load - shift * unit)


class SetTable:
    """The transitions of one class of devices.

    Args:
        work: (n,) the work of each unit.
        barred: (n,) units that cannot be in a set.
        nets: the nets between the units.
        order: (n,) the units in the order of the dynamic program.
    """

    def __init__(self, work: Floats, barred: Bools, nets: Nets, order: Ints) -> None:
        self._work = work
        self._barred = barred
        self._order = order.tolist()
        self._size = len(work)
        self._moves: list[list[_Move]] = []
        self._counts: list[int] = []
        self._lay_out(nets)

    @property
    def states(self) -> int:
        """The number of states at all places together."""
        return sum(self._counts)

    @property
    def moves(self) -> int:
        """The number of groups of transitions at all places together."""
        return sum(map(len, self._moves))

    def best(self, worth: Floats, unit: float, most: int, price: float) -> BestSets:
        """Return the greatest worth for every load up to a limit.

        Args:
            worth: (n,) the worth of each unit, of any sign.
            unit: the step in which loads are counted.
            most: the limit, in steps.
            price: the worth of a second that rounding down leaves out.
        """
        values = [np.zeros((1, most + 1))]
        steps = list[list[tuple[_Move, int, float]]]()
        for place, moves in enumerate(self._moves):
            gain = float(worth[self._order[place]])
            now = np.full((self._counts[place], most + 1), -np.inf)
            steps.append([(move, *move.step(gain, unit, price)) for move in moves])
            for move, shift, more in steps[-1]:
                if shift <= most:
                    rows = values[-1][move.before, : most + 1 - shift]
                    now[move.after, shift:] = np.maximum(now[move.after, shift:], rows + more)
            values.append(now)
        return BestSets(self._order, values, steps)

    def _lay_out(self, nets: Nets) -> None:
        """Build the transitions; where there are too many states, the cheapest open nets are dropped."""
        place = np.empty(self._size, np.int64)
        place[self._order] = np.arange(self._size)
        last = [int(place[list(pins)].max()) for pins in nets.pins]  # the place of the last pin of each net
        of_unit = nets.of_units(self._size)
        left_out: set[int] = set()
        opened: list[int] = []
        states: dict[_State, int] = {(): 0}
        costs = nets.costs.tolist()
        for at, unit in enumerate(self._order):
            mine = set(of_unit[unit]) - left_out
            held = [net for net in dict.fromkeys([*opened, *sorted(mine)]) if last[net] > at]
            while True:
                kept = [net for net in held if net not in left_out]
                after, found = self._entered(unit, opened, states, kept, mine, costs)
                if len(after) <= _MOST_STATES:
                    break
                left_out.add(min(kept, key=lambda net: (costs[net], -last[net])))
            self._moves.append(
                [_Move(taken, load, *np.array(pairs, np.int64).T) for (taken, load, _), pairs in found.items()]
            )
            self._counts.append(len(after))
            opened, states = kept, after

    def _entered(
        self,
        unit: int,
        opened: list[int],
        states: dict[_State, int],
        kept: list[int],
        nets: set[int],
        costs: list[float],
    ) -> tuple[dict[_State, int], dict[tuple[bool, float, int], list[tuple[int, int]]]]:
        """The states after one more unit, and the pairs of rows by what they add: no state after twice in a list."""
        after: dict[_State, int] = {}
        found: dict[tuple[bool, float, int], list[tuple[int, int]]] = {}
        turns: dict[tuple[bool, float, int], int] = {}
        for state, row in states.items():
            for taken in (False, True) if not self._barred[unit] else (False,):
                held, paid = _entered(dict(zip(opened, state, strict=True)), nets, taken, costs)
                target = after.setdefault(tuple(held[net] for net in kept), len(after))
                load = paid + (float(self._work[unit]) if taken else 0.0)
                turn = turns.get((taken, load, target), 0)
                turns[taken, load, target] = turn + 1
                found.setdefault((taken, load, turn), []).append((row, target))
        return after, found


@dataclass(frozen=True, eq=False)
class BestSets:
    """The greatest worth within each load.

    Attributes:
        order: (n,) the units in the order of the dynamic program.
        values: (states, loads) the greatest worth, for each place of the order.
        steps: for each place the transitions, each with its units of load and its worth.
    """

    order: list[int]
    values: list[Floats]
    steps: list[list[tuple[_Move, int, float]]]

    @property
    def value(self) -> Floats:
        """(loads,) the greatest worth within each load; not decreasing."""
        value: Floats = self.values[-1][0]
        return value

    def chosen(self, load: int) -> Bools:
        """Return (n,) the units of a set of the greatest worth within a load."""
        found, state = np.zeros(len(self.order), np.bool_), 0
        for place in range(len(self.order) - 1, -1, -1):
            value = self.values[place + 1][state, load]
            state, load, found[self.order[place]] = next(
                (row, load - shift, move.taken)
                for move, shift, more in self.steps[place]
                if shift <= load
                for row in move.before[move.after == state].tolist()
                if self.values[place][row, load - shift] + more == value
            )
        return found


def narrow_order(size: int, nets: Nets) -> Ints:
    """Return an order of the units in which few nets are open at a time, built greedily."""
    of_unit = nets.of_units(size)
    starts = sorted(range(size), key=lambda unit: (len(of_unit[unit]), unit))[:4]  # with the fewest nets
    return min((_narrow(size, nets, of_unit, start) for start in starts), key=lambda found: found[0])[1]


def _narrow(size: int, nets: Nets, of_unit: list[list[int]], start: int) -> tuple[tuple[int, int], Ints]:
    """Return the order from one unit, and its width: the most open nets, and their sum over all places."""
    left = [len(pins) for pins in nets.pins]
    opened: dict[int, int] = {}  # net -> when
    near: dict[int, None] = {start: None}
    free = dict.fromkeys(range(size))
    order: list[int] = []
    widths: list[int] = []

    def price(unit: int) -> tuple[int, int, int]:
        fresh = sum(net not in opened and left[net] > 1 for net in of_unit[unit])
        closed = sum(net in opened and left[net] == 1 for net in of_unit[unit])
        oldest = min((opened[net] for net in of_unit[unit] if net in opened), default=size)
        return fresh - closed, oldest, unit

    for place in range(size):
        unit = min(near or free, key=price)
        near.pop(unit, None)
        free.pop(unit)
        order.append(unit)
        for net in of_unit[unit]:
            left[net] -= 1
            if net not in opened:
                opened[net] = place
                near.update(dict.fromkeys(pin for pin in nets.pins[net] if pin in free))
            if not left[net]:
                opened.pop(net)
        widths.append(len(opened))
    return (max(widths, default=0), sum(widths)), np.array(order, np.int64)


def _entered(held: dict[int, int], nets: set[int], taken: bool, costs: list[float]) -> tuple[dict[int, int], float]:
    """Return what a set has of each net (none, all, some) after one more unit, taken or not, and what that costs."""
    paid, pin = 0.0, _PACKING_ALL if taken else _NONE
    for net in sorted(nets):
        so_far = held.get(net, pin)
        if so_far not in (pin, _SOME):
            paid += costs[net]
            so_far = _SOME
        held[net] = so_far
    return held, paid


# Why a problem has no placement, and the smallest capacity that would do.


_EACH = 2.0  # seconds to test one capacity
_ALL = 10.0  # seconds after which the best known answer is returned


class FitCheck(Protocol):
    """A test whether a problem has a placement; None if unknown. A quick test answers None more often."""

    def __call__(self, problem: Problem, *, quick: bool = False) -> bool | None:
        """Run the test."""


def stages_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Return whether stages exist; None if none were found or excluded. A ``quick`` test searches along orders only."""
    core = core_of(problem, acyclic_groups(problem))
    if core.barred.all(axis=0).any():
        return False
    if level_count(core, problem.ordered) > MOST_LEVELS:
        return None
    steps = device_steps(core, problem.in_flight, ordered=problem.ordered, fill=problem.fill)
    search = StageSearch(core.reversed(), steps, _EACH, joinable=False)
    if quick:
        search.along_orders(any_will_do=True)
    else:
        search.run(any_will_do=True)
    return True if search.best else (False if search.closed else None)


def sets_fit(problem: Problem, *, quick: bool = False) -> bool | None:
    """Return whether sets of units exist for the devices, in any order; None if none were found or excluded. A
    ``quick`` test only packs the largest units first.
    """
    core = core_of(problem, colour_groups(problem))
    if core.barred.all(axis=0).any():
        return False
    places = DeviceTable.of_problem(problem, core)
    if quick:
        return None if pack_sets(core, places) is None else True
    found, excluded = find_sets(core, places, _EACH, Clock(_EACH))
    return True if found is not None else (False if excluded else None)


def infeasible(problem: Problem, *, proven: bool) -> InfeasibleError:
    """Return the error that says why a problem has no placement.

    Args:
        problem: a problem for which no placement was found.
        proven: whether it is proven that there is none.
    """
    if any(not device.cpu and np.isfinite(device.capacity) for device in problem.devices):
        return InfeasibleError("no placement was found within the memory", "memory" if proven else "unknown")
    reason = "no placement suits the devices that support the units"
    return InfeasibleError(reason if proven else "no placement was found", "devices" if proven else "unknown")


def _of_bytes(problem: Problem) -> Problem:
    """Return the same problem with bytes in place of seconds, and free nets."""
    held = (problem.nbytes + min(problem.in_flight, default=0) * problem.saved).astype(np.float64)
    rows = [
        np.where(np.isinf(problem.seconds[d.kind]), np.inf, 0.0 if d.cpu or np.isinf(d.capacity) else held)
        for d in problem.devices
    ]
    return replace(
        problem,
        seconds=np.stack(rows),
        devices=tuple(replace(device, kind=d) for d, device in enumerate(problem.devices)),
        net_costs=np.zeros(0),
        net_starts=np.zeros(1, np.int64),
        pins=np.zeros(0, np.int64),
        links=None,
    )


def _with(problem: Problem, capacity: float) -> Problem:
    """Return the same problem with the capacity of every limited device replaced."""
    devices = [d if np.isinf(d.capacity) else replace(d, capacity=capacity) for d in problem.devices]
    return replace(problem, devices=tuple(devices))


def least_capacity(problem: Problem, fit: FitCheck, clock: Clock | None = None) -> int:
    """Return the smallest capacity that would do for every limited device, as far as quick tests tell."""
    bytes_only, (low, high) = _of_bytes(problem), _range(problem)
    clock = Clock(_ALL, clock)
    while high - low > 1 and not clock.is_over():
        middle = (low + high) // 2
        low, high = (low, middle) if fit(_with(bytes_only, float(middle)), quick=True) else (middle, high)
    return high


def _range(problem: Problem) -> tuple[int, int]:
    """Return a capacity that is too small, and one that is always enough."""
    most = int(problem.nbytes.sum() + max(problem.in_flight, default=0) * problem.saved.sum())
    if any(device.cpu or np.isinf(device.capacity) for device in problem.devices):
        return -1, most
    held = problem.nbytes + min(problem.in_flight, default=0) * problem.saved
    return max(int(held.max(initial=0)), -(-int(held.sum()) // len(problem.devices))) - 1, most
