"""A lower bound on the greatest load of stages, from the least cost of crossing each border between them.

Border *j* divides the units of the first *j* stages, an ideal, from the rest. Under a limit on the loads, the border
lies in a window: a unit whose descendants have more work than the later stages can take is before it, and a unit whose
ancestors have more work than the first *j* stages can take is behind it. The least cost of the nets that cross
somewhere in the window is a minimum cut (a closure problem: Picard 1976). Both sides pay for the nets that cross, which
leaves them less room for work, so the windows narrow and the cuts grow. This is repeated until nothing changes, or
until some unit would have to be on both sides, which proves that no stages keep to the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import OptimizeResult
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core, descendants
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.problem import Bools, Floats, Ints
from splitkit.solvers.placement.stages.order_dp import (
    DeviceSteps,
    StageRanks,
    class_speeds,
    fits,
    least_paid,
    stage_loads,
)

MOST_UNITS = 4000
"""Larger cores have too many pairs of units that depend on each other: the closure is an n x n matrix."""
_BORDER_BOUND_HALVINGS = 12  # of the interval between bound and value: to 1/4096 of it
_ROUNDS = 8  # times that windows are narrowed and cuts recomputed, for each limit


def border_bound(core: Core, low: int, high: int) -> int:
    """Return the greatest load below which the windows prove that no stages exist, or ``low``.

    Args:
        core: the core whose units are placed.
        low: a lower bound that is already known.
        high: a value that some stages attain.
    """
    if not borders_apply(core):
        return low
    borders = BorderBound.of(core)
    for _ in range(_BORDER_BOUND_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        if borders.windows(middle) is None:
            low = middle
        else:
            high = middle
    return low


def borders_apply(core: Core) -> bool:
    """Return whether borders give a bound: a CPU pays for no nets and may hold anything, so with one there is none."""
    return 0 < core.size <= MOST_UNITS and not any(kind.cpu for kind in core.kinds)


@dataclass(frozen=True, eq=False)
class BorderBound:
    """The data that the windows for all limits share.

    Attributes:
        core: the units (n) and the nets (m).
        closed: (n, n) whether the second unit is the first one or a descendant of it.
        cost: (m,) the least that each device pays for a net, in units of least work.
        before: (n,) the least work of each unit and its ancestors.
        after: (n,) the least work of each unit and its descendants.
        reach: (k + 1,) the most least work that the first 0 to k devices can do per unit of their load.
    """

    core: Core
    closed: Bools
    cost: Ints
    before: Ints
    after: Ints
    reach: list[float]

    @classmethod
    def of(cls, core: Core) -> BorderBound:
        """Return the data for a core for which `borders_apply`."""
        speeds = class_speeds(core)
        devices = sorted((r for r, kind in zip(speeds, core.kinds, strict=True) for _ in kind.devices), reverse=True)
        reach = [0.0, *np.cumsum(devices).tolist()]
        closed = descendants(core)
        before, after = _summed(closed.T, core.least_work), _summed(closed, core.least_work)
        return cls(core, closed, least_paid(core), before, after, reach)

    def windows(self, limit: int) -> tuple[Bools, Bools] | None:
        """Return the windows of stages with all loads below a limit; None if no such stages exist.

        The result is two arrays (k + 1, n) for k devices, where stages may be empty: the units that are certainly in
        the first j stages, and the units that are certainly in later ones.
        """
        room = [min(BIG, int(reach * (limit - 1) * (1 + 1e-12)) + 1) for reach in self.reach]
        total, last = int(self.core.least_work.sum()), len(room) - 1
        least = np.zeros(last + 1, np.int64)  # what crosses each border at least
        for _ in range(_ROUNDS):
            inside = self.after[None] + least[:, None] > np.array(room[::-1])[:, None]
            outside = self.before[None] + least[:, None] > np.array(room)[:, None]
            if (inside & outside).any():
                return None
            old = least.copy()
            for border in range(1, last):
                least[border] = max(least[border], self._crossing(inside[border], outside[border]))
                if total + 2 * int(least[border]) > room[border] + room[last - border]:
                    return None
            if (least == old).all():
                break
        return inside, outside

    def _crossing(self, inside: Bools, outside: Bools) -> int:
        """Return a lower bound on the cost of the nets that cross a border between the given units."""
        if not inside.any() or not outside.any():
            return 0
        shift = max(0, int(self.cost.sum()).bit_length() - BITS)
        return self._closures.least_cost(self.cost >> shift, inside, outside) << shift  # rounded down: lesser costs

    @cached_property
    def _closures(self) -> Closures:
        return Closures(self.core, self.closed)


def _summed(closed: Bools, work: Ints) -> Ints:
    """Return (n,) the work of all units that each row marks."""
    return np.array([work[row].sum() for row in closed], np.int64)


# The ideal of least cost, as a minimum cut: nets that cross its border have a cost, and units a price on either side.
#
# The source's side of the cut is the ideal (a closure problem: Picard 1976). An infinite arc leads from each unit to
# its direct predecessors, so an ideal that has the unit has them too. A net crosses if it has a pin inside and a pin
# outside: an arc of its cost leads from a vertex that infinite arcs of all pins enter to a vertex from which infinite
# arcs lead to all pins. Where one pin precedes all others it can stand for the former vertex, and a pin that follows
# all others for the latter.


BITS = 28
"""All costs together are below 2 ** 28, because scipy's ``maximum_flow`` adds capacities in 32 bits."""
_ENDLESS = 2**BITS


class Closures:
    """The ideals of a core's units (n), with its nets (m).

    Args:
        core: the core whose units are divided.
        closed: (n, n) whether the second unit is the first one or a descendant of it.

    Attributes:
        flows: the number of minimum cuts computed so far.
    """

    def __init__(self, core: Core, closed: Bools) -> None:
        self._size, self._nets = core.size, core.costs.shape[1]
        self.flows = 0
        first, then = core.size + np.arange(self._nets), core.size + self._nets + np.arange(self._nets)
        for net, pins in enumerate(np.split(core.pins, core.starts[1:-1]) if self._nets else ()):
            within = closed[np.ix_(pins, pins)]
            if within.all(axis=1).any():
                first[net] = pins[within.all(axis=1)][0]
            elif within.all(axis=0).any():
                then[net] = pins[within.all(axis=0)][0]
        nets = core.pin_nets
        into, out = first[nets] >= core.size, then[nets] >= core.size
        nowhere = np.full(len(core.edges), -1)
        self._tails = np.concatenate([core.edges[:, 1], core.pins[into], then[nets[out]], first])
        self._heads = np.concatenate([core.edges[:, 0], first[nets[into]], core.pins[out], then])
        self._of_net = np.concatenate([nowhere, nets[into], nets[out], np.arange(self._nets)])

    def least(self, cost: Ints, inside: Bools, outside: Bools, within: Ints, without: Ints) -> tuple[int, Bools]:
        """Return the least cost of an ideal, and the smallest ideal of that cost.

        Args:
            cost: (m,) the cost of each net that crosses the border; their sum is below 2 ** 28.
            inside: (n,) units that the ideal must have.
            outside: (n,) units that the ideal must not have; none precedes a unit that it must have.
            within: (n,) the price of each other unit if the ideal has it.
            without: (n,) the price of each other unit if the ideal does not have it.
        """
        arcs, value, flow = self._cut(cost, inside, outside, within, without)
        rest = arcs - flow
        rest.data = (rest.data > 0).astype(np.int8)
        rest.eliminate_zeros()
        reached = np.zeros(arcs.shape[0], np.bool_)
        reached[breadth_first_order(rest, 0, return_predecessors=False)] = True
        ideal: Bools = inside | (reached[2 : 2 + self._size] & ~outside)
        return value, ideal

    def least_cost(self, cost: Ints, inside: Bools, outside: Bools) -> int:
        """Return the least cost of an ideal when units have no price; arguments as for `least`."""
        nothing = np.zeros(self._size, np.int64)
        return self._cut(cost, inside, outside, nothing, nothing)[1]

    def _cut(
        self, cost: Ints, inside: Bools, outside: Bools, within: Ints, without: Ints
    ) -> tuple[csr_array, int, csr_array]:
        """Return the arcs, the value of a maximum flow from vertex 0 (inside) to vertex 1 (outside), and the flow."""
        self.flows += 1
        size = 2 + self._size + 2 * self._nets
        vertex = 2 + np.arange(size - 2)
        vertex[: self._size][inside], vertex[: self._size][outside] = 0, 1
        free = np.flatnonzero(~(inside | outside))
        some, others = free[without[free] > 0], free[within[free] > 0]
        carried = np.where(self._of_net < 0, _ENDLESS, 0)
        if self._nets:
            carried = np.where(cost[self._of_net] > 0, _ENDLESS, 0) | carried
            carried[len(carried) - self._nets :] = cost
        tails = np.concatenate([vertex[self._tails], np.zeros_like(some), 2 + others])
        heads = np.concatenate([vertex[self._heads], 2 + some, np.ones_like(others)])
        most = np.concatenate([carried, without[some], within[others]])
        kept = (tails != heads) & (heads != 0) & (tails != 1) & (most > 0)
        arcs = coo_array((most[kept], (tails[kept], heads[kept])), shape=(size, size)).tocsr()
        arcs.data = np.minimum(arcs.data, _ENDLESS).astype(np.int32)  # only endless ones are parallel
        found = maximum_flow(arcs, 0, 1)
        return arcs, int(found.flow_value), found.flow


# The best stages as a mixed-integer program, for graphs with too many ideals; HiGHS solves it, through scipy.
#
# Ordered binaries ``s[v, p]``, "unit v is in stage p or one before", make any solution a sequence of stages without
# cycles, and for each stage a binary says on which class of devices it is::
#
#     s[v, p] <= s[v, p + 1]              s[v, p] <= s[u, p]                for each edge u -> v
#     all[e, p] <= x[v, p] <= some[e, p]  x[v, p] = s[v, p] - s[v, p - 1]   for each pin v of net e
#     work[c] @ x[:, p] + cost[c] @ (some[:, p] - all[:, p]) <= L + most * (1 - on[p, c])


_SOLVED, _INFEASIBLE = 0, 2  # statuses of scipy's milp
_MARGIN = 1e-6  # relative; the tolerance of HiGHS
_MOST_COLUMNS = 4_000  # with more, HiGHS finds little and overruns its time
_MOST_OPEN = 2_500  # columns that the windows may leave open for a relaxation to be solved
_HALVINGS, _LIMITS = 5, 3  # down to the first limit for which the relaxation is solved, and so many limits in all
_RELAXATION = 20.0  # time limit in seconds; no relaxation came near it
# Seconds of a node, and what comes on top for each column times each whole one that the relaxation divides, which
# branches and cuts are to settle; of that as much before the first branch as for so many nodes.
_NODE, _DIVIDED, _ROOT = 4e-3, 8e-8, 100
_FEW, _NEAR = 100, 0.9  # of more such columns no tree is searched where the relaxation is below this share of the limit
_FAR = 4.0  # the clock ends a program after this many times the time that its nodes count for


def stage_program(
    core: Core, device_steps: DeviceSteps, limit: int, seconds: float, clock: Clock
) -> tuple[StageRanks | None, int]:
    """Return the best stages below ``limit`` that the integer program finds, and a bound on their greatest load.

    Args:
        core: the core; stages go from the last to the first, so its edges must be reversed.
        device_steps: the levels and steps of the devices.
        limit: loads must be below it; `BIG` for no limit.
        seconds: the time for the search, counted in nodes whose cost depends on how many columns the relaxation leaves
            fractional. If that is less than one node, the bound is that of the relaxation.
        clock: the deadline.
    """
    slots = _slots(device_steps)
    if core.size * slots + 2 * core.costs.shape[1] * slots > _MOST_COLUMNS:
        return None, 0
    known = _windows(core, slots, limit)
    if known is None:
        return None, limit
    return _Program(core, device_steps, slots, limit).solve(seconds, clock, *known)


def stage_relaxation(core: Core, device_steps: DeviceSteps, low: int, high: int, clock: Clock) -> int:
    """Return a bound on the greatest load by the linear relaxation within the windows of `BorderBound`, or ``low``.

    Args:
        core: the core; see `stage_program`.
        device_steps: the levels and steps of the devices.
        low: a lower bound that is already known.
        high: a value that some stages attain.
        clock: the deadline.
    """
    slots = _slots(device_steps)

    def told(limit: int) -> int:
        known = _windows(core, slots, limit)
        if known is not None and _open(core, *known) > _MOST_OPEN:
            return 0
        return BIG if known is None else _Program(core, device_steps, slots, limit).relaxed(clock, *known)[0]

    # Mostly the lowest limit that matters excludes nothing, and it is the quickest to solve. No relaxation is
    # below that of a greater limit: what one tells is the next limit, and what that tells is little less.
    limit = low + max(1, (high - low) >> _HALVINGS)
    for _ in range(_LIMITS):
        if limit > high or clock.is_over():
            break
        bound = told(limit)
        low = max(low, min(bound, limit))
        if bound <= limit:
            break
        limit = limit + 1 if limit == high else min(bound, high)
    return low


def _slots(device_steps: DeviceSteps) -> int:
    """Return the most stages that there can be."""
    return max(sum(used) for used in device_steps.used)


def _windows(core: Core, slots: int, limit: int) -> tuple[Bools, Bools] | None:
    """Return the windows of `BorderBound`; where there are none, only that all units are in some stage."""
    if borders_apply(core) and limit < BIG:
        return BorderBound.of(core).windows(limit)
    inside = np.zeros((slots + 1, core.size), np.bool_)
    inside[-1] = True
    return inside, ~inside & (np.arange(slots + 1) == 0)[:, None]


def _open(core: Core, inside: Bools, outside: Bools) -> int:
    """Count the columns that the windows leave open: of units on each border, and of nets with such units."""
    free = ~(inside | outside)
    touched = (core.incidence @ (free[1:] | free[:-1]).T.astype(np.int64)) > 0
    return int(free.sum()) + 2 * int(touched.sum())


class _Program:
    def __init__(self, core: Core, device_steps: DeviceSteps, slots: int, limit: int) -> None:
        self._core = core
        self._device_steps = device_steps
        self._slots = slots
        self._first = limit >= BIG  # no stages are known: any will do
        self._limit = min(limit, int(core.work.sum(axis=1).max() + core.costs.sum(axis=1).max(initial=0)) + 1)
        self._unit = max(1.0, self._limit / 100)
        rows = Rows()
        self._by = rows.block(core.size, slots)  # s
        self._on = rows.block(slots, len(core.kinds))
        self._some = rows.block(core.costs.shape[1], slots)
        self._all = rows.block(core.costs.shape[1], slots)
        self._worst = rows.block(1)
        self._rows = rows
        self._stages()
        self._devices()
        self._nets()
        for slot in range(slots):
            for kind in range(len(core.kinds)):
                self._load(slot, kind)
                self._memory(slot, kind)

    def solve(self, seconds: float, clock: Clock, inside: Bools, outside: Bools) -> tuple[StageRanks | None, int]:
        """Return the stages that HiGHS finds within the windows, checked and priced exactly, and the proven bound."""
        if self._first:
            nodes, proven = None, 0
        else:
            proven, divided = self.relaxed(clock, inside, outside)
            each = _DIVIDED * divided * self._rows.columns
            nodes = int((seconds - _ROOT * each) / (_NODE + each))
            hopeless = divided > _FEW and proven < _NEAR * self._limit
            if nodes < 1 or hopeless or proven >= self._limit:
                return None, min(proven, self._limit)
        whole = np.zeros(self._rows.columns, np.bool_)
        whole[self._by], whole[self._on] = True, True
        result = self._solved(whole, (self._limit - 1) / self._unit, seconds, clock, inside, outside, nodes)
        if result.status == _INFEASIBLE:
            return None, BIG if self._first else self._limit
        bound = max(proven, self._whole(result.mip_dual_bound))
        return (None if result.x is None else self._stages_of(result.x)), bound

    def relaxed(self, clock: Clock, inside: Bools, outside: Bools) -> tuple[int, int]:
        """Return the bound of the linear relaxation within the windows, `BIG` if it is infeasible.

        The second result is the number of columns with a fractional value that should be whole.
        """
        divisible = np.zeros(self._rows.columns, np.bool_)
        result = self._solved(divisible, np.inf, _RELAXATION, clock, inside, outside)
        if result.status == _INFEASIBLE:
            return BIG, 0
        if result.status != _SOLVED:
            return 0, self._rows.columns
        x = result.x[np.concatenate([self._by.ravel(), self._on.ravel()])]
        return self._whole(result.fun), int((np.abs(x - np.round(x)) > _MARGIN).sum())

    def _solved(
        self,
        whole: Bools,
        most: float,
        seconds: float,
        clock: Clock,
        inside: Bools,
        outside: Bools,
        nodes: int | None = None,
    ) -> OptimizeResult:
        """Solve the program with the greatest load up to ``most``."""
        columns = self._rows.columns
        price, low, high = np.zeros(columns), np.zeros(columns), np.ones(columns)
        price[self._worst], high[self._worst] = 1.0, most
        low[self._by[inside[1:].T]], high[self._by[outside[1:].T]] = 1.0, 0.0
        low[self._by[:, -1]] = 1.0
        known = not self._first
        return self._rows.solve(
            price, whole, low, high, seconds, clock, any_will_do=self._first, once=known, far=_FAR, nodes=nodes
        )

    def _whole(self, proven: float | None) -> int:
        """Round a bound of HiGHS to a whole number."""
        return 0 if proven is None or not np.isfinite(proven) else int(proven * self._unit * (1 - _MARGIN))

    def _stages(self) -> None:
        by = self._by
        self._rows.add([(by[:, :-1], 1.0), (by[:, 1:], -1.0)], high=0.0)
        first, then = self._core.edges[:, 0], self._core.edges[:, 1]
        self._rows.add([(by[then], 1.0), (by[first], -1.0)], high=0.0)

    def _devices(self) -> None:
        """Add rows: one class for each stage, no more stages than devices, ordered devices in their order."""
        for slot in range(self._slots):
            self._rows.add_sum(self._on[slot], np.ones(len(self._core.kinds)), 1.0, 1.0)
        for kind, spec in enumerate(self._core.kinds):
            self._rows.add_sum(self._on[:, kind], np.ones(self._slots), high=float(len(spec.devices)))
        if self._device_steps.ordered:
            last_first = sorted(range(self._slots), key=lambda kind: -self._core.kinds[kind].devices[0])
            for slot, kind in enumerate(last_first):
                self._rows.add_sum(self._on[slot, [kind]], np.ones(1), 1.0)

    def _nets(self) -> None:
        nets, pins = self._core.pin_nets, self._core.pins
        for slot in range(self._slots):
            here = self._by[pins, slot]
            terms = [(here, 1.0)] + ([(self._by[pins, slot - 1], -1.0)] if slot else [])
            self._rows.add([*terms, (self._some[nets, slot], -1.0)], high=0.0)
            self._rows.add([*terms, (self._all[nets, slot], -1.0)], low=0.0)
        if self._device_steps.fill:
            for slot in range(self._slots):
                self._rows.add_sum(*self._inside(slot, np.ones(self._core.size)), low=1.0)

    def _inside(self, slot: int, weights: Floats) -> tuple[Ints, Floats]:
        """Return the columns and factors whose sum is the weight of a stage."""
        if not slot:
            return self._by[:, 0], weights
        return self._by[:, [slot, slot - 1]], np.stack([weights, -weights], axis=1)

    def _load(self, slot: int, kind: int) -> None:
        """Add a row: the load of a stage is at most the greatest, if the stage is on a device of this class."""
        core, unit = self._core, self._unit
        columns, factors = self._inside(slot, core.work[kind] / unit)
        cost = core.costs[kind] / unit
        parts = [columns.ravel(), self._some[:, slot], self._all[:, slot], self._worst, self._on[slot, [kind]]]
        most = float(core.work[kind].sum() + core.costs[kind].sum()) / unit
        weights = [factors.ravel(), cost, -cost, np.array([-1.0]), np.array([most])]
        self._rows.add_sum(np.concatenate(parts), np.concatenate(weights), high=most)
        barred = np.flatnonzero(core.barred[kind])
        terms = [(self._by[barred, slot], 1.0)] + ([(self._by[barred, slot - 1], -1.0)] if slot else [])
        if len(barred):
            self._rows.add([*terms, (np.repeat(self._on[slot, kind], len(barred)), 1.0)], high=1.0)

    def _memory(self, slot: int, kind: int) -> None:
        """Add a row: the bytes of a stage fit, if the stage is on a device of this class."""
        held = self._core.nbytes + self._device_steps.flight(slot) * self._core.saved
        capacity, most = self._core.kinds[kind].capacity, int(held.sum())
        if capacity >= most:
            return
        columns, factors = self._inside(slot, held / max(1, most))
        room = capacity / max(1, most)
        parts = [columns.ravel(), self._on[slot, [kind]]]
        self._rows.add_sum(np.concatenate(parts), np.concatenate([factors.ravel(), [1.0]]), high=room + 1.0)

    def _stages_of(self, x: Floats) -> StageRanks | None:
        """Return the stages of a solution; None if, counted exactly, they exceed the limit or do not fit."""
        slot = (x[self._by] < 0.5).sum(axis=1)
        on = x[self._on].argmax(axis=1)
        used = np.unique(slot)
        if self._device_steps.ordered:  # a place is a device, used or not
            used = np.arange(self._slots)
        rank, kinds = np.searchsorted(used, slot), tuple(on[used].tolist())
        flights = tuple(self._device_steps.flight(after) for after in range(len(kinds)))
        if not fits(self._core, rank, kinds, flights):
            return None
        value = int(stage_loads(self._core, rank, kinds).max())
        return StageRanks(value, rank, kinds) if value < self._limit else None
