"""Large-neighbourhood search (Shaw 1998) for better sets: the units of a window are placed anew by an integer program.

Units outside the window stay where they are, merged into one unit for each device, so the mixed-integer program is
small. A window has the units near a unit of the most loaded device, or all units of that device and another; the
windows grow where none helps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.evaluate import loads
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem
from splitkit.solvers.placement.sets.packing import is_placeable
from splitkit.solvers.placement.sets.set_program import SetProgram

_FIRST, _GROWTH = 40, 1.25  # units of a window at first; times as many after windows of all kinds that did not help
_EACH = 0.5  # seconds for one window, counted in nodes
_THOUSAND = 1.0  # seconds that the root of a program of so many columns takes, about; they go with the third power
_LEAST = 0.01  # that a window takes
_DEVICES = 4  # between which the units of a window go
_NEAR = 2  # windows near a unit for each pair of devices
_LARGEST = 1_000  # columns of the program of a window


class NeighbourhoodSearch:
    """The search from one placement.

    Args:
        problem: the problem.
        core: its core, with the units (n).
        device: (n,) the device of each unit at the start; it must satisfy all constraints.

    Attributes:
        device: (n,) the best found so far.
    """

    def __init__(self, problem: Problem, core: Core, device: Ints) -> None:
        self._problem = problem
        self._core = replace(core, group=np.arange(core.size))
        self._group = core.group
        self._random = np.random.default_rng(0)
        self.device = device
        self._loads = self._weighed(device)
        pins = np.split(core.pins, core.starts[1:-1]) if len(core.pins) else []
        self._near: list[list[int]] = [[] for _ in range(core.size)]
        for those in pins:
            for pin in those.tolist():
                self._near[pin] += those.tolist()

    def run(self, seconds: float, clock: Clock, enough: float) -> None:
        """Search until the greatest load is at most ``enough``, or the largest windows do not help.

        Args:
            seconds: about so long; counted in nodes of the programs.
            clock: ends it at the latest.
            enough: seconds.
        """
        size, spent, turn, idle = float(_FIRST), 0.0, 0, 0
        most = len(self._loads) - 1
        while spent < seconds and not clock.is_over() and self._loads.max() > enough:
            before = np.sort(self._loads)[::-1].tolist()
            cost = self._place(self._window(turn, int(size)), clock)
            spent += cost
            turn += 1
            idle = 0 if np.sort(self._loads)[::-1].tolist() < before else idle + 1
            if idle > (_NEAR + 1) * max(1, most):
                if size >= self._core.size:
                    break
                size, idle = size * _GROWTH, 0

    def _window(self, turn: int, size: int) -> Bools:
        """Return (n,) the units to be placed anew."""
        hot = int(self._loads.argmax())
        if turn % (_NEAR + 1) == _NEAR and len(self._loads) > 1:
            others = [d for d in range(len(self._loads)) if d != hot]
            other = others[turn // (_NEAR + 1) % len(others)]
            pair: Bools = np.isin(self.device, [hot, other])
            return pair
        first = int(self._random.choice(np.flatnonzero(self.device == hot)))
        spare = iter(self._random.permutation(self._core.size).tolist())  # where nothing more is near
        reached = {first}
        place, queue = 0, [first]
        while len(queue) < min(size, self._core.size):
            if place == len(queue):
                near = [next(unit for unit in spare if unit not in reached)]
            else:
                near = [unit for unit in dict.fromkeys(self._near[queue[place]]) if unit not in reached]
                self._random.shuffle(near)
                place += 1
            reached.update(near)
            queue += near
        window = np.zeros(self._core.size, np.bool_)
        window[queue[:size]] = True
        count = np.bincount(self.device[window], minlength=len(self._loads))
        count[hot] = self._core.size + 1
        return window & np.isin(self.device, np.argsort(-count, kind="stable")[:_DEVICES])

    def _place(self, window: Bools, clock: Clock) -> float:
        """Place the units of a window anew; return the seconds that this counts for."""
        used, label = np.unique(self.device[~window], return_inverse=True)
        labels = np.empty(self._core.size, np.int64)
        labels[~window] = label
        labels[window] = len(used) + np.arange(int(window.sum()))
        core = self._core.merged(labels)
        places = DeviceTable.of_problem(self._problem, core)
        within = np.unique(self.device[window])
        work = places.work.copy()
        if len(work) <= _DEVICES or len(within) == 1:
            within = np.arange(len(work))
        else:
            work[np.ix_(~np.isin(np.arange(len(work)), within), np.arange(core.size) >= len(used))] = np.inf
        for unit, device in enumerate(used.tolist()):
            work[np.arange(len(work)) != device, unit] = np.inf
        places = replace(places, work=work)
        columns = SetProgram.columns(core, places) * len(within) // len(work)  # the others are fixed
        if columns > _LARGEST:
            return _LEAST
        program = SetProgram(core, places, float(self._loads.max()) * (1 + 1e-9), alike=False)
        found, _ = program.solve(_EACH, clock)
        if found is not None and is_placeable(core, places, found):
            self._take(found[labels])
        return program.rows.spent + _THOUSAND * (columns / 1000) ** 3

    def _take(self, device: Ints) -> None:
        """Keep a placement if its sorted loads are smaller."""
        now = self._weighed(device)
        if np.sort(now)[::-1].tolist() < np.sort(self._loads)[::-1].tolist():
            self.device, self._loads = device, now

    def _weighed(self, device: Ints) -> Floats:
        return loads(self._problem, device[self._group])
