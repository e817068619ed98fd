"""The ideal of least cost, as a minimum cut: nets that cross its border have a cost, and units a price on either side.

The source's side of the cut is the ideal (a closure problem: Picard 1976). An infinite arc leads from each unit to its
direct predecessors, so an ideal that has the unit has them too. A net crosses if it has a pin inside and a pin outside:
an arc of its cost leads from a vertex that infinite arcs of all pins enter to a vertex from which infinite arcs lead to
all pins. Where one pin precedes all others it can stand for the former vertex, and a pin that follows all others for
the latter.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Ints

BITS = 28
"""All costs together are below 2 ** 28, because scipy's ``maximum_flow`` adds capacities in 32 bits."""
_ENDLESS = 2**BITS


class Closures:
    """The ideals of a core's units (n), with its nets (m).

    Args:
        core: the core whose units are divided.
        closed: (n, n) whether the second unit is the first one or a descendant of it.

    Attributes:
        flows: the number of minimum cuts computed so far.
    """

    def __init__(self, core: Core, closed: Bools) -> None:
        self._size, self._nets = core.size, core.costs.shape[1]
        self.flows = 0
        first, then = core.size + np.arange(self._nets), core.size + self._nets + np.arange(self._nets)
        for net, pins in enumerate(np.split(core.pins, core.starts[1:-1]) if self._nets else ()):
            within = closed[np.ix_(pins, pins)]
            if within.all(axis=1).any():
                first[net] = pins[within.all(axis=1)][0]
            elif within.all(axis=0).any():
                then[net] = pins[within.all(axis=0)][0]
        nets = core.pin_nets
        into, out = first[nets] >= core.size, then[nets] >= core.size
        nowhere = np.full(len(core.edges), -1)
        self._tails = np.concatenate([core.edges[:, 1], core.pins[into], then[nets[out]], first])
        self._heads = np.concatenate([core.edges[:, 0], first[nets[into]], core.pins[out], then])
        self._of_net = np.concatenate([nowhere, nets[into], nets[out], np.arange(self._nets)])

    def least(self, cost: Ints, inside: Bools, outside: Bools, within: Ints, without: Ints) -> tuple[int, Bools]:
        """Return the least cost of an ideal, and the smallest ideal of that cost.

        Args:
            cost: (m,) the cost of each net that crosses the border; their sum is below 2 ** 28.
            inside: (n,) units that the ideal must have.
            outside: (n,) units that the ideal must not have; none precedes a unit that it must have.
            within: (n,) the price of each other unit if the ideal has it.
            without: (n,) the price of each other unit if the ideal does not have it.
        """
        arcs, value, flow = self._cut(cost, inside, outside, within, without)
        rest = arcs - flow
        rest.data = (rest.data > 0).astype(np.int8)
        rest.eliminate_zeros()
        reached = np.zeros(arcs.shape[0], np.bool_)
        reached[breadth_first_order(rest, 0, return_predecessors=False)] = True
        ideal: Bools = inside | (reached[2 : 2 + self._size] & ~outside)
        return value, ideal

    def least_cost(self, cost: Ints, inside: Bools, outside: Bools) -> int:
        """Return the least cost of an ideal when units have no price; arguments as for `least`."""
        nothing = np.zeros(self._size, np.int64)
        return self._cut(cost, inside, outside, nothing, nothing)[1]

    def _cut(
        self, cost: Ints, inside: Bools, outside: Bools, within: Ints, without: Ints
    ) -> tuple[csr_array, int, csr_array]:
        """Return the arcs, the value of a maximum flow from vertex 0 (inside) to vertex 1 (outside), and the flow."""
        self.flows += 1
        size = 2 + self._size + 2 * self._nets
        vertex = 2 + np.arange(size - 2)
        vertex[: self._size][inside], vertex[: self._size][outside] = 0, 1
        free = np.flatnonzero(~(inside | outside))
        some, others = free[without[free] > 0], free[within[free] > 0]
        carried = np.where(self._of_net < 0, _ENDLESS, 0)
        if self._nets:
            carried = np.where(cost[self._of_net] > 0, _ENDLESS, 0) | carried
            carried[len(carried) - self._nets :] = cost
        tails = np.concatenate([vertex[self._tails], np.zeros_like(some), 2 + others])
        heads = np.concatenate([vertex[self._heads], 2 + some, np.ones_like(others)])
        most = np.concatenate([carried, without[some], within[others]])
        kept = (tails != heads) & (heads != 0) & (tails != 1) & (most > 0)
        arcs = coo_array((most[kept], (tails[kept], heads[kept])), shape=(size, size)).tocsr()
        arcs.data = np.minimum(arcs.data, _ENDLESS).astype(np.int32)  # only endless ones are parallel
        found = maximum_flow(arcs, 0, 1)
        return arcs, int(found.flow_value), found.flow
