"""The set of greatest worth for a device within a load, by dynamic programming along an order of the units.

The load of a set is its work plus the cost of each net that it holds in part. Along an order, all that matters of a
partial set is its load and, for each net with pins on both sides of the place, whether it has none of the pins so far,
all of them, or some (which costs). Where few nets cross each place, there are few states. Loads are whole multiples of
a step, rounded down, so that no set within the load is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splitkit.solvers.placement.problem import Bools, Floats, Ints

_MOST_STATES = 200  # states at one place of the order; nets that would make more are ignored from there on
_NONE, _ALL, _SOME = 0, 1, 2  # which of a net's pins so far are in the set
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
        for place, moves in enumerate(self._moves):
            gain = float(worth[self._order[place]])
            now = np.full((self._counts[place], most + 1), -np.inf)
            for move in moves:
                shift, more = move.step(gain, unit, price)
                if shift <= most:
                    rows = values[-1][move.before, : most + 1 - shift]
                    now[move.after, shift:] = np.maximum(now[move.after, shift:], rows + more)
            values.append(now)
        return BestSets(self, worth, unit, price, values)

    def trace(self, worth: Floats, unit: float, price: float, values: list[Floats], load: int) -> Bools:
        """Return (n,) the units of a set of the greatest worth within a load."""
        chosen = np.zeros(self._size, np.bool_)
        state = 0
        for place in range(self._size - 1, -1, -1):
            here = self._order[place]
            state, load, chosen[here] = self._back(place, state, load, float(worth[here]), unit, price, values)
        return chosen

    def _back(
        self, place: int, state: int, load: int, gain: float, unit: float, price: float, values: list[Floats]
    ) -> tuple[int, int, bool]:
        value = values[place + 1][state, load]
        for move in self._moves[place]:
            shift, more = move.step(gain, unit, price)
            if shift <= load:
                for row in move.before[move.after == state].tolist():
                    if values[place][row, load - shift] + more == value:
                        return row, load - shift, move.taken
        raise AssertionError("a value that nothing leads to")

    def _lay_out(self, nets: Nets) -> None:
        """Build the transitions; where there are too many states, the cheapest open nets are dropped."""
        of_unit, last = self._indexed(nets)
        left_out: set[int] = set()
        opened: list[int] = []
        states: dict[_State, int] = {(): 0}
        costs = nets.costs.tolist()
        for place, unit in enumerate(self._order):
            mine = set(of_unit[unit]) - left_out
            held = [net for net in dict.fromkeys([*opened, *sorted(mine)]) if last[net] > place]
            while True:
                kept = [net for net in held if net not in left_out]
                after, found = self._entered(unit, opened, states, kept, mine, costs)
                if len(after) <= _MOST_STATES:
                    break
                left_out.add(min(kept, key=lambda net: (costs[net], -last[net])))
            self._moves.append([_Move(taken, load, *_columns(pairs)) for (taken, load, _), pairs in found.items()])
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

    def _indexed(self, nets: Nets) -> tuple[list[list[int]], dict[int, int]]:
        """The nets of each unit, and the place of the last pin of each net."""
        place = np.empty(self._size, np.int64)
        place[self._order] = np.arange(self._size)
        of_unit: list[list[int]] = [[] for _ in range(self._size)]
        last: dict[int, int] = {}
        for net, pins in enumerate(nets.pins):
            last[net] = int(place[list(pins)].max())
            for pin in pins:
                of_unit[pin].append(net)
        return of_unit, last


@dataclass(frozen=True, eq=False)
class BestSets:
    """The greatest worth within each load.

    Attributes:
        frontier: the table of the units.
        worth: (n,) the worth of each unit.
        unit: the step in which loads are counted.
        values: (states, loads) the greatest worth, for each place of the order.
    """

    frontier: SetTable
    worth: Floats
    unit: float
    price: float
    values: list[Floats]

    @property
    def value(self) -> Floats:
        """(loads,) the greatest worth within each load; not decreasing."""
        value: Floats = self.values[-1][0]
        return value

    def chosen(self, load: int) -> Bools:
        """Return (n,) the units of a set of the greatest worth within a load."""
        return self.frontier.trace(self.worth, self.unit, self.price, self.values, load)


def narrow_order(size: int, nets: Nets) -> Ints:
    """Return an order of the units in which few nets are open at a time, built greedily."""
    of_unit: list[list[int]] = [[] for _ in range(size)]
    for net, pins in enumerate(nets.pins):
        for pin in pins:
            of_unit[pin].append(net)
    return min((_narrow(size, nets, of_unit, start) for start in _starts(size, of_unit)), key=lambda found: found[0])[1]


def _starts(size: int, of_unit: list[list[int]]) -> list[int]:
    """Return some units to start from: those with the fewest nets."""
    return sorted(range(size), key=lambda unit: (len(of_unit[unit]), unit))[:4]


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
    paid, pin = 0.0, _ALL if taken else _NONE
    for net in sorted(nets):
        so_far = held.get(net, pin)
        if so_far not in (pin, _SOME):
            paid += costs[net]
            so_far = _SOME
        held[net] = so_far
    return held, paid


def _columns(pairs: list[tuple[int, int]]) -> Iterator[Ints]:
    before, after = np.array(pairs, np.int64).T
    return iter((before, after))
