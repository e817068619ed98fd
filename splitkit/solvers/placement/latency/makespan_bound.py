"""A lower bound on the makespan: the longest path through the graph, with the least work of each accelerator.

A path through the graph enters and leaves each piece once, so it takes at least the time of its units where they are
placed, plus the cost of its nets between places, on each side that is an accelerator. A mixed-integer program finds the
placement, within the memory, whose longest path is shortest; it ignores what else a piece waits for.
"""

from __future__ import annotations

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.latency.makespan import Timing
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.problem import Floats, Ints, Problem

_MARGIN = 1e-6  # relative; the tolerance of HiGHS
_MOST_COLUMNS = 12_000


def critical_path(problem: Problem, timing: Timing, order: Ints) -> float:
    """Return the longest path through the graph when every unit is where it is quickest."""
    quickest = np.min(np.array([*timing.work, timing.cpu]), axis=0).tolist()
    end = [0.0] * problem.units
    for unit in order.tolist():
        end[unit] = quickest[unit] + max((end[u] for u in timing.before[unit]), default=0.0)
    return max(end, default=0.0)


def path_bound(problem: Problem, timing: Timing, group: Ints, value: float, seconds: float, clock: Clock) -> float:
    """Return a lower bound on the makespan.

    Args:
        problem: the problem.
        timing: the times of the problem's units and transfers.
        group: (n,) units of the same group share a device.
        value: a makespan that is attained.
        seconds: the time for the search.
        clock: the deadline.
    """
    program = _LatencyProgram(problem, timing, group, value)
    return program.solve(seconds, clock) if program.rows.columns <= _MOST_COLUMNS else 0.0


class _LatencyProgram:
    """The program: one column for each group and device; all CPUs together are the last device."""

    def __init__(self, problem: Problem, timing: Timing, group: Ints, value: float) -> None:
        self._problem = problem
        self._timing = timing
        self._group = group
        self._value = value
        self._unit = value / 100 or 1.0
        self.rows = rows = Rows()
        accelerators = [device for device in problem.devices if not device.cpu]
        self._accelerators = accelerators
        groups = int(group.max(initial=-1)) + 1
        self._in = rows.block(groups, len(accelerators) + 1)
        self._end = rows.block(problem.units)
        self._worst = rows.block(1)
        times = [problem.seconds[device.kind] for device in accelerators]
        self._times = np.array([*times, timing.cpu])
        rows.add([(self._in[:, d], 1.0) for d in range(self._in.shape[1])], 1.0, 1.0)
        rows.add([(self._end, 1.0), (np.repeat(self._worst, problem.units), -1.0)], high=0.0)
        self._first_units()
        self._edges()
        for d in range(len(accelerators)):
            self._memory(d)

    def solve(self, seconds: float, clock: Clock) -> float:
        columns = self.rows.columns
        price, low, high = np.zeros(columns), np.zeros(columns), np.ones(columns)
        price[self._worst], high[self._worst], high[self._end] = 1.0, 100.0 * (1 + _MARGIN), 100.0 * (1 + _MARGIN)
        barred = np.zeros((self._in.shape[0], self._in.shape[1]), np.bool_)
        np.logical_or.at(barred, self._group, np.isinf(self._times.T))
        high[self._in[barred]] = 0.0
        self._break_symmetry(high)
        whole = np.zeros(columns, np.bool_)
        whole[self._in] = True
        result = self.rows.solve(price, whole, low, high, seconds, clock)
        if result.status == 2:
            return self._value
        proven = result.mip_dual_bound
        return 0.0 if proven is None or not np.isfinite(proven) else float(proven) * self._unit * (1 - _MARGIN)

    def _own(self, units: Ints) -> list[tuple[Ints, Floats]]:
        """Return columns and factors whose sums are the times of units."""
        times = np.where(np.isinf(self._times), 0.0, self._times) / self._unit
        return [(self._in[self._group[units], d], times[d, units]) for d in range(self._in.shape[1])]

    def _first_units(self) -> None:
        units = np.arange(self._problem.units)
        self.rows.add_scaled([(self._end, np.ones(len(units))), *((c, -f) for c, f in self._own(units))], low=0.0)

    def _edges(self) -> None:
        """Add rows: a unit ends after each predecessor, by its own time and the transfer between them."""
        timing, group = self._timing, self._group
        edges = [(u, v) for v, units in enumerate(timing.before) for u in units]
        if not edges:
            return
        first, then = np.array(edges, np.int64).T
        costs = np.array([self._between(u, v) for u, v in edges]) / self._unit
        moves = (group[first] != group[then]) & (costs > 0)
        out, into = (self.rows.block(len(edges), len(self._accelerators)) for _ in range(2))
        terms = [(self._end[then], np.ones(len(edges))), (self._end[first], -np.ones(len(edges)))]
        terms += [(columns, -factors) for columns, factors in self._own(then)]
        for d in range(len(self._accelerators)):
            here, there = self._in[group[first], d], self._in[group[then], d]
            self.rows.add([(out[:, d], 1.0), (here, -1.0), (there, 1.0)], low=0.0)
            self.rows.add([(into[:, d], 1.0), (there, -1.0), (here, 1.0)], low=0.0)
            terms += [(out[:, d], np.where(moves, -costs, 0.0)), (into[:, d], np.where(moves, -costs, 0.0))]
        self.rows.add_scaled(terms, low=0.0)

    def _between(self, u: int, v: int) -> float:
        """Return the cost of the nets made by the first unit that the second reads.

        A net that another unit made is left out: the path may have paid for it before, and a piece pays for each net
        once.
        """
        nets = (self._timing.nets[net] for net in self._timing.of_unit[u])
        return sum(cost for cost, pins in nets if pins[0] == u and v in pins)

    def _memory(self, d: int) -> None:
        held = np.zeros(self._in.shape[0])
        np.add.at(held, self._group, self._problem.nbytes)
        capacity, most = self._accelerators[d].capacity, float(held.sum())
        if capacity < most:
            self.rows.add_sum(self._in[:, d], held / most, high=capacity / most)

    def _break_symmetry(self, high: Floats) -> None:
        """Add rows: of equal accelerators, the i-th in use holds none of the first i groups."""
        seen: dict[object, int] = {}
        for d, device in enumerate(self._accelerators):
            place = seen.get(device, 0)
            high[self._in[:place, d]] = 0.0
            seen[device] = place + 1
