"""The search for a placement on devices whose links differ, or whose memory the sums of the units do not tell.

Measured on T5 and GPT-2 over three unequal links: without stages over all orders of devices all plans are 17 to 22 %
worse, without moves of single nodes 0.05 to 0.5 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.colocation import acyclic_groups, colour_groups
from splitkit.solvers.placement.core import core_of
from splitkit.solvers.placement.evaluate import cycles
from splitkit.solvers.placement.orders import order_by_key, orders
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.solution import Solution
from splitkit.solvers.placement.unequal.enumeration import Enumeration
from splitkit.solvers.placement.unequal.link_model import LinkPrices, UnequalLinks
from splitkit.solvers.placement.unequal.order_and_devices import best_on_order

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
    clock: Clock | None = None,
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
    start = time.monotonic()
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
        seconds=found.seconds + time.monotonic() - start,
        loads=search.linked.loads(search.best),
        tolerance=max(found.tolerance, 1e-9),
        timed_out=found.timed_out or (clock is not None and clock.timed_out),
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
        clock: Clock | None,
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
            if self._is_over():
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

    def _is_over(self) -> bool:
        return self._clock is not None and self._clock.is_over()

    def _take(self, device: Ints, solver: str) -> bool:
        """Keep a placement if it is better; return whether it is."""
        if not self.linked.is_legal(device):
            return False
        value = float(self.linked.loads(device).max())
        if value >= self.value * (1 - 1e-12) or not self._has_room(device):
            return False
        self.best, self.value, self.found_by = device.copy(), value, solver
        return True

    def _move(self, device: Ints) -> None:
        """Move single groups off the most loaded device as long as that helps."""
        if not self.linked.is_legal(device) or not self._has_room(device):
            return
        linked, now = self.linked, device.copy()
        left = int(_MOVES * self._seconds / max(1.0, linked.size / _UNITS) / 10)
        loads, moved = _key(linked.loads(now)), True
        while moved and left > 0 and not self._is_over():
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
