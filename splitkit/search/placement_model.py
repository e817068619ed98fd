"""A graph as a placement problem: prices of nodes, traffic and memory as arrays; and the solution as a plan again.

Solvers see neither nodes nor tensors, only *units* with work, *nets* with a price, and edges::

    node, or nodes that must stay together      unit      seconds on each kind of device, bytes
    value with its maker and its readers        net       seconds that each device pays that has some of them, not all
    data, effects                               edge      the order of units

A net is paid once for each device, however many readers are there: that is what sets it apart from a cut edge.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs, Links
from splitkit.graph.dataflow import Dataflow, crossing_values, waits_for
from splitkit.graph.node_values import Gradients
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.solvers.placement.core import strong_components
from splitkit.solvers.placement.link_model import LinkPrices, UnequalLinks
from splitkit.solvers.placement.problem import BadProblemError, Bools, Floats, Ints, Problem, Slot
from splitkit.solvers.placement.stages.linked_annealing import LinkedAnnealing
from splitkit.solvers.topological import in_turn

_NOTHING = 1e-250  # seconds that are as good as none: their sums would lose all digits


@dataclass(frozen=True, eq=False)
class TransferTimes:
    """How long values take from one device to another.

    Solvers know one price per value, that of the cheapest link, and one factor per pair of devices: how many times the
    cheapest price its own link takes, at least.

    Attributes:
        latency: (d, d) seconds.
        bandwidth: (d, d) bytes per second; infinite on the diagonal.
        again: how often a value crosses: twice in training, where its gradient comes back.
    """

    latency: Floats
    bandwidth: Floats
    again: int = 1

    @classmethod
    def over(cls, links: Links, devices: Sequence[Hashable], *, training: bool) -> TransferTimes:
        """Return the times over the links between the devices of a plan (SK322 if two have no link)."""
        return cls(*links.to_arrays(devices), 2 if training else 1)

    def seconds(self, nbytes: Floats) -> Floats:
        """Return (m,) seconds of each message over the cheapest link: no link is faster."""
        pairs = self._pairs()
        return np.array([self.again * min(wait + n / speed for wait, speed in pairs) for n in nbytes.tolist()])

    @classmethod
    def free(cls, count: int) -> TransferTimes:
        """Return times of zero between ``count`` places."""
        return cls(np.zeros((count, count)), np.full((count, count), np.inf))

    def between(self, places: Ints) -> TransferTimes:
        """Return the times between some of the places, in their order."""
        pairs = np.ix_(places, places)
        return replace(self, latency=self.latency[pairs], bandwidth=self.bandwidth[pairs])

    def grouped(self, sizes: Sequence[int]) -> TransferTimes:
        """Return the times between groups of so many places in a row, each with its share of every value.

        A message between groups of a and b places takes as long as the largest share that one place sends or receives,
        1 / min(a, b), over the slowest link between the two groups.
        """
        starts = np.cumsum([0, *sizes[:-1]])
        latency = np.maximum.reduceat(np.maximum.reduceat(self.latency, starts, axis=0), starts, axis=1)
        bandwidth = np.minimum.reduceat(np.minimum.reduceat(self.bandwidth, starts, axis=0), starts, axis=1)
        bandwidth = bandwidth * np.minimum.outer(sizes, sizes)
        np.fill_diagonal(latency, 0.0)
        np.fill_diagonal(bandwidth, np.inf)
        return replace(self, latency=latency, bandwidth=bandwidth)

    @property
    def joins(self) -> bool:
        """Whether some places belong to one rank."""
        return bool(self._joined.any())

    def factors(self, nbytes: Floats) -> Floats | None:
        """Return (d, d) least factors of each link relative to the cheapest; None if all links are alike."""
        if len(self._pairs()) == 1 and not self.joins:
            return None
        sizes = np.unique(nbytes)
        least = self.seconds(sizes)
        grid = np.ones_like(self.latency)
        for i, j in zip(*np.nonzero(~np.eye(len(grid), dtype=bool)), strict=True):
            own = self.again * (self.latency[i, j] + sizes / self.bandwidth[i, j])
            grid[i, j] = (own[least > 0] / least[least > 0]).min(initial=np.inf)
        return np.where(np.isfinite(grid), grid, 1.0)

    @property
    def differs(self) -> bool:
        """Whether some links are slower than others."""
        return len(self._pairs()) > 1

    @property
    def _joined(self) -> Bools:
        """(d, d) whether two places belong to one rank, where transfers are free."""
        joined: Bools = (self.latency == 0) & np.isinf(self.bandwidth) & ~np.eye(len(self.latency), dtype=bool)
        return joined

    def _pairs(self) -> list[tuple[float, float]]:
        """The distinct links between ranks: latency and bandwidth."""
        apart = ~np.eye(len(self.latency), dtype=bool) & ~self._joined
        found = {(float(w), float(s)) for w, s in zip(self.latency[apart], self.bandwidth[apart], strict=True)}
        return sorted(found) or [(0.0, np.inf)]


class PlacementModel:
    """The units of a graph: its placeable nodes, without those that every part may compute for itself.

    Values that need no gradient and depend only on inputs and constants (masks, positions, rotary tables) are read all
    over a model. If they were sent, each would cross every cut; with ``repeat`` several parts compute them instead.
    They are then not units: the problem without them is a relaxation, so its bound holds with and without copies.

        ids ── embed ── block ── block ── block            units
            └─ mask ──────┴────────┴────────┘              `shared`: in each part that reads it

    Args:
        flow: facts about the graph.
        seconds: node -> seconds, or one such row for each kind of device; infinite where a kind cannot run the node.
        costs: bytes of values.
        repeat: whether to compute shared nodes in several parts.
        keep: nodes that are units in any case.
        together: sets of nodes that must be in one part; with what lies between them they form one unit.

    Attributes:
        units: (n,) the nodes to place; the first node of each unit that has several.
        members: (n,) the nodes of each unit, in graph order.
        index: node -> its unit.
        shared: nodes that are computed wherever they are read, in graph order.
    """

    def __init__(
        self,
        flow: Dataflow,
        costs: Costs,
        seconds: Sequence[Mapping[Node, float]],
        *,
        repeat: bool = False,
        keep: Collection[Node] = (),
        together: Sequence[Sequence[Node]] = (),
    ) -> None:
        self.flow = flow
        self._costs = costs
        self._rows = seconds
        keep = {*keep, *(node for nodes in together for node in nodes)}
        self.shared: tuple[Node, ...] = _shared(flow, keep) if repeat else ()
        left_out = set(self.shared)
        nodes = tuple(n for n in flow.nodes if n not in left_out)
        self.members: tuple[tuple[Node, ...], ...] = bundled(flow, nodes, together)
        self.units: tuple[Node, ...] = tuple(members[0] for members in self.members)
        self.index: Mapping[Node, int] = {n: i for i, members in enumerate(self.members) for n in members}

    @cached_property
    def seconds(self) -> Floats:
        """(kinds, n) seconds of work.

        Raises:
            BadProblemError: a price is negative, missing or infinite, or the sum of all is.
        """
        of_units = [[sum(row[n] for n in members) for members in self.members] for row in self._rows]
        rows = np.array(of_units, np.float64).reshape(len(self._rows), -1)
        bad = ~(np.isfinite(rows) & (rows >= 0)).all(axis=0)
        if not bad.any() and not np.isfinite(rows.sum() * len(self.units)):
            bad = rows.max(axis=0) == rows.max()
        if bad.any():
            units = tuple(map(int, np.flatnonzero(bad)))
            raise BadProblemError("seconds are negative, missing or too large", "seconds", units)
        return np.where(rows < _NOTHING, 0.0, rows)

    @property
    def shared_seconds(self) -> float:
        """Seconds of all shared nodes on one device, which bounds what sending them can gain."""
        return sum(max(row[n] for row in self._rows) for n in self.shared)

    @property
    def shared_work(self) -> list[float]:
        """Seconds of each shared node on the quickest kind of device."""
        return [min(row[n] for row in self._rows) for n in self.shared]

    @cached_property
    def shared_bytes(self) -> Floats:
        """(v,) bytes of the values of shared nodes that other nodes read."""
        left_out = set(self.shared)
        return np.array([nbytes for maker, users, nbytes in self._handed_on if users and maker in left_out], np.float64)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of units (first, then), for data and effects."""
        index = self.index
        pairs = ((index[b], i) for n, i in index.items() for b in waits_for(self.flow, n) if b in index)
        return list(dict.fromkeys((first, then) for first, then in pairs if first != then))

    @cached_property
    def values(self) -> tuple[tuple[Node, tuple[int, ...]], ...]:
        """The values that other units read, each with its maker and its readers."""
        flow, index = self.flow, self.index
        found = []
        for value in flow.index:
            maker = index.get(flow.producer(value))
            if maker is not None:
                readers = sorted({index[u] for u in value.users if u in index} - {maker})
                if readers:
                    found.append((value, (maker, *readers)))
        return tuple(found)

    @cached_property
    def value_bytes(self) -> Floats:
        """(m,) bytes of `values`."""
        return np.array([self._costs.nbytes(value) for value, _ in self.values], np.float64)

    def prices(self, travel: TransferTimes) -> LinkPrices:
        """Return the seconds of every value over each link."""
        pins = tuple(pins for _, pins in self.values)
        return LinkPrices(self.value_bytes, pins, travel.latency, travel.bandwidth, travel.again)

    def cut_prices(self, order: Ints, travel: TransferTimes) -> Floats:
        """Return (d - 1, n + 1) seconds of a cut before each place of an order, between devices p and p + 1."""
        count, nbytes = self.crossing(order)
        hops = np.arange(len(travel.latency) - 1)
        wait, speed = travel.latency[hops, hops + 1], travel.bandwidth[hops, hops + 1]
        prices: Floats = travel.again * (wait[:, None] * count + nbytes / speed[:, None])
        return prices

    def crossing(self, order: Ints) -> Floats:
        """(2, n + 1): how many values cross a cut at each place of an order, and their bytes."""
        found: Floats = crossing_values(self.flow, self._costs, self.nodes(order))[:, self.places(order)]
        return found

    def sums(self, of_nodes: Mapping[Node, int]) -> Ints:
        """Return (n,) the sum over the nodes of each unit; what no number is given for counts nothing."""
        return np.array([sum(of_nodes.get(n, 0) for n in members) for members in self.members], np.int64)

    def nodes(self, order: Ints) -> list[Node]:
        """Return the nodes of the units, one unit after the other."""
        return [node for unit in order.tolist() for node in self.members[unit]]

    def places(self, order: Ints) -> Ints:
        """Return (n + 1,) the number of nodes before each unit of an order, and in all."""
        sizes = [len(self.members[unit]) for unit in order.tolist()]
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def linked(
        self, problem: Problem, travel: TransferTimes | None, held: Ints, capacity: Floats, device: Ints
    ) -> LinkedAnnealing:
        """Return the problem with each link as it is, and with the stages of a device together."""
        count, size = held.shape
        linked = UnequalLinks.of(
            work=np.tile(problem.seconds[0], (count, 1)),
            nbytes=problem.nbytes,
            capacity=capacity,
            cpu=np.zeros(count, np.bool_),
            edges=problem.edges,
            prices=self.prices(travel or TransferTimes.free(count)),
            group=np.arange(size),
            acyclic=True,
        )
        return LinkedAnnealing(linked, held, device)

    def problem(
        self,
        devices: Sequence[Slot],
        travel: TransferTimes | None = None,
        *,
        seconds: Floats | None = None,
        nbytes: Ints | None = None,
        saved: Ints | None = None,
        in_flight: tuple[int, ...] = (),
        colours: Ints | None = None,
        ordered: bool = False,
    ) -> Problem:
        """Return the problem for a solver; without ``travel`` transfers are free. ``seconds`` replaces its own."""
        nets, links = [], None
        if travel is not None:
            prices = travel.seconds(self.value_bytes).tolist()
            nets = [(price, pins) for price, (_, pins) in zip(prices, self.values, strict=True) if price]
            links = travel.factors(self.value_bytes)
        return Problem.of(
            self.seconds if seconds is None else seconds,
            nets,
            self.edges,
            list(devices),
            nbytes=nbytes,
            saved=saved,
            in_flight=in_flight,
            colours=colours,
            links=links,
            ordered=ordered,
        )

    def labels(self, device: Ints, keys: Sequence[PartKey]) -> dict[Node, PartKey | list[PartKey]]:
        """Return node -> part, for `Plan.of`; shared nodes are in every part that reads them.

        Args:
            device: (n,) an index into ``keys`` for each unit.
            keys: the names of the parts.
        """
        homes = {n: keys[d] for members, d in zip(self.members, device.tolist(), strict=True) for n in members}
        if not self.shared:
            return {n: homes[n] for n in self.flow.nodes}
        rank = {key: i for i, key in enumerate(keys)}
        wanted: dict[Node, set[PartKey]] = {n: set() for n in self.shared}
        for node in reversed(self.flow.nodes):
            places = {homes[node]} if node in homes else wanted[node]
            for read in waits_for(self.flow, node):
                if read in wanted:
                    wanted[read] |= places
        copies = {n: sorted(places, key=rank.__getitem__) or [keys[0]] for n, places in wanted.items()}
        return {n: homes[n] if n in homes else copies[n] for n in self.flow.nodes}

    def loads(
        self,
        plan: Plan,
        keys: Sequence[PartKey],
        kinds: Sequence[int],
        travel: TransferTimes | None,
        cpus: Collection[int] = (),
    ) -> Floats:
        """Return (d,) seconds of each part of any plan by the definition: its work, with copies, and its transfers.

        Each part that sends or receives a value pays for it once; a sender to several parts pays for the slowest
        link; CPUs among accelerators pay nothing.
        """
        number, places = {key: i for i, key in enumerate(keys)}, plan.places
        sums, nowhere = [0.0] * len(keys), ()
        row_of = [self._rows[kind] for kind in kinds]
        for node in self.flow.nodes:
            for key in places.get(node, nowhere):
                if (part := number.get(key)) is not None:
                    sums[part] += row_of[part][node]
        total = np.array(sums)
        if travel is None:
            return total
        for maker, users, nbytes in self._handed_on:
            held = places.get(maker, nowhere)
            if all(places.get(user, nowhere) == held for user in users):
                continue
            home = number.get(plan.home(maker))
            if home is not None:
                parts = {key for user in users for key in places.get(user, nowhere)}
                readers = {number[key] for key in parts if key not in held and key in number}
                for part, price in self._prices(travel, nbytes, home, readers).items():
                    total[part] += 0.0 if part in cpus else price
        return total

    @cached_property
    def _handed_on(self) -> list[tuple[Node, list[Node], int]]:
        """Return the maker of each value, its readers and its bytes."""
        flow, nbytes = self.flow, self._costs.nbytes
        made = ((value, maker) for value in flow.index if flow.is_placeable(maker := flow.producer(value)))
        return [(maker, [u for u in value.users if flow.is_placeable(u)], nbytes(value)) for value, maker in made]

    def _prices(self, travel: TransferTimes, nbytes: int, home: int, readers: Iterable[int]) -> dict[int, float]:
        """Return what each part pays for a value of ``nbytes``."""
        paid = {
            reader: travel.again * float(travel.latency[home, reader] + nbytes / travel.bandwidth[home, reader])
            for reader in readers
        }
        return {home: max(paid.values(), default=0.0), **paid}


def _shared(flow: Dataflow, keep: Collection[Node]) -> tuple[Node, ...]:
    """Return nodes without gradient or effect that depend only on inputs and constants and that several units need."""
    graded = flow.fact(Gradients).needed
    bound = {n for ns in flow.after.values() for n in ns} | flow.after.keys() | graded | flow.once.keys() | set(keep)
    free: set[Node] = set()
    for node in flow.nodes:
        if node not in bound and all(read in free for read in flow.inputs(node)):
            free.add(node)
    needed_by: dict[Node, Node | None] = {}  # the only unit that needs it, None for several
    for node in reversed(flow.nodes):
        of = needed_by.get(node) if node in free else node
        if node in free and node not in needed_by:
            continue  # nobody but the output
        for read in waits_for(flow, node):
            if read in free:
                needed_by[read] = of if needed_by.get(read, of) is of else None
    return tuple(n for n in flow.nodes if n in free and n in needed_by and needed_by[n] is None)


# Sets of nodes that must be in one part, extended by every node that lies between their members.


def bundled(flow: Dataflow, nodes: Sequence[Node], together: Sequence[Sequence[Node]]) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes in bundles, in topological order: single nodes, and one bundle for each of the sets.

    A node on a path between two nodes of a set is in their part too, or parts would wait for each other.

    Args:
        flow: facts about the graph.
        nodes: the nodes in graph order.
        together: sets of these nodes; sets that share a node are merged.
    """
    if not together:
        return tuple((node,) for node in nodes)
    at = {node: place for place, node in enumerate(nodes)}
    edges = [(at[first], place) for node, place in at.items() for first in waits_for(flow, node) if first in at]
    ties = [(at[a], at[b]) for group in together for a, b in pairwise(group)]
    both = np.array([*edges, *ties, *((b, a) for a, b in ties)], np.int64).reshape(-1, 2)
    label = strong_components(both, len(nodes)).tolist()
    members: dict[int, list[Node]] = {}
    for node, bundle in zip(nodes, label, strict=True):
        members.setdefault(bundle, []).append(node)
    before: list[set[int]] = [set() for _ in members]
    for first, then in edges:
        if label[first] != label[then]:
            before[label[then]].add(label[first])
    return tuple(tuple(members[bundle]) for bundle in in_turn(before, lambda bundle, _: at[members[bundle][0]]))
