"""The cost and the faults of a placement, straight from the definition; no solver shares this code."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.placement.colocation import colour_order
from splitkit.solvers.placement.problem import Floats, Ints, Problem


def loads(problem: Problem, device: Ints) -> Floats:
    """Return (d,) seconds of each device: the work of its units, and the cost of each net that it holds in part.

    Args:
        problem: the problem.
        device: (n,) the device of each unit.
    """
    kinds = np.array([d.kind for d in problem.devices])
    total = np.zeros(len(problem.devices))
    np.add.at(total, device, problem.seconds[kinds[device], np.arange(problem.units)])
    net, holder = _holders(problem, device)
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
    group, edges = colour_order(problem)
    of_group = np.zeros(int(group.max(initial=-1)) + 1, np.int64)
    of_group[group] = device
    if (rank[of_group[edges[:, 0]]] > rank[of_group[edges[:, 1]]]).any():
        found.append("an edge goes back to an earlier stage")
    if cycles(of_group[edges], len(problem.devices)):
        found.append("devices depend on each other in a cycle")
    return found


def cycles(edges: Ints, size: int) -> bool:
    """Return whether a graph has a cycle; self-loops do not count."""
    matrix = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(size, size))
    return bool(connected_components(matrix, connection="strong")[0] < size)


def _holders(problem: Problem, device: Ints) -> tuple[Ints, Ints]:
    """Return each pair of a net and a device that holds a pin of it, once."""
    count = len(problem.devices)
    pairs = np.unique(problem.pin_nets * count + device[problem.pins])
    return pairs // count, pairs % count


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
