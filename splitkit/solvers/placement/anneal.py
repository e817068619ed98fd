"""Simulated annealing of many placements at once, one move in each per step.

A move takes one unit to another device. Only these two devices' loads change: with ``a`` and ``b`` pins of a net of
``s`` on them before, the first pays for it after if ``a > 1``, the second if ``b + 1 < s``. All placements are rows of
arrays, so that numpy makes millions of moves a second. From time to time the worst placements become copies of the
best ("go with the winners", Aldous and Vazirani 1994).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import BIG, Core, value_lists
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Problem

# First near the start, then over a smoother landscape that knows all loads, far from it, then near what was found.
# Each phase: its share of the time, the power of the norm that approximates the greatest load, two temperatures.
_PHASES = ((0.5, 20.0, 0.02, 0.0002), (0.2, 10.0, 0.3, 0.003), (0.3, 20.0, 0.02, 0.0002))
_ROUND = 200  # steps between two checks of the clock
_MOST_ROWS, _CELLS = 256, 2**22  # placements, and the numbers in all of their tables
_STEP_SECONDS, _ENTRY_SECONDS = 3e-4, 1e-7  # what a step takes, about, and more for each net of each unit moved


@dataclass(frozen=True, eq=False)
class DeviceTable:
    """The devices one by one, as arrays for annealing.

    Attributes:
        work: (d, n) seconds of each unit on each device; infinite where it is not supported.
        costs: (d, m) the cost of each net for a device that holds it in part.
        nbytes: (d, n) bytes of each unit on each device.
        capacity: (d,) bytes.
        fill: whether every device must get a unit, which stages alone keep to.
    """

    work: Floats
    costs: Floats
    nbytes: Floats
    capacity: Floats
    fill: bool

    @classmethod
    def of(cls, core: Core, kinds: tuple[int, ...], flights: tuple[int, ...], *, fill: bool) -> DeviceTable:
        """Return the table of devices of the given classes, with the given microbatches in flight."""
        rows = list(kinds)
        capacity = [np.inf if core.kinds[k].capacity >= BIG else float(core.kinds[k].capacity) for k in kinds]
        return cls(
            work=np.where(core.barred, np.inf, core.work / core.scale)[rows],
            costs=(core.costs / core.scale)[rows],
            nbytes=core.nbytes + np.array(flights, np.float64)[:, None] * core.saved,
            capacity=np.array(capacity),
            fill=fill,
        )

    @classmethod
    def of_problem(cls, problem: Problem, core: Core) -> DeviceTable:
        """Return the table of a problem's devices in any order, with nothing in flight, which may be empty."""
        kinds = [0] * len(problem.devices)
        for kind, spec in enumerate(core.kinds):
            for device in spec.devices:
                kinds[device] = kind
        return cls.of(core, tuple(kinds), (0,) * len(kinds), fill=False)


def cooling(rounds: int, clock: Clock) -> Iterator[float]:
    """Yield the progress of each round of annealing, from 0 to 1, until the clock is over.

    Rounds are counted so that the result is the same on a slow or busy machine.
    """
    for past in range(rounds):
        if clock.is_over():
            return
        yield past / rounds


def population_size(core: Core, devices: int) -> int:
    """Return how many placements to anneal at once: the larger they are, the fewer."""
    cells = max(1, core.costs.shape[1] * devices)
    return int(min(_MOST_ROWS, max(8, _CELLS // cells)))


class Population:
    """Placements of a core's units on devices, all annealed at once.

    Args:
        core: the core with the units (n).
        places: the devices (d).
        start: (n,) the device of each unit at the start; it must satisfy all constraints.
        size: the number of placements (r).

    Attributes:
        device: (r, n) the device of each unit.
        loads: (r, d) seconds of each device.
        best: (n,) the best placement so far, as the device of each unit.
        value: its greatest load.
    """

    def __init__(self, core: Core, places: DeviceTable, start: Ints, size: int) -> None:
        self._core = core
        self._places = places
        self._random = np.random.default_rng(0)
        self._rows = np.arange(size)
        self._devices, self._nets = len(places.work), core.costs.shape[1]
        lists = value_lists(core.pins, core.pin_nets, core.size)
        most = max(1, *map(len, lists))
        padded = [own + [self._nets] * (most - len(own)) for own in lists]
        self._touching: Ints = np.array(padded, np.int64)  # (n, most) nets, then a free one
        self._sizes = np.append(np.diff(core.starts), 2)
        self._costs = np.concatenate([places.costs, np.zeros((self._devices, 1))], axis=1)
        self.device: Ints = np.tile(start, (size, 1))
        self._recount()
        self.best = start
        self.value = np.inf
        self._keep()

    def rounds(self, seconds: float) -> int:
        """Return about how many rounds fit in some seconds."""
        step = _STEP_SECONDS + _ENTRY_SECONDS * len(self._rows) * self._touching.shape[1]
        return max(1, int(seconds / (step * _ROUND)))

    def run(self, schedule: Iterator[float], enough: float = 0.0) -> None:
        """Anneal until the schedule (`cooling`) ends or a value of at most ``enough`` is reached."""
        while self.value > enough and (done := next(schedule, None)) is not None:
            power, heat = _phase(done)
            for _ in range(_ROUND):
                self._step(power, heat)
            self._recount()
            self._select(power)

    def _recount(self) -> None:
        """Recompute loads, bytes and pins of every placement, because incremental sums drift."""
        core, places = self._core, self._places
        size = len(self._rows)
        self._pins = np.zeros((size, self._nets + 1, self._devices), np.int32)
        of_pin = self.device[:, core.pins]
        np.add.at(self._pins, (self._rows[:, None], core.pin_nets[None], of_pin), 1)
        partly = (self._pins > 0) & (self._pins < self._sizes[None, :, None])
        self.loads = np.einsum("rmd,dm->rd", partly, self._costs)
        self._bytes = np.zeros((size, self._devices))
        unit = np.arange(core.size)[None]
        where = (np.broadcast_to(self._rows[:, None], self.device.shape), self.device)
        np.add.at(self.loads, where, places.work[self.device, unit])
        np.add.at(self._bytes, where, places.nbytes[self.device, unit])

    def _step(self, power: float, heat: float) -> None:
        """Propose one move in every placement, and accept it or not."""
        rows, random, places = self._rows, self._random, self._places
        unit = random.integers(self._core.size, size=len(rows))
        old = self.device[rows, unit]
        new = self._target(unit, old)
        nets = self._touching[unit]
        here, there = self._pins[rows[:, None], nets, old[:, None]], self._pins[rows[:, None], nets, new[:, None]]
        sizes = self._sizes[nets]
        lost = self._costs[old[:, None], nets] * ((here > 1).astype(np.int8) - (here < sizes))
        won = self._costs[new[:, None], nets] * ((there + 1 < sizes).astype(np.int8) - (there > 0))
        load_old, load_new = self.loads[rows, old], self.loads[rows, new]
        less = load_old - places.work[old, unit] + lost.sum(axis=1)
        more = load_new + places.work[new, unit] + won.sum(axis=1)
        allowed = (new != old) & self._allowed(unit, new)
        reference = self.loads.max(axis=1) + 1e-300
        energy = ((self.loads / reference[:, None]) ** power).sum(axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            change = (np.maximum(less, 0) / reference) ** power + (more / reference) ** power
            change -= (load_old / reference) ** power + (load_new / reference) ** power
            rise = np.log(np.maximum(energy + change, 1e-300) / np.maximum(energy, 1e-300))  # loads may be 0
        taken = allowed & (rise <= heat * random.exponential(size=len(rows)))
        self._apply(np.flatnonzero(taken), unit, old, new, nets, less, more)
        self._keep()

    def _target(self, unit: Ints, old: Ints) -> Ints:
        """Choose the target of each move: the device of another pin of a net, or any device."""
        random, rows = self._random, self._rows
        core = self._core
        new = random.integers(self._devices, size=len(rows))
        nets = self._touching[unit, random.integers(self._touching.shape[1], size=len(rows))]
        some = nets < self._nets
        if some.any():
            chosen = nets[some]
            pin = core.pins[core.starts[chosen] + random.integers(core.starts[chosen + 1] - core.starts[chosen])]
            near = self.device[rows[some], pin]
            new[some] = np.where(near == old[some], new[some], near)
        return new

    def _allowed(self, unit: Ints, new: Ints) -> Bools:
        """Return whether moves satisfy memory."""
        rows, places = self._rows, self._places
        fits: Bools = self._bytes[rows, new] + places.nbytes[new, unit] <= places.capacity[new]
        return fits

    def _apply(self, rows: Ints, unit: Ints, old: Ints, new: Ints, nets: Ints, less: Floats, more: Floats) -> None:
        places = self._places
        unit, old, new, nets = unit[rows], old[rows], new[rows], nets[rows]
        self.device[rows, unit] = new
        self.loads[rows, old], self.loads[rows, new] = less[rows], more[rows]
        self._bytes[rows, old] -= places.nbytes[old, unit]
        self._bytes[rows, new] += places.nbytes[new, unit]
        real = nets < self._nets
        row, net = np.nonzero(real)[0], nets[real]
        self._pins[rows[row], net, old[row]] -= 1
        self._pins[rows[row], net, new[row]] += 1

    def _keep(self) -> None:
        """Record the best placement."""
        worst = self.loads.max(axis=1)
        for row in np.flatnonzero(worst < self.value * (1 - 1e-12)).tolist():
            if worst[row] < self.value * (1 - 1e-12):
                self.best, self.value = self.device[row].copy(), float(worst[row])

    def _select(self, power: float) -> None:
        """Replace the worst eighth by copies of the best eighth."""
        share = len(self._rows) // 8
        if not share:
            return
        order = np.argsort(((self.loads / np.maximum(self.loads.max(), 1e-300)) ** power).sum(axis=1), kind="stable")
        good, bad = order[:share], order[-share:]
        for state in (self.device, self._pins, self.loads, self._bytes):
            state[bad] = state[good]


def _phase(done: float) -> tuple[float, float]:
    """Return the power and the temperature at a progress from 0 to 1."""
    for share, power, hot, cold in _PHASES:
        if done < share:
            return power, hot * (cold / hot) ** (done / share)
        done -= share
    return power, cold
