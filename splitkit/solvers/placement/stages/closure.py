"""The ideal of least cost as a minimum cut: what the nets cost that cross it, and a price of each unit on either side.

The source's side is the ideal (a closure problem: Picard 1976). An endless arc leads from each unit to those right
before it, so that an ideal has these too. A net crosses if some pin is inside and some is outside: an arc of its cost,
from a vertex that endless arcs of all pins lead to, to one from which they lead to all pins. A pin before all others
stands for the former itself, one after all others for the latter.
"""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.problem import Bools, Ints

BITS = 28
"""All costs together are below 2 ** 28, as scipy's flows add them in 32 bits."""
_ENDLESS = 2**BITS


class Closures:
    """Ideals of a core's units (n), with nets (m).

    Args:
        core: whose units.
        closed: (n, n) whether the second unit is the first or after it.

    Attributes:
        flows: how many minimum cuts were asked for.
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
        """The least cost of an ideal, and the smallest ideal of that cost.

        Args:
            cost: (m,) of nets that cross it, all together below 2 ** 28.
            inside: (n,) units that it has.
            outside: (n,) units that it does not have; none is before one that it has.
            within: (n,) the price of other units that it has.
            without: (n,) the price of other units that it does not have.
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
        """The least cost of an ideal, where units have no price; arguments as of `least`."""
        nothing = np.zeros(self._size, np.int64)
        return self._cut(cost, inside, outside, nothing, nothing)[1]

    def _cut(
        self, cost: Ints, inside: Bools, outside: Bools, within: Ints, without: Ints
    ) -> tuple[csr_array, int, csr_array]:
        """The arcs, from vertex 0, what is inside, to 1, what is outside; the value of a greatest flow, and it."""
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
