"""Simulated annealing of stages whose links differ, or of which a device has several, on their exact loads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import value_lists
from splitkit.solvers.placement.link_model import UnequalLinks
from splitkit.solvers.placement.problem import Ints

_STEPS, _ROUND = 4_000, 50  # steps in all, and between two looks at the clock
_HOT, _COLD = 0.5, 0.0005  # first and last temperature; the energy is the logarithm of the greatest load
_POWER, _VOID = 12.0, 0.3  # of the norm that stands for the greatest load; what an empty stage costs on the way


@dataclass(frozen=True, eq=False)
class LinkedAnnealing:
    """Units (n) in stages (k).

    Attributes:
        linked: the units, with the stages as devices.
        held: (k, n) bytes of each unit in each stage.
        device: (k,) the device of each stage; the load of a device is that of all its stages.
    """

    linked: UnequalLinks
    held: Ints
    device: Ints

    def annealed(self, stage: Ints, clock: Clock) -> Ints:
        """Improve stages by moving single units; moves keep every edge, the memory, and a unit in each stage.

        The number of steps and the seed are fixed, so the result is the same everywhere unless the clock ends the
        search.
        """
        random = np.random.default_rng(0)
        now, best = stage.copy(), stage.copy()
        value, least = self._energy(now)
        first, then = self.linked.edges.T
        before, after = value_lists(then, first, len(stage)), value_lists(first, then, len(stage))
        for step in range(_STEPS if len(stage) > 1 else 0):
            if step % _ROUND == 0 and clock.is_over():
                break
            heat = _HOT * (_COLD / _HOT) ** (step / _STEPS)
            unit = int(random.integers(len(stage)))
            low = max((int(now[u]) for u in before[unit]), default=0)
            high = min((int(now[u]) for u in after[unit]), default=self.linked.devices - 1)
            to, old = int(random.integers(low, high + 1)), int(now[unit])
            if to == old or not self._fits(now, unit, to):
                continue
            now[unit] = to
            energy, worst = self._energy(now)
            if energy - value > heat * random.exponential():
                now[unit] = old
                continue
            value = energy
            if worst < least * (1 - 1e-12):
                best, least = now.copy(), worst
        return best

    def _energy(self, stage: Ints) -> tuple[float, float]:
        """Return the energy and the greatest load (infinite where a stage is empty).

        The energy is the logarithm of a norm of the devices' loads that approximates the greatest load, plus a penalty
        for each empty stage.
        """
        loads = np.bincount(self.device, self.linked.loads(stage))
        empty = int((np.bincount(stage, minlength=self.linked.devices) == 0).sum())
        top = loads.max() + 1e-300
        norm = float(np.log(top) + np.log(((loads / top) ** _POWER).sum() + 1e-300) / _POWER)
        return norm + _VOID * empty, np.inf if empty else float(loads.max())

    def _fits(self, stage: Ints, unit: int, to: int) -> bool:
        return bool(self.held[to][stage == to].sum() + self.held[to][unit] <= self.linked.capacity[to])
