"""CP-SAT (the optional extra ``cpsat``: ortools) on what is still open: stages, or sets in any order.

The model is that of `program` and `setprogram`. One worker and a fixed seed: the same problem comes out the same, as
long as the time is enough. Seconds become whole numbers, rounded down, so that the bound holds; it is off by up to
1e-7 of the greatest load for each unit and net.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from splitkit.solvers.placement.core import BIG, Core
from splitkit.solvers.placement.problem import Ints
from splitkit.solvers.placement.stages.ladder import Ladder
from splitkit.solvers.placement.stages.stages import StageRanks, fits, stage_loads

_WHOLE = 10**7  # the limit, as a whole number of the model


def available() -> bool:
    """Whether ortools is installed, and highspy not loaded: their solvers' symbols clash."""
    return "highspy" not in sys.modules and find_spec("ortools") is not None


def stages_by_cpsat(core: Core, ladder: Ladder, best: StageRanks, seconds: float) -> tuple[StageRanks | None, int]:
    """Better stages than the best, if there are any and the time is enough, and a bound on the greatest load."""
    slots = max(sum(used) for used in ladder.used)
    model = _Model(core, slots, best.value)
    model.order(ladder)
    kinds = [*best.kinds, *_unused(core, best.kinds)]
    model.hint(best.rank, kinds)
    slot, kinds, bound = model.solve(seconds)
    if slot is None:
        return None, bound
    used = np.arange(slots) if ladder.ordered else np.unique(slot)
    rank, of_stage = np.searchsorted(used, slot), tuple(kinds[place] for place in used.tolist())
    flights = tuple(ladder.flight(after) for after in range(len(of_stage)))
    if not fits(core, rank, of_stage, flights):
        return None, bound
    value = int(stage_loads(core, rank, of_stage).max())
    return (StageRanks(value, rank, of_stage) if value < best.value else None), bound


def sets_by_cpsat(core: Core, device: Ints, limit: int, fill: bool, seconds: float) -> tuple[Ints | None, int]:
    """Better sets than a placement, if there are any and the time is enough, and a bound on the greatest load.

    Args:
        core: whose units.
        device: (n,) the device of each unit in the placement.
        limit: its greatest load, as a whole number of the core.
        fill: no device stays empty.
        seconds: for the search.
    """
    kind_of = {d: kind for kind, spec in enumerate(core.kinds) for d in spec.devices}
    kinds = [kind_of[d] for d in range(len(kind_of))]
    model = _Model(core, len(kinds), limit)
    model.fix(kinds, fill)
    model.hint(device, kinds)
    found, _, bound = model.solve(seconds)
    return found, bound


class _Model:
    """Which unit is in which slot, a stage or a device, and of which class each slot is."""

    def __init__(self, core: Core, slots: int, limit: int) -> None:
        self._cp: ModuleType = import_module("ortools.sat.python.cp_model")
        self._core = core
        self._slots = range(slots)
        self._unit = max(limit, 1) / _WHOLE
        self._limit = limit
        self._model: Any = self._cp.CpModel()
        new = self._model.new_bool_var
        self._in = [[new("") for _ in self._slots] for _ in range(core.size)]
        self._on = [[new("") for _ in core.kinds] for _ in self._slots]
        self._worst = self._model.new_int_var(0, _WHOLE, "")
        for places in [*self._in, *self._on]:
            self._model.add_exactly_one(places)
        self._cut = self._nets()
        for slot in self._slots:
            for kind in range(len(core.kinds)):
                self._load(slot, kind)
        self._model.minimize(self._worst)

    def order(self, ladder: Ladder) -> None:
        """Slots are stages: no edge goes back; devices are used as the ladder says."""
        model = self._model
        by = [[model.new_bool_var("") for _ in self._slots] for _ in range(self._core.size)]
        for ordered, places in zip(by, self._in, strict=True):
            model.add(ordered[-1] == 1)
            for slot in self._slots:
                before = ordered[slot - 1] if slot else 0
                model.add(places[slot] == ordered[slot] - before)
        for first, then in self._core.edges.tolist():
            for slot in self._slots:
                model.add_implication(by[then][slot], by[first][slot])
        for kind, spec in enumerate(self._core.kinds):
            model.add(sum(on[kind] for on in self._on) <= len(spec.devices))
        if ladder.ordered:
            last_first = sorted(range(len(self._core.kinds)), key=lambda kind: -self._core.kinds[kind].devices[0])
            for slot, kind in enumerate(last_first):
                model.add(self._on[slot][kind] == 1)
        self._memory([ladder.flight(slot) for slot in self._slots])
        self._fill(ladder.fill)

    def fix(self, kinds: list[int], fill: bool) -> None:
        """Slots are devices of these classes, in any order."""
        for slot, kind in enumerate(kinds):
            self._model.add(self._on[slot][kind] == 1)
        self._memory([0] * len(kinds))
        self._fill(fill)

    def hint(self, slot: Ints, kinds: list[int]) -> None:
        """Start from a placement."""
        for places, here in zip(self._in, slot.tolist(), strict=True):
            for place, variable in enumerate(places):
                self._model.add_hint(variable, place == here)
        for on, chosen in zip(self._on, kinds, strict=True):
            for kind, variable in enumerate(on):
                self._model.add_hint(variable, kind == chosen)

    def solve(self, seconds: float) -> tuple[Ints | None, list[int], int]:
        """The slot of each unit and the class of each slot in what is found, and the bound."""
        cp, solver = self._cp, self._cp.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = max(seconds, 0.1) / 2  # of its own units: about a second each
        solver.parameters.max_time_in_seconds = max(seconds, 0.1)
        status = solver.solve(self._model)
        if status == cp.INFEASIBLE:
            return None, [], self._limit
        bound = int(solver.best_objective_bound * self._unit) if status in (cp.OPTIMAL, cp.FEASIBLE) else 0
        if status == cp.UNKNOWN:
            return None, [], int(max(0.0, solver.best_objective_bound) * self._unit)
        slot = np.array([[solver.value(variable) for variable in places] for places in self._in]).argmax(axis=1)
        kinds = [int(np.argmax([solver.value(variable) for variable in on])) for on in self._on]
        return slot, kinds, bound

    def _nets(self) -> list[list[Any]]:
        """For each slot and net whether the slot holds some of its pins but not all: 1 - 0, or at least that."""
        core, model = self._core, self._model
        cut: list[list[Any]] = [[] for _ in self._slots]
        for pins in np.split(core.pins, core.starts[1:-1]) if len(core.pins) else []:
            for slot in self._slots:
                some, whole = model.new_bool_var(""), model.new_bool_var("")
                for pin in pins.tolist():
                    model.add_implication(self._in[pin][slot], some)
                    model.add_implication(whole, self._in[pin][slot])
                cut[slot].append(some - whole)
        return cut

    def _load(self, slot: int, kind: int) -> None:
        core, model = self._core, self._model
        on = self._on[slot][kind]
        work = np.floor(core.work[kind] / self._unit).astype(np.int64).tolist()
        costs = np.floor(core.costs[kind] / self._unit).astype(np.int64).tolist()
        terms = [weight * self._in[unit][slot] for unit, weight in enumerate(work) if weight]
        terms += [cost * cut for cost, cut in zip(costs, self._cut[slot], strict=True) if cost]
        model.add(sum(terms) <= self._worst).only_enforce_if(on)
        for unit in np.flatnonzero(core.barred[kind]).tolist():
            model.add_implication(on, self._in[unit][slot].negated())

    def _memory(self, flights: list[int]) -> None:
        core = self._core
        for slot, flight in enumerate(flights):
            held = (core.nbytes + flight * core.saved).tolist()
            for kind, spec in enumerate(core.kinds):
                if spec.capacity < min(BIG, sum(held)):
                    total = sum(size * self._in[unit][slot] for unit, size in enumerate(held) if size)
                    self._model.add(total <= spec.capacity).only_enforce_if(self._on[slot][kind])

    def _fill(self, fill: bool) -> None:
        for slot in self._slots if fill else ():
            self._model.add_bool_or([places[slot] for places in self._in])


def _unused(core: Core, kinds: tuple[int, ...]) -> list[int]:
    """The classes of the devices that stages leave over."""
    return [
        kind for kind, spec in enumerate(core.kinds) for _ in range(len(spec.devices) - sum(k == kind for k in kinds))
    ]
