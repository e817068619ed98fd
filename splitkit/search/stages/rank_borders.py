"""Borders in an order of the graph, judged by a simulated step: those of people and other tools, and better ones.

Where a rank runs several stages, the load of a rank says little about a single stage, and the solvers for stages do not
see it. People divide a model between blocks; from the best such division borders are moved.

Measured on a T5 in 8 stages on 4 ranks: without cuts between blocks, the step is 11.8 % longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from splitkit.graph.dataflow import module_path
from splitkit.graph.node_values import Gradients
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.model_blocks import model_blocks
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest
from splitkit.solvers.clock import Clock
from splitkit.solvers.line.balanced_blocks import even_blocks
from splitkit.solvers.line.rank_pairs import even_pairs
from splitkit.solvers.placement.problem import Floats, Ints

_ACTIONS = 400_000  # of all simulated steps
_MOVED = 3  # divisions of which borders are moved, the best first
_FIRST = 3  # moves go as far as a stage of average length, divided by this


@dataclass(frozen=True, eq=False)
class RankBorders:
    """Borders for one number of stages.

    Attributes:
        demand: the request.
        placing: the units.
        rank_of: stage -> its rank.
        clock: the deadline of the search.
    """

    demand: StageRequest
    placing: PlacementModel
    rank_of: Sequence[int]
    clock: Clock

    def stages(self, *, moved: bool) -> Iterator[Ints]:
        """Yield (n,) the stage of each unit: divisions between blocks, then, if ``moved``, better ones."""
        found = {tuple(cuts): self._step(cuts) for cuts in self._divisions() if self._is_whole(cuts)}
        yield from map(self._stage_of, found)
        left = _ACTIONS // (len(self.rank_of) * self._microbatches) if moved else 0
        for cuts in sorted(found, key=found.__getitem__)[:_MOVED]:
            if left > 0 and not self.clock.is_over():
                better, left = self._moved(list(cuts), left)
                yield self._stage_of(better)

    @property
    def _microbatches(self) -> int:
        return self.demand.run([StageCosts(1.0, 1.0)] * len(self.rank_of)).order.microbatches

    def _is_whole(self, cuts: Sequence[int]) -> bool:
        """Return whether no stage is empty."""
        ends = [0, *cuts, len(self._order)]
        return len(ends) == len(self.rank_of) + 1 and all(a < b for a, b in pairwise(ends))

    def _stage_of(self, cuts: Sequence[int]) -> Ints:
        stage = np.empty(len(self._order), np.int64)
        stage[self._order] = np.searchsorted(np.array(cuts), np.arange(len(self._order)), side="right")
        return stage

    def _divisions(self) -> Iterator[list[int]]:
        """Yield borders: equally many blocks, balanced bytes and balanced work, by the loads of ranks."""
        count, borders = len(self.rank_of), self._borders
        for shift in (0, 1):  # more blocks in the first stages, or in those before the last
            blocks = [place for place in self._block_starts if place]
            sizes = np.full(count, (len(blocks) + 1) // count) + (np.arange(count) < (len(blocks) + 1) % count)
            begins = np.cumsum(np.roll(sizes[::-1], -1) if shift else sizes)[:-1] - 1
            if len(blocks) + 1 >= count:
                yield [blocks[begin] for begin in begins.tolist()]
        if len(borders) + 1 >= count:
            places = np.array([0, *borders, len(self._order)])
            for weights in (self._held, self._work):
                yield self._even(places, weights)
                yield self._filled(places, weights)
            for cuts in even_pairs(self._before(places, self._work), self.rank_of):
                yield places[cuts].tolist()
        fine = np.unique(np.searchsorted(np.cumsum(self._work), np.linspace(0, self._work.sum(), 6 * count)[1:-1]) + 1)
        fine = np.array(sorted({0, len(self._order), *fine.tolist(), *borders[:: 1 + len(borders) // (6 * count)]}))
        for cuts in even_pairs(self._before(fine, self._work), self.rank_of):
            yield fine[cuts].tolist()

    def _before(self, places: Ints, weights: Floats) -> Floats:
        before: Floats = np.concatenate([[0.0], np.cumsum(weights)])[places]
        return before

    def _even(self, places: Ints, weights: Floats) -> list[int]:
        """Return the most balanced division at these places."""
        own = np.diff(self._before(places, weights))
        cuts = even_blocks(own, len(self.rank_of), np.inf, np.zeros(len(own)), 0.0)
        return places[cuts[1:]].tolist() if cuts else []

    def _filled(self, places: Ints, weights: Floats) -> list[int]:
        """Fill each stage up to its share, one after the other."""
        before = self._before(places, weights)
        shares = before[-1] * np.arange(1, len(self.rank_of)) / len(self.rank_of)
        cuts: list[int] = places[np.maximum(np.searchsorted(before, shares, side="right") - 1, 0)].tolist()
        return cuts

    def _moved(self, cuts: list[int], left: int) -> tuple[list[int], int]:
        """Move borders, alone or with those behind, as long as the step gets shorter; return the rest of the effort
        too.
        """
        least, far = self._step(cuts), max(1, len(self._order) // (_FIRST * len(self.rank_of)))
        while far and left > 0 and not self.clock.is_over():
            better = False
            for begin in range(len(cuts)):
                for end in range(begin + 1, len(cuts) + 1):
                    for by in (far, -far):
                        then = [*cuts[:begin], *(cut + by for cut in cuts[begin:end]), *cuts[end:]]
                        if left <= 0 or not self._is_whole(then):
                            continue
                        left -= 1
                        if (step := self._step(then)) < least * (1 - 1e-9):
                            cuts, least, better = then, step, True
            far = far if better else far // 2
        return cuts, left

    def _step(self, cuts: Sequence[int]) -> float:
        """Return about the seconds of the step: each value that crosses is sent by all stages in between."""
        places = np.array([0, *cuts, len(self._order)])
        times, sent = np.diff(self._times[places], axis=0), self._sent[places[1:]]
        stages = [
            StageCosts(
                forward=float(forward),
                backward_input=float(inputs) if number else 0.0,
                backward_weight=float(weights if number else weights + inputs),
                activation_bytes=int(nbytes),
                replicas=self.demand.replicas,
            )
            for number, ((forward, inputs, weights), nbytes) in enumerate(zip(times, sent, strict=True))
        ]
        return self.demand.run(stages).seconds

    @cached_property
    def _order(self) -> Ints:
        """(n,) the units; units that need no gradient come right before their first reader."""
        graded, placing = self.demand.flow.fact(Gradients).needed, self.placing
        place = np.arange(len(placing.units), dtype=np.float64)
        after: list[list[int]] = [[] for _ in placing.units]
        for first, then in placing.edges:
            after[first].append(then)
        for unit in reversed(range(len(after))):
            if after[unit] and graded.isdisjoint(placing.members[unit]):
                place[unit] = place[after[unit]].min()
        order: Ints = np.argsort(place, kind="stable").astype(np.int64)
        return order

    @cached_property
    def _labels(self) -> list[object]:
        """The block of each unit in order, or its module outside of blocks; else the label of the unit before."""
        blocks = model_blocks(self.demand.flow, self.demand.prices)
        of_node = {node: block for block, nodes in blocks.items() for node in nodes}
        labels: list[object] = []
        for unit in self._order.tolist():
            node = self.placing.units[unit]
            own: object = of_node.get(node) or module_path(node)
            labels.append(own or (labels[-1] if labels else ""))
        return labels

    @cached_property
    def _borders(self) -> list[int]:
        """Positions where a block, or a module outside of blocks, begins."""
        labels = self._labels
        return [i for i in range(1, len(labels)) if labels[i] != labels[i - 1]]

    @cached_property
    def _block_starts(self) -> list[int]:
        """Positions where a block begins."""
        first: dict[object, int] = {}
        for i, label in enumerate(self._labels):
            if isinstance(label, tuple):
                first.setdefault(label, i)
        return sorted(first.values())

    @cached_property
    def _times(self) -> Floats:
        """(n + 1, 3) seconds of forward and of both parts of backward, of all units before each place."""
        prices, members = self.demand.stage_prices, self.placing.members
        times = np.array([prices.times(members[unit]) for unit in self._order.tolist()], np.float64)
        return np.concatenate([np.zeros((1, 3)), np.cumsum(times / self.demand.replicas, axis=0)])

    @cached_property
    def _work(self) -> Floats:
        work: Floats = self.placing.seconds[0][self._order]
        return work

    @cached_property
    def _held(self) -> Floats:
        """(n,) bytes of parameters, counted for the first unit that reads each."""
        costs, members = self.demand.costs, self.placing.members
        return np.array([sum(map(costs.param_bytes, members[unit])) for unit in self._order.tolist()], np.float64)

    @cached_property
    def _sent(self) -> Floats:
        """(n + 1,) bytes that cross at each place."""
        sent: Floats = self.placing.crossing(self._order)[1]
        return sent
