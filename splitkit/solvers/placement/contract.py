"""Safe contractions: units that some best placement holds together become one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.groups import strong
from splitkit.solvers.placement.problem import Ints


def contracted(core: Core, *, acyclic: bool = True) -> Core:
    """The core with each light unit joined to a neighbour where that costs nothing.

    A unit joins a neighbour if the nets of these two alone cost at least as much as its work and its nets that do not
    touch the neighbour: then no load grows when it follows the neighbour. It must be able to follow: all before it,
    or all after it, is the neighbour (if ``acyclic``), whatever supports the neighbour supports it, it has no work on
    a host (which would save nothing), and it needs no memory or memory cannot bind.

    Why an optimum is kept: take a best placement in which unit *u* and neighbour *t* are apart, and move *u* to *t*.
    The device of *t* takes the work of *u*, and pays at most for the nets of *u* that have no pin at *t*; nets with
    both were cut already, and it no longer pays for those of the two alone. The device that *u* leaves has less work,
    pays no longer for the nets of the two, and may pay anew for those without *t*. Both sums are no greater than before
    if work and nets without *t* cost no more than the nets of the two. All other devices pay for the same nets as
    before. If *t* is all that is before *u*, then *u* may run right behind *t*, earlier than it did, so the order of
    stages holds; and the other way round.
    """
    joining = _Joining(core, acyclic, 0)
    joining.run()
    return core.merged(_numbered(joining.root))


def relaxed(core: Core, most: int) -> Core:
    """The core with more joined: as in `contracted`, but what a unit that joins does on a host counts for nothing.

    No greatest load of the core is less than the least one of this: each placement of the core, with units moved as in
    `contracted`, is one of this with no higher loads, as what a host would have had to do for them counts for nothing.

    Args:
        core: whose units.
        most: work on a host; units with more join as in `contracted`.
    """
    joining = _Joining(core, True, most)
    joining.run()
    joined = np.array(joining.root) != np.arange(core.size)
    hosts = np.array([kind.host for kind in core.kinds])
    work = np.where(hosts[:, None] & joined[None], 0, core.work)
    return replace(core, work=work).merged(_numbered(joining.root))


def tightened(core: Core, limit: int, *, acyclic: bool = True) -> Core:
    """The core with units joined that every placement with all loads below ``limit`` holds together.

    Again and again, for what is joined has more work and more nets, which may make other nets too dear to be cut.
    """
    while True:
        label = _inseparable(core, limit)
        size = int(label.max(initial=-1)) + 1
        if size == core.size:
            return core
        if acyclic:  # what depends on each other in a cycle now: a stage in between would wait for itself
            edges = label[core.edges]
            label = strong(edges[edges[:, 0] != edges[:, 1]], size)[label]
        core = core.merged(label)


class _Joining:
    """Units that join others, one by one, over a graph that shrinks."""

    def __init__(self, core: Core, acyclic: bool, most_on_host: int) -> None:
        self.root = list(range(core.size))
        self._acyclic = acyclic
        self._pins: list[set[int]] = (
            [set(pins.tolist()) for pins in np.split(core.pins, core.starts[1:-1])] if len(core.pins) else []
        )
        paying = [k for k, kind in enumerate(core.kinds) if not kind.host]
        self._costs: list[list[int]] = core.costs[paying].tolist()
        self._work: list[list[int]] = core.work[paying].tolist()
        self._nets: list[set[int]] = [set() for _ in range(core.size)]
        for net, pins in enumerate(self._pins):
            for pin in pins:
                self._nets[pin].add(net)
        self._before: list[set[int]] = [set() for _ in range(core.size)]
        self._after: list[set[int]] = [set() for _ in range(core.size)]
        for first, then in core.edges.tolist():
            self._before[then].add(first)
            self._after[first].add(then)
        light = _memory_is_free(core) | ((core.nbytes == 0) & (core.saved == 0))
        hosts = [k for k, kind in enumerate(core.kinds) if kind.host]
        light &= (core.work[hosts] <= most_on_host).all(axis=0)
        self._light: list[bool] = light.tolist()
        self._barred: list[list[bool]] = core.barred.T.tolist()

    def run(self) -> None:
        """Join until nothing more can."""
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
        """The neighbour that a light unit may follow at no cost."""
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
        """Put a unit into another; what may be joinable now."""
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
    """Whether every device could hold everything."""
    most = int(core.nbytes.sum()) + int(core.saved.sum()) * core.flights
    return all(kind.host or kind.capacity >= most for kind in core.kinds)


def _inseparable(core: Core, limit: int) -> Ints:
    """(n,) labels: alike are the pins of a net that is too dear to be cut.

    That is so if each device that could hold one certain pin, without all others, would have a load of at least
    ``limit``; or each accelerator that could hold any pin so, where there is but one host.
    """
    work = np.where(core.barred, BIG, core.work).tolist()
    costs = core.costs.tolist()
    pins = [part.tolist() for part in np.split(core.pins, core.starts[1:-1])] if len(core.pins) else []
    nets: list[list[int]] = [[] for _ in range(core.size)]
    for net in np.argsort(-core.costs.max(axis=0, initial=0), kind="stable").tolist():
        for pin in pins[net]:
            nets[pin].append(net)
    one_host = sum(len(kind.devices) for kind in core.kinds if kind.host) <= 1
    dear_pins = [0] * len(pins)
    heavy = set()
    for unit in range(core.size):
        dear = set(nets[unit])
        on_host = False
        for kind, of_class, cost in zip(core.kinds, work, costs, strict=True):
            if kind.host:
                on_host |= of_class[unit] < limit
            elif dear:
                dear &= _too_dear(unit, nets[unit], pins, of_class, cost, limit)
        # Whoever cuts the net has one of its pins without all others. If that is an accelerator, its load is too high;
        # a host pays for nothing. But with one host, some of the pins are on an accelerator in any case.
        for net in dear:
            dear_pins[net] += 1
            if not on_host or (one_host and dear_pins[net] == len(pins[net])):
                heavy.add(net)
    chosen = np.isin(core.pin_nets, np.array(sorted(heavy), np.int64))
    makers = core.pins[core.starts[:-1]][core.pin_nets]
    matrix = coo_array((np.ones(int(chosen.sum())), (makers[chosen], core.pins[chosen])), shape=(core.size, core.size))
    label: Ints = connected_components(matrix, directed=False)[1].astype(np.int64)
    return label


def _too_dear(
    unit: int, nets: list[int], pins: list[list[int]], work: list[int], costs: list[int], limit: int
) -> set[int]:
    """The nets of a unit that take the load of an accelerator to ``limit`` when it holds the unit and cuts them.

    It also pays, for each other net of the unit, the net or the work of all its other pins.
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
    """Labels from 0 of the units by the unit that they joined in the end."""
    ends = np.array(root, np.int64)
    while not np.array_equal(ends, ends[ends]):
        ends = ends[ends]
    label: Ints = np.unique(ends, return_inverse=True)[1].astype(np.int64)
    return label
