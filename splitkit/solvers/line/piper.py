"""Piper's problem on a chain: borders of stages, replicas of each, and a variant of each node, such as recompute.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, without
tensor parallelism. Each of the d replicas of a stage runs every d-th microbatch, whole: a stage with D devices from
here to the end of the pipeline holds ``ceil(D / d)`` microbatches in flight on each of its devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_MOST = 4_096  # choices of variants of one stretch that are kept
_ROOM = 2**60  # bytes; sums stay whole


class Variant(NamedTuple):
    """A way to run a node: as it is, or computing again in backward what it then need not hold.

    Attributes:
        seconds: of a microbatch, forward and backward.
        fixed: bytes held all the time.
        saved: bytes held for each microbatch in flight.
    """

    seconds: float
    fixed: int
    saved: int


class PiperStages(NamedTuple):
    """Stages of a chain, from first to last.

    Attributes:
        ends: the node after the last of each.
        replicas: devices of each.
        variants: (n,) which variant of each node.
        value: seconds between two microbatches: the greatest load.
        exact: whether no stages have a lower one; else choices of variants were left out, as they were too many.
    """

    ends: tuple[int, ...]
    replicas: tuple[int, ...]
    variants: tuple[int, ...]
    value: float
    exact: bool


@dataclass(frozen=True, eq=False)
class PiperChain:
    """A chain of n nodes, of which stages take consecutive ones.

    The load of a stage of the nodes i .. j - 1 on d devices, and what each of these holds::

        load = (sum of seconds + crossing[i] + crossing[j]) / d + 2 (d - 1) / d * sum of gradients
        held = sum of fixed + ceil(devices from here / d) * sum of saved

    Attributes:
        nodes: the variants of each node, one at least; times 0 or more, bytes 0 or more.
        devices: how many there are at most.
        degrees: on how many devices a stage may stand.
        capacity: bytes of each device; infinite for no limit.
        crossing: (n + 1,) seconds in which what crosses before each node, and after the last, is sent once for a
            microbatch and comes back; nothing if not given.
        gradients: (n,) seconds in which the gradients of each node are sent once, divided by the microbatches of a
            step; nothing if not given.

    Raises:
        ValueError: a node has no variant, numbers are negative or too large, or of another length; names the field.
    """

    nodes: Sequence[Sequence[Variant]]
    devices: int
    degrees: Sequence[int] = (1,)
    capacity: float = np.inf
    crossing: Sequence[float] = ()
    gradients: Sequence[float] = ()

    def __post_init__(self) -> None:
        size = len(self.nodes)
        for number, variants in enumerate(self.nodes):
            bad = not variants or any(not 0 <= v.seconds < np.inf or min(v.fixed, v.saved) < 0 for v in variants)
            if bad or max(v.fixed + v.saved * self.devices for v in variants) * size > _ROOM:
                raise ValueError(f"nodes[{number}]: give a variant, with times and bytes of 0 or more, below 2**60")
        if not size or self.devices < 1 or not self.degrees or min(self.degrees) < 1:
            raise ValueError("nodes, devices, degrees: give one at least of each")
        for name, given, length in (("crossing", self.crossing, size + 1), ("gradients", self.gradients, size)):
            if given and (len(given) != length or not all(0 <= one < np.inf for one in given)):
                raise ValueError(f"{name}: give {length} times of 0 or more, or none")

    def solved(self) -> PiperStages | None:
        """The stages with the least greatest load; None if none fit.

        A dynamic program over the first node of a stage and the devices from there to the end, as in the paper (which
        chooses variants by a heuristic for knapsacks); the variants of a stretch by the frontier of bytes and seconds,
        node by node. Exact in O(n^2 devices (degrees + choices)), where there are 4,096 choices at most that no other
        beats in both; else some are left out.
        """
        size = len(self.nodes)
        least = np.full((size + 1, self.devices + 1), np.inf)
        least[size, 0] = -np.inf
        how: dict[tuple[int, int], tuple[int, int]] = {}
        for first in range(size - 1, -1, -1):
            for used in range(1, self.devices + 1):
                for degree in sorted(d for d in set(self.degrees) if d <= used):
                    loads = self._loads(first, degree, -(-used // degree))
                    total = np.maximum(loads, least[first + 1 :, used - degree])
                    end = int(total.argmin())
                    if total[end] < least[first, used]:
                        least[first, used] = total[end]
                        how[first, used] = first + 1 + end, degree
        used = int(least[0].argmin())
        return self._told(how, used, float(least[0, used])) if np.isfinite(least[0, used]) else None

    def _told(self, how: dict[tuple[int, int], tuple[int, int]], used: int, value: float) -> PiperStages:
        ends, replicas, variants = [], [], []
        first = 0
        while first < len(self.nodes):
            end, degree = how[first, used]
            ends.append(end)
            replicas.append(degree)
            variants += self._chosen(first, end, -(-used // degree))
            first, used = end, used - degree
        return PiperStages(tuple(ends), tuple(replicas), tuple(variants), value, not self._thinned)

    def _loads(self, first: int, degree: int, in_flight: int) -> Floats:
        """(n - first,) of a stage from a node to each later one; infinite where it does not fit."""
        border, rings = self._borders
        work = self._work(in_flight)[first] + border[first] + border[first + 1 :]
        loads: Floats = work / degree + 2 * (degree - 1) / degree * (rings[first + 1 :] - rings[first])
        return loads

    @cached_property
    def _borders(self) -> tuple[Floats, Floats]:
        """(n + 1,) seconds of what crosses, and of the gradients before each node."""
        size = len(self.nodes)
        border = np.array(self.crossing or [0.0] * (size + 1))
        return border, np.concatenate([[0.0], np.cumsum(self.gradients or [0.0] * size)])

    def _work(self, in_flight: int) -> list[Floats]:
        """For each first node (n - first,) seconds of the stretch to each later one, the quickest that fits."""
        if in_flight not in self._known:
            rows = []
            for first in range(len(self.nodes)):
                row = np.full(len(self.nodes) - first, np.inf)
                for at, (_, seconds, _, _) in enumerate(self._frontiers(first, len(self.nodes), in_flight)):
                    row[at] = seconds[-1]
                rows.append(row)
            self._known[in_flight] = rows
        return self._known[in_flight]

    @cached_property
    def _known(self) -> dict[int, list[Floats]]:
        return {}

    @cached_property
    def _thinned(self) -> list[int]:
        """First nodes of stretches of which choices were left out."""
        return []

    def _frontiers(self, first: int, end: int, in_flight: int) -> Iterator[tuple[Ints, Floats, Ints, Ints]]:
        """The choices that no other beats, for each stretch that begins here, as long as some fit.

        Yields:
            Bytes, increasing; seconds, decreasing; the choice of the stretch without its last node, and the variant of
            that node, by which each came about.
        """
        held, seconds = np.zeros(1, np.int64), np.zeros(1)
        for variants in self.nodes[first:end]:
            added = np.array([v.fixed + in_flight * v.saved for v in variants], np.int64)
            longer = np.array([v.seconds for v in variants])
            source = np.tile(np.arange(len(held)), len(variants))
            variant = np.repeat(np.arange(len(variants)), len(held))
            held, seconds = held[source] + added[variant], seconds[source] + longer[variant]
            order = np.lexsort((seconds, held))
            order = order[held[order] <= self.capacity]
            if not len(order):
                return
            quickest = np.minimum.accumulate(seconds[order])
            kept = order[np.append(True, quickest[1:] < quickest[:-1])]
            if len(kept) > _MOST:
                self._thinned.append(first)
                kept = kept[np.unique(np.linspace(0, len(kept) - 1, _MOST).astype(np.int64))]
            held, seconds = held[kept], seconds[kept]
            yield held, seconds, source[kept], variant[kept]

    def _chosen(self, first: int, end: int, in_flight: int) -> list[int]:
        """The variants of the quickest choice of a stretch that fits."""
        steps = list(self._frontiers(first, end, in_flight))
        at, found = len(steps[-1][0]) - 1, []
        for _, _, source, variant in reversed(steps):
            found.append(int(variant[at]))
            at = int(source[at])
        return found[::-1]
