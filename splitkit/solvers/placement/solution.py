"""A placement with what is proven about it, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.core import Core, colour_groups, group_edges, strong_components
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.stages.order_dp import StageRanks

Key = Callable[[Ints, tuple[int, ...]], tuple[float, ...]]
"""A tie-breaker, least first: (device of each unit, used devices from the first stage to the last) -> key."""

_WEIGHED, _UNITS_WEIGHED = 24, 24_000  # placements of equal value, evenly of all: more where they have few units


def stage_numbers(device: Ints, order: tuple[int, ...]) -> Ints:
    """Return (n,) the stage of each unit, from its device and the devices from the first stage to the last."""
    stage = np.zeros(max(order) + 1, np.int64)
    stage[list(order)] = np.arange(len(order))
    return stage[device]


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement, its value and its bound.

    Attributes:
        device: (n,) the device of each unit.
        order: the used devices from the first stage to the last; empty where there are no stages.
        value: the seconds of the most loaded device, or the makespan.
        bound: a lower bound on the value of every placement.
        solver: the solver that found it, and the one that proved the bound if that is another.
        loads: (d,) seconds of each device.
        tolerance: relative; how much rounding may have cost the proof.
        turn: (n,) for a makespan: the piece of its device that a unit is in, from 0.
        timed_out: whether the clock ended part of the search, so that another machine may find another placement.
    """

    device: Ints
    order: tuple[int, ...]
    value: float
    bound: float
    solver: str
    loads: Floats
    tolerance: float
    turn: Ints | None = None
    timed_out: bool = False

    @property
    def gap(self) -> float:
        """How much the value exceeds the bound, as a fraction of the value."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the value equals the bound within the tolerance."""
        return self.gap <= self.tolerance


def timeout_note(tries: Iterable[Solution], clock: Clock | None = None) -> str:
    """Return the note that time, not counts, ended the search for one of these or for the whole; else ""."""
    timed_out = any(found.timed_out for found in tries) or (clock is not None and clock.timed_out)
    return "; cut short by time: another machine may find another plan" if timed_out else ""


class InfeasibleError(ValueError):
    """No placement satisfies the constraints, or none was found.

    Attributes:
        cause: ``"support"`` (no device supports all of ``units``, which share one), ``"devices"`` (fewer groups of
            units than devices to fill), ``"memory"`` or ``"unknown"`` (none was found, and none excluded).
        units: the units concerned.
    """

    def __init__(self, reason: str, cause: str, *, units: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.cause = cause
        self.units = units


def best_plan(
    problem: Problem, core: Core, plans: list[StageRanks], prefer: Key | None, clock: Clock | None = None
) -> tuple[Ints, tuple[int, ...], Floats]:
    """Return the best of several stages, placed and checked, with its loads: by value, then by the key, then the first.

    Args:
        problem: the problem.
        core: its core.
        plans: at least one.
        prefer: the key; if there are many stages, it is computed for some of them only.
        clock: the deadline for computing keys.
    """
    made = (devices_of_units(core, stages) for stages in plans)
    distinct = {(device.tobytes(), order): (device, order) for device, order in made}  # many are the same
    found = [(device, order, loads(problem, device)) for device, order in distinct.values()]
    least = min(load.max() for _, _, load in found)
    best = [each for each in found if each[2].max() <= least * (1 + 1e-12)]
    taken = best[0]
    if prefer and len(best) > 1:
        best.sort(key=lambda each: len(each[1]))  # the fewest stages first: there is nothing to weigh beside them
        most = max(_WEIGHED, _UNITS_WEIGHED // max(1, problem.units))
        some = [best[i] for i in dict.fromkeys(np.linspace(0, len(best) - 1, most).astype(int).tolist())]
        keys: list[tuple[float, ...]] = []
        for each in some:
            if keys and clock is not None and clock.is_over():
                break
            keys.append(prefer(*each[:2]))
        taken = some[keys.index(min(keys))]
    wrong = faults(problem, *taken[:2])
    assert not wrong, wrong
    return taken


def devices_of_units(core: Core, stages: StageRanks) -> tuple[Ints, tuple[int, ...]]:
    """Return the device of each unit of the problem, and the used devices from the first stage to the last."""
    unused = {kind: list(spec.devices) for kind, spec in enumerate(core.kinds)}
    first_to_last = [unused[kind].pop(0) for kind in reversed(stages.kinds)]
    of_stage = np.array(first_to_last[::-1], np.int64)
    device = of_stage[stages.rank][core.group]
    used = set(np.unique(device).tolist())
    return device, tuple(d for d in first_to_last if d in used)


# The cost and the faults of a placement, straight from the definition; no solver shares this code.


def loads(problem: Problem, device: Ints) -> Floats:
    """Return (d,) seconds of each device: the work of its units, and the cost of each net that it holds in part.

    Args:
        problem: the problem.
        device: (n,) the device of each unit.
    """
    kinds = np.array([d.kind for d in problem.devices])
    total = np.zeros(len(problem.devices))
    np.add.at(total, device, problem.seconds[kinds[device], np.arange(problem.units)])
    count = len(problem.devices)
    pairs = np.unique(problem.pin_nets * count + device[problem.pins])  # of a net and a device that holds a pin of it
    net, holder = pairs // count, pairs % count
    cut = (np.bincount(net, minlength=len(problem.net_costs)) > 1)[net]
    cpu = np.array([d.cpu for d in problem.devices])
    paid = cut & ~cpu[holder]
    cost = problem.net_costs[net] * _factors(problem, device, net, holder)
    np.add.at(total, holder[paid], cost[paid])
    return total


def memory(problem: Problem, device: Ints, order: tuple[int, ...] = ()) -> Ints:
    """Return (d,) bytes on each device.

    Args:
        problem: the problem.
        device: (n,) the device of each unit.
        order: the used devices from the first stage to the last; if given, microbatches in flight count.
    """
    held = np.zeros(len(problem.devices), np.int64)
    np.add.at(held, device, problem.nbytes)
    if problem.in_flight:
        saved = np.zeros(len(problem.devices), np.int64)
        np.add.at(saved, device, problem.saved)
        stages = range(len(problem.devices)) if problem.ordered else order
        for after, stage in enumerate(reversed(stages)):
            held[stage] += problem.in_flight[min(after, len(problem.in_flight) - 1)] * saved[stage]
    return held


def faults(problem: Problem, device: Ints, order: tuple[int, ...] | None = None) -> list[str]:
    """Describe every constraint that a placement violates; the list is empty if it is legal.

    Args:
        problem: the problem.
        device: (n,) the device of each unit.
        order: the used devices from the first stage to the last; ``None`` if the placement has no stages.
    """
    if len(device) != problem.units or (device < 0).any() or (device >= len(problem.devices)).any():
        return ["not every unit is on a device"]
    found = []
    kinds = np.array([d.kind for d in problem.devices])
    alone = np.isinf(problem.seconds[kinds[device], np.arange(problem.units)])
    if alone.any():
        found.append(f"units {np.flatnonzero(alone).tolist()} are on devices that do not support them")
    coloured = problem.colours >= 0
    pairs = np.unique(np.stack([problem.colours[coloured], device[coloured]]), axis=1)
    if len(np.unique(pairs[0])) < pairs.shape[1]:
        found.append("units of one colour are on several devices")
    held = memory(problem, device, order or ())
    for d, spec in enumerate(problem.devices):
        if not spec.cpu and held[d] > spec.capacity:
            found.append(f"device {d} holds {held[d]} bytes of {spec.capacity}")
    used = set(np.unique(device).tolist())
    if problem.fill and len(used) < len(problem.devices):
        found.append("a device is empty")
    return found if order is None else found + _misplaced(problem, device, order, used)


def _misplaced(problem: Problem, device: Ints, order: tuple[int, ...], used: set[int]) -> list[str]:
    """Describe faults of stages: edges that go back, cycles of devices, a wrong order of devices."""
    if sorted(order) != sorted(used):
        return ["the stages are not the used devices"]
    found = []
    if problem.ordered and list(order) != sorted(order):
        found.append("the stages are not in the order of the devices")
    rank = np.zeros(len(problem.devices), np.int64)
    rank[list(order)] = np.arange(len(order))
    group = colour_groups(problem)
    edges = group_edges(problem, group)
    of_group = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    of_group[group] = device
    if (rank[of_group[edges[:, 0]]] > rank[of_group[edges[:, 1]]]).any():
        found.append("an edge goes back to an earlier stage")
    if cycles(of_group[edges], len(problem.devices)):
        found.append("devices depend on each other in a cycle")
    return found


def cycles(edges: Ints, size: int) -> bool:
    """Return whether a graph has a cycle; self-loops do not count."""
    return len(np.unique(strong_components(edges, size))) < size


def _factors(problem: Problem, device: Ints, net: Ints, holder: Ints) -> Floats:
    """Return the factor of the link over which each holder receives its net, or of the slowest over which
    it sends it.
    """
    if problem.links is None:
        return np.ones(len(net))
    maker = device[problem.pins[problem.net_starts[:-1]]][net]
    link = np.where(maker == holder, 0.0, problem.links[maker, holder])
    slowest = np.zeros(len(problem.net_costs))
    np.maximum.at(slowest, net, link)
    return np.where(maker == holder, slowest[net], link)
