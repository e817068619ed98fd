"""Minimum cuts of one network at many rates ``first + rate * second``, quick and near exact.

The edges are sorted once. Each cut is then one maximum flow over 32-bit capacities, so it may lie above the minimum by
a rounding error, which is known: the sum of all capacities times 2**-30 for each edge. Costs of cuts are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from splitkit.solvers.cuts.min_cut import INFINITE
from splitkit.solvers.cuts.parametric import TwoCosts

Bools = NDArray[np.bool_]

_MOST = 2**30


@dataclass(frozen=True, eq=False)
class QuickCut:
    """A cut near the minimum.

    Attributes:
        side: (size,) bool; the source's side.
        first: its first cost.
        second: its second cost.
        bound: a lower bound on ``first + rate * second`` of all cuts.
    """

    side: Bools
    first: int
    second: int
    bound: float


class QuickCuts:
    """Cuts of a network with two costs an edge; both ends of the hull must exist."""

    def __init__(self, network: TwoCosts) -> None:
        self.network = network
        n = network.size
        endless = (network.first == INFINITE) | (network.second == INFINITE)
        keys = np.concatenate([network.tails * n + network.heads, network.heads * n + network.tails])
        self._keys, place = np.unique(keys, return_inverse=True)
        self._forth = place[: len(network.tails)]
        self._endless = endless
        self._first = np.where(endless, 0, network.first).astype(np.float64)
        self._second = np.where(endless, 0, network.second).astype(np.float64)
        self._rows, columns = self._keys // n, self._keys % n
        self._columns = columns.astype(np.int32)
        self._starts = np.searchsorted(self._rows, np.arange(n + 1)).astype(np.int32)

    def cut(self, rate: float) -> QuickCut:
        """Return a cut that is nearly the least in ``first + rate * second``."""
        network = self.network
        costs = self._first + rate * self._second
        unit = float(costs.sum()) / (_MOST / 2) or 1.0
        units = np.rint(costs / unit)
        whole = np.zeros(len(self._keys))
        np.add.at(whole, self._forth, units)
        whole[self._forth[self._endless]] = _MOST
        capacities = np.minimum(whole, _MOST).astype(np.int32)
        size = network.size
        arcs = csr_array((capacities, self._columns, self._starts), shape=(size, size))
        flow = maximum_flow(arcs, 0, 1).flow
        is_open = capacities - flow.data > 0
        starts = np.concatenate([[0], np.cumsum(is_open)])[self._starts]
        there = csr_array(
            (np.ones(int(is_open.sum()), np.int8), self._columns[is_open], starts.astype(np.int32)), shape=(size, size)
        )
        side = np.zeros(size, np.bool_)
        side[breadth_first_order(there, 0, return_predecessors=False)] = True
        crossing = side[network.tails] & ~side[network.heads]
        first, second = int(network.first[crossing].sum()), int(network.second[crossing].sum())
        return QuickCut(side, first, second, first + rate * second - unit * len(costs))
