"""Safe contractions: units that some best placement keeps together become one unit."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.placement.core import BIG, Core, strong_components, value_lists
from splitkit.solvers.placement.problem import Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages.order_dp import class_speeds

_HALVINGS = 14  # of the interval that is left; with 1 to 28, six requests had the same bounds


def simple_bound(core: Core) -> int:
    """Return the greater of the longest unit on its quickest class and the total work divided among all devices."""
    longest = int(core.least_work.max(initial=0))
    quickness = sum(speed * len(kind.devices) for speed, kind in zip(class_speeds(core), core.kinds, strict=True))
    shared = int(core.least_work.sum() / quickness * (1 - 1e-12)) if quickness else 0
    return max(longest, shared)


def simple_bound_seconds(core: Core) -> float:
    """Return `simple_bound` in seconds of the problem, less what rounding to whole numbers may have added."""
    return max(0.0, simple_bound(core) - core.slack) / core.scale


def joining_bound(core: Core, low: int, high: int, *, acyclic: bool, filled: int = 0) -> int:
    """Return the greatest load below which units would have to be joined that then no longer fit the devices.

    Args:
        core: the core.
        low: a lower bound that is already known.
        high: a value that is attained.
        acyclic: whether units that depend on each other in a cycle are joined too.
        filled: the number of devices that must not be empty.
    """
    for _ in range(_HALVINGS):
        middle = (low + high + 1) // 2
        if middle <= low:
            break
        joined = tightened_core(core, middle, acyclic=acyclic)
        if joined.size < filled or max(simple_bound(joined), _shared(joined, middle)) >= middle:
            low = middle
        else:
            high = middle
    return low


def _shared(core: Core, limit: int) -> int:
    """Bound the load by counting the units that only some classes of devices can take below a limit.

    Such units share k devices: these do all of their work, and of the longest ``q * k + 1`` units some device has ``q +
    1``.
    """
    work = np.where(core.barred, BIG, core.work)
    for row, kind in zip(work, core.kinds, strict=True):
        row[core.nbytes > kind.capacity] = BIG
    able = work < limit
    if not able.any(axis=0).all():
        return BIG
    patterns = np.unique(able.T, axis=0)
    least = 0
    for classes in [*patterns, np.ones(len(core.kinds), np.bool_)]:
        only = ~able[~classes].any(axis=0)
        devices = sum(len(kind.devices) for kind, taken in zip(core.kinds, classes, strict=True) if taken)
        longest = np.sort(work[:, only].min(axis=0))[::-1]
        least = max(least, -(-int(longest.sum()) // devices))
        for more in range(1, (len(longest) - 1) // devices + 1):
            last = more * devices
            least = max(least, int(longest[last - more : last + 1].sum()))
    return least


def check_placeable(problem: Problem, core: Core) -> None:
    """Raise `InfeasibleError` if a problem has no placement whatever the order and the memory.

    Args:
        problem: the problem.
        core: its core over the groups of units that share a device.
    """
    lonely = np.flatnonzero(core.barred.all(axis=0))
    if len(lonely):
        units = tuple(map(int, np.flatnonzero(core.group == lonely[0])))
        reason = f"no device supports all of the units {list(units)}, which must share one"
        raise InfeasibleError(reason, "support", units=units)
    if problem.fill and core.size < len(problem.devices):
        reason = f"{len(problem.devices)} devices are to be filled, and only {core.size} groups of units can be apart"
        raise InfeasibleError(reason, "devices")


# Lower bounds on the greatest load that need no search.


def contracted_core(core: Core, *, acyclic: bool = True) -> Core:
    """Return the core with each light unit joined to a neighbour where that costs nothing.

    A unit joins a neighbour if the nets between these two alone cost at least as much as its work plus its nets that do
    not touch the neighbour: then no load grows when it moves to the neighbour's device. It must be able to move: all
    its predecessors, or all its successors, are the neighbour (if ``acyclic``); whatever supports the neighbour
    supports it; it has no work on a CPU (which would save nothing); and it needs no memory, or memory cannot bind.

    Proof that an optimum is kept: take a best placement in which unit *u* and neighbour *t* are apart, and move *u* to
    *t*. The device of *t* gains the work of *u*, and pays at most for the nets of *u* that have no pin at *t*; nets
    with both were cut already, and it no longer pays for the nets of the two alone. The device that *u* leaves loses
    its work, no longer pays for the nets of the two, and may start to pay for nets without *t*. Neither sum grows if
    the work and the nets without *t* cost no more than the nets of the two. All other devices pay for the same nets as
    before. If *t* is the only predecessor of *u*, then *u* may run right behind *t*, earlier than before, so the order
    of stages holds; likewise for successors.
    """
    joining = _Joining(core, acyclic)
    joining.run()
    return core.merged(_numbered(joining.root))


def tightened_core(core: Core, limit: int, *, acyclic: bool = True) -> Core:
    """Return the core with units joined that every placement with all loads below ``limit`` keeps together.

    This is repeated, because a joined unit has more work and more nets, which may make other nets too expensive to cut.
    """
    while True:
        label = _inseparable(core, limit)
        size = int(label.max(initial=-1)) + 1
        if size == core.size:
            return core
        if acyclic:  # what depends on each other in a cycle now: a stage in between would wait for itself
            edges = label[core.edges]
            label = strong_components(edges[edges[:, 0] != edges[:, 1]], size)[label]
        core = core.merged(label)


class _Joining:
    """Units that join others, one by one, over a graph that shrinks."""

    def __init__(self, core: Core, acyclic: bool) -> None:
        self.root = list(range(core.size))
        self._acyclic = acyclic
        self._pins: list[set[int]] = (
            [set(pins.tolist()) for pins in np.split(core.pins, core.starts[1:-1])] if len(core.pins) else []
        )
        paying = [k for k, kind in enumerate(core.kinds) if not kind.cpu]
        self._costs: list[list[int]] = core.costs[paying].tolist()
        self._work: list[list[int]] = core.work[paying].tolist()
        first, then = core.edges.T
        self._nets = [set(nets) for nets in value_lists(core.pins, core.pin_nets, core.size)]
        self._before = [set(units) for units in value_lists(then, first, core.size)]
        self._after = [set(units) for units in value_lists(first, then, core.size)]
        light = _memory_is_free(core) | ((core.nbytes == 0) & (core.saved == 0))
        cpus = [k for k, kind in enumerate(core.kinds) if kind.cpu]
        light &= (core.work[cpus] == 0).all(axis=0)
        self._light: list[bool] = light.tolist()
        self._barred: list[list[bool]] = core.barred.T.tolist()

    def run(self) -> None:
        """Join units until no more can join."""
        queue = [unit for unit, light in enumerate(self._light) if light]
        waiting = set(queue)
        while queue:
            unit = queue.pop()
            waiting.discard(unit)
            target = self._target(unit) if self._light[unit] and self.root[unit] == unit else None
            if target is None:
                continue
            for changed in self._join(unit, target):
                if self._light[changed] and changed not in waiting:
                    waiting.add(changed)
                    queue.append(changed)

    def _target(self, unit: int) -> int | None:
        """Return the neighbour that a light unit may join at no cost, if any."""
        before, after = self._before[unit], self._after[unit]
        sole: list[int]
        touched = {pin for net in self._nets[unit] for pin in self._pins[net]} - {unit}
        if self._acyclic and (before or after):
            sole = [*(before if len(before) == 1 else ()), *(after if len(after) == 1 else ())]
        else:
            sole = sorted(touched)
        for other in sole:
            if any(own and not its for own, its in zip(self._barred[unit], self._barred[other], strict=True)):
                continue
            # To follow the neighbour must be better on every class of devices that pays: which one either is on is
            # unknown.
            private = [net for net in self._nets[unit] if self._pins[net] == {unit, other}]
            loose = [net for net in self._nets[unit] if other not in self._pins[net]]
            if all(
                work[unit] + sum(cost[net] for net in loose) <= sum(cost[net] for net in private)
                for work, cost in zip(self._work, self._costs, strict=True)
            ):
                return other
        return None

    def _join(self, unit: int, target: int) -> set[int]:
        """Merge a unit into another; return the units that may have become joinable."""
        self.root[unit] = target
        for net in self._nets[unit]:
            self._pins[net].discard(unit)
            self._pins[net].add(target)
            if len(self._pins[net]) > 1:
                self._nets[target].add(net)
            else:
                self._nets[target].discard(net)
        for here, there in ((self._before, self._after), (self._after, self._before)):
            for other in here[unit]:
                there[other].discard(unit)
                if other != target:
                    there[other].add(target)
                    here[target].add(other)
            here[target].discard(unit)
        for work in self._work:
            work[target] += work[unit]
        self._light[target] = self._light[target] and self._light[unit]
        return {target, *(pin for net in self._nets[target] for pin in self._pins[net])}


def _memory_is_free(core: Core) -> bool:
    """Return whether every device could hold everything."""
    most = int(core.nbytes.sum()) + int(core.saved.sum()) * core.flights
    return all(kind.cpu or kind.capacity >= most for kind in core.kinds)


def _inseparable(core: Core, limit: int) -> Ints:
    """Return labels (n,) that are equal for the pins of a net that is too expensive to cut.

    A net is too expensive if, for one of its pins, each device that could hold that pin without all the others would
    have a load of at least ``limit``; or, where there is at most one CPU, if that holds of each accelerator for any
    pin.
    """
    work = np.where(core.barred, BIG, core.work).tolist()
    costs = core.costs.tolist()
    pins = [part.tolist() for part in np.split(core.pins, core.starts[1:-1])] if len(core.pins) else []
    dearest = np.argsort(-core.costs.max(axis=0, initial=0)[core.pin_nets], kind="stable")
    nets = value_lists(core.pins[dearest], core.pin_nets[dearest], core.size)
    one_cpu = sum(len(kind.devices) for kind in core.kinds if kind.cpu) <= 1
    dear_pins = [0] * len(pins)
    heavy = set()
    for unit in range(core.size):
        dear = set(nets[unit])
        on_cpu = False
        for kind, of_class, cost in zip(core.kinds, work, costs, strict=True):
            if kind.cpu:
                on_cpu |= of_class[unit] < limit
            elif dear:
                dear &= _too_dear(unit, nets[unit], pins, of_class, cost, limit)
        # Whoever cuts the net has one of its pins without all others. If that is an accelerator, its load is too high;
        # a CPU pays for nothing. But with one CPU, some of the pins are on an accelerator in any case.
        for net in dear:
            dear_pins[net] += 1
            if not on_cpu or (one_cpu and dear_pins[net] == len(pins[net])):
                heavy.add(net)
    chosen = np.isin(core.pin_nets, np.array(sorted(heavy), np.int64))
    makers = core.pins[core.starts[:-1]][core.pin_nets]
    matrix = coo_array((np.ones(int(chosen.sum())), (makers[chosen], core.pins[chosen])), shape=(core.size, core.size))
    label: Ints = connected_components(matrix, directed=False)[1].astype(np.int64)
    return label


def _too_dear(
    unit: int, nets: list[int], pins: list[list[int]], work: list[int], costs: list[int], limit: int
) -> set[int]:
    """Return the nets of a unit that raise an accelerator's load to ``limit`` when it holds the unit and cuts them.

    For each other net of the unit, the accelerator also pays for the net or does the work of all its other pins.
    """
    # Each other net is cut, or the accelerator has all of its pins, and their work. A pin that two nets have counts for
    # the first alone, so that no work counts twice: the sum is never more than the load.
    claimed = {unit}
    shares: list[int] = []
    for net in nets:
        fresh = [pin for pin in pins[net] if pin not in claimed]
        claimed.update(fresh)
        shares.append(min(costs[net], sum(work[pin] for pin in fresh)))
    alone = work[unit] + sum(shares)
    return {net for net, share in zip(nets, shares, strict=True) if alone - share + costs[net] >= limit}


def _numbered(root: list[int]) -> Ints:
    """Return labels from 0, equal for units that joined the same unit."""
    ends = np.array(root, np.int64)
    while not np.array_equal(ends, ends[ends]):
        ends = ends[ends]
    label: Ints = np.unique(ends, return_inverse=True)[1].astype(np.int64)
    return label
