"""Coarsening: pairs of units become one, without cycles, joined first where nets are expensive and units light.

The pairs of a round are ends of edges from one level to the next (levels are longest paths from the first units, or to
the last ones, alternately). No other path leads from one end of such an edge to the other. Pairs of one round close a
cycle only with pairs of the same level, and a pair that would close one is left apart (after the clustering of
Herrmann, Özkaya, Uçar, Kaya and Çatalyürek, "Multilevel algorithms for acyclic partitioning of directed acyclic
graphs", SIAM J. Sci. Comput. 2019). Where few such pairs are left, neighbours in a topological order are joined, which
never closes a cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from scipy.sparse import csr_array

from splitkit.solvers.placement.colocation import strong_components
from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.orders import orders
from splitkit.solvers.placement.problem import Bools, Floats, Ints

_FEW = 0.1  # if pairs save a smaller share of the units, neighbours in an order are joined
_HEAVY = 2.0  # times the mean unit of the coarsest core is the most that a unit of it may weigh
_NOTHING = 1.02  # times its weight is what a unit of any weight may come to, so that it takes in what weighs nothing
_ROUNDS = 8  # rounds of matching


@dataclass(frozen=True, eq=False)
class Coarse:
    """A coarser core, and the map to it.

    Attributes:
        core: the coarser one.
        label: (units of the finer core,) the unit of ``core`` that contains each.
    """

    core: Core
    label: Ints


def coarsen(core: Core, size: int, stage: Ints | None = None, seed: int = 0) -> list[Coarse]:
    """Return coarser and coarser cores, each made from the one before, down to about ``size`` units or as far as it
    goes.

    Args:
        core: the finest core; it has no cycles.
        size: the number of units to aim at.
        stage: (n,) the stage of each unit; only units of one stage are joined.
        seed: the seed that decides between equally good pairs.
    """
    random = np.random.default_rng(seed)
    stage = np.zeros(core.size, np.int64) if stage is None else stage
    weights = _weights(core)
    most = _HEAVY * weights.sum(axis=1, keepdims=True) / size
    found: list[Coarse] = []
    turn = 0
    while core.size > size:
        label = _by_levels(core, most, stage, random, backward=bool(turn % 2))
        if label.max() + 1 > (1 - _FEW) * core.size:
            label = _by_order(core, most, stage, random, turn)
            if label.max() + 1 == core.size:
                break
        core = _without_twins(core.merged(label))
        stage = stage[np.unique(label, return_index=True)[1]]
        found.append(Coarse(core, label))
        turn += 1
    return found


def _weights(core: Core) -> Floats:
    """Return (2, n) the weights of each unit: work, and bytes."""
    return np.stack([core.least_work, core.nbytes + core.flights * core.saved]).astype(np.float64)


def _by_levels(core: Core, most: Floats, stage: Ints, random: np.random.Generator, *, backward: bool) -> Ints:
    """Return (n,) labels after joining pairs between neighbouring levels."""
    edges = core.edges[:, ::-1] if backward else core.edges
    level = _levels(edges, core.size)
    pairs = edges[level[edges[:, 1]] == level[edges[:, 0]] + 1]
    pairs = pairs[_may_join(core, pairs, most, stage)]
    mate = _matching(pairs, _ratings(core, pairs), core.size, random)
    return _labels(_without_cycles(mate, edges, level))


def _by_order(core: Core, most: Floats, stage: Ints, random: np.random.Generator, turn: int) -> Ints:
    """Return (n,) labels after joining neighbours in a topological order."""
    several = orders(core)
    for _ in range(turn % 3):
        next(several)
    order = next(several)
    pairs = np.stack([order[:-1], order[1:]], axis=1)
    pairs = pairs[_may_join(core, pairs, most, stage)]
    return _labels(_matching(pairs, _ratings(core, pairs), core.size, random))


def _may_join(core: Core, pairs: Ints, most: Floats, stage: Ints) -> Bools:
    """Return which pairs are in one stage, light enough together, and supported by the same classes of devices."""
    first, then = pairs.T
    weights = _weights(core)
    together = weights[:, first] + weights[:, then]
    alike: Bools = (core.barred[:, first] == core.barred[:, then]).all(axis=0) & (stage[first] == stage[then])
    most = np.maximum(most, _NOTHING * np.maximum(weights[:, first], weights[:, then]))
    return alike & (together <= most).all(axis=0)


def _levels(edges: Ints, size: int) -> Ints:
    """Return (size,) the number of edges on the longest path to each unit."""
    by_first = np.argsort(edges[:, 0], kind="stable")
    then = edges[by_first, 1].tolist()
    start = np.searchsorted(edges[by_first, 0], np.arange(size + 1)).tolist()
    missing = np.bincount(edges[:, 1], minlength=size).tolist()
    level = [0] * size
    ready = [unit for unit, count in enumerate(missing) if not count]
    while ready:
        unit = ready.pop()
        above = level[unit] + 1
        for other in then[start[unit] : start[unit + 1]]:
            if level[other] < above:
                level[other] = above
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return np.array(level, np.int64)


def _ratings(core: Core, pairs: Ints) -> Floats:
    """Return (p,) how much each pair shares for its weight: each net counts for its maker with each reader."""
    sizes = np.diff(core.starts)
    cost = core.costs.max(axis=0, initial=0) / np.maximum(sizes - 1, 1)
    maker = core.pins[core.starts[:-1]][core.pin_nets]
    low, high = np.minimum(maker, core.pins), np.maximum(maker, core.pins)
    shared = csr_array((cost[core.pin_nets], (low, high)), shape=(core.size, core.size))
    common = np.asarray(shared[pairs.min(axis=1), pairs.max(axis=1)]).ravel() if len(pairs) else np.zeros(0)
    work = core.least_work.astype(np.float64)
    mean = work.mean() + 1e-300
    rating: Floats = (common + 1e-6 * mean) / ((work[pairs[:, 0]] + mean) * (work[pairs[:, 1]] + mean) / mean)
    return rating


def _matching(pairs: Ints, rating: Floats, size: int, random: np.random.Generator) -> Ints:
    """Return (size,) the partner of each unit or itself: pairs that are best for both ends, found in rounds."""
    mate = np.arange(size)
    shuffled = random.permutation(len(pairs))
    pairs = pairs[np.lexsort((shuffled, -rating))]
    for _ in range(_ROUNDS):
        if not len(pairs):
            break
        first, then = pairs.T
        place = np.arange(len(pairs))
        best = np.full(size, len(pairs))
        np.minimum.at(best, first, place)
        np.minimum.at(best, then, place)
        chosen = (best[first] == place) & (best[then] == place)
        mate[first[chosen]], mate[then[chosen]] = then[chosen], first[chosen]
        free = mate == np.arange(size)
        pairs = pairs[free[first] & free[then]]
    return mate


def _without_cycles(mate: Ints, edges: Ints, level: Ints) -> Ints:
    """Return the partners without the pairs of one level that would close a cycle."""
    mate = mate.copy()
    units = np.arange(len(mate))
    while True:
        label = _labels(mate)
        between = label[edges]
        cycle = strong_components(between[between[:, 0] != between[:, 1]], int(label.max(initial=-1)) + 1)
        crowded = (np.bincount(cycle) > 1)[cycle]
        if not crowded.any():
            return mate
        lower = units[(mate != units) & crowded[label] & (level < level[mate])]
        # edges between pairs of one cycle that go to a pair of a lower number: without their makers none is left
        number = np.full(len(mate), -1)
        number[lower], number[mate[lower]] = lower, lower
        ends = number[edges]
        closing = (ends >= 0).all(axis=1) & (ends[:, 0] > ends[:, 1])
        closing &= cycle[label[edges[:, 0]]] == cycle[label[edges[:, 1]]]
        apart = np.unique(ends[closing, 0])
        mate[mate[apart]] = mate[apart]
        mate[apart] = apart


def _labels(mate: Ints) -> Ints:
    """Return (n,) one number for each pair and each single unit."""
    label: Ints = np.unique(np.minimum(np.arange(len(mate)), mate), return_inverse=True)[1].astype(np.int64)
    return label


def _without_twins(core: Core) -> Core:
    """Return the core with nets of the same two pins merged."""
    sizes = np.diff(core.starts)
    first = core.starts[:-1]
    key = np.where(sizes == 2, -1, -2 - np.arange(len(sizes)))
    two = np.flatnonzero(sizes == 2)
    ends = np.stack([core.pins[first[two]], core.pins[first[two] + 1]])
    key[two] = ends.min(axis=0) * core.size + ends.max(axis=0)
    _, kept, net = np.unique(key, return_index=True, return_inverse=True)
    costs = np.zeros((len(core.costs), len(kept)), np.int64)
    for row, sums in zip(core.costs, costs, strict=True):
        np.add.at(sums, net, row)
    pins = np.isin(core.pin_nets, kept)
    by_place = np.argsort(kept)
    starts = np.concatenate([[0], np.cumsum(sizes[kept[by_place]])]).astype(np.int64)
    return replace(core, costs=costs[:, by_place], starts=starts, pins=core.pins[pins])
