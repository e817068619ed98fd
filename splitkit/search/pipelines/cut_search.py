"""Finds the cuts of a pipeline and what its stages save, for the shortest simulated step within the ranks' memory.

With one stage on each rank a dynamic program over the cuts gives the least path bound (`least_path`), whose value over
lower bounds of all stage times proves how short the step can be at best. Programs with a limit on the slowest stage
give candidates. With several stages on a rank, mixtures of cuts give both the bound and candidates (`StepBound`), in
addition to cuts with balanced stages. In both cases the best candidates are simulated, and cuts are moved as long as
the simulated step gets shorter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import combinations, islice, pairwise
from math import comb

import numpy as np

from splitkit.costs import Links
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.model_blocks import model_blocks
from splitkit.search.pipelines.cut_scoring import CutScoring, ScoredCuts
from splitkit.search.pipelines.joint_positions import bytes_across
from splitkit.search.pipelines.rank_choice import RankChoice, rank_loads, warm_up
from splitkit.search.pipelines.stage_frontiers import StageFrontiers
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.search.pipelines.step_bound import Candidates, SpanHulls, StepBound, fixed_bytes
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.solvers.line.path_bound import LineCuts, first_wait, least_path, least_sum, nearest_cuts
from splitkit.training.choices import Floats, Ints

# Tables of stage times over pairs of cuts, for pipelines with one stage on each rank: bounds first, exact where asked.
#
# The bounds add up the frontiers of the pieces between neighbouring cuts, as if all that passes a cut were free: by the
# Lagrangian ``R(bytes) >= max over prices of (sum of the pieces' least (seconds + price * bytes) - price * bytes)``.


_PRICES = 64  # in seconds a byte; with 4 to 512, four bounds were the same


class CutTimes:
    """The times of all stages between cuts.

    Attributes:
        cuts: (n + 1,) the positions of the cuts, with 0 and the end.
        lower: (p, n + 1, n + 1) lower bounds on the seconds of stage k from cut i to cut j; infinite if it cannot fit.
        upper: the same; seconds of a stage that fits, where ``known``, else the lower bound.
        known: (p, n + 1, n + 1) bool; which entries are exact.
    """

    def __init__(self, choices: RankChoice, cuts: Ints) -> None:
        self.choices, self.cuts = choices, cuts
        self.problems = choices.frontiers.problems
        self.count = [int(load.surely()[0]) for load in choices.loads]
        both = self.problems.seconds[cuts]
        self._base = both[None, :] - both[:, None]
        self._fixed = fixed_bytes(self.problems, cuts)
        made = self.problems.peaks.gradients[cuts]
        self._gradients = (made[None, :] - made[:, None]).astype(np.float64)
        self.lower = self._bounds()
        self.upper = self.lower.copy()
        self.known = np.zeros(self.lower.shape, np.bool_)

    def _bounds(self) -> Floats:
        size = len(self.cuts)
        outside = np.arange(size)[:, None] >= np.arange(size)[None, :]
        tables = []
        prices, sums = self._lagrangian()
        received = self.problems.sent_on[self.cuts][:, None]
        for rank, limit in enumerate(self.choices.limits):
            table = self._base.copy()
            if limit is not None:
                left = (limit - self._fixed - self._gradients) / max(1, self.count[rank]) - received
                again = np.zeros((size, size))
                for price, total in zip(prices.tolist(), sums, strict=True):
                    np.maximum(again, total[None, :] - total[:, None] - price * left, out=again)
                table += again
                table[left < 0] = np.inf
            table[outside] = np.inf
            tables.append(table)
        return np.array(tables)

    def _lagrangian(self) -> tuple[Floats, Floats]:
        """Return (l,) prices in seconds a byte, and (l, n + 1) sums of the pieces' least cost before each cut."""
        hulls = SpanHulls(self.problems, self.cuts)
        pieces = [hulls.of(at, at + 1, relaxed=True) for at in range(len(self.cuts) - 1)]
        corners = [np.array([(c.first, c.second * hull.tick) for c in hull.corners], np.float64) for hull in pieces]
        slopes = [-np.diff(c[:, 1]) / np.diff(c[:, 0]) for c in corners if len(c) > 1]
        prices = np.unique(np.concatenate(slopes)) if slopes else np.zeros(0)
        if len(prices) > _PRICES:
            prices = prices[np.linspace(0, len(prices) - 1, _PRICES).astype(np.int64)]
        sums = np.zeros((len(prices), len(self.cuts)))
        for q, corner in enumerate(corners):
            least = (corner[None, :, 1] + prices[:, None] * corner[None, :, 0]).min(axis=1)
            sums[:, q + 1] = sums[:, q] + least
        return prices, sums

    def settle(self, stage: int, start: int, end: int) -> None:
        """Make the entry of a stage exact."""
        if self.known[stage, start, end] or start >= end:
            return
        self.known[stage, start, end] = True
        span = (int(self.cuts[start]), int(self.cuts[end]))
        base = float(self._base[start, end])
        limit = self.choices.limits[stage]
        frontier = self.choices.frontiers.of(*span)
        points = self.choices.of(stage, [span])
        self.upper[stage, start, end] = np.inf if points is None else base + points[0].seconds
        if limit is not None:
            left = limit - self._fixed[start, end] - self._gradients[start, end]
            bound = frontier.bound(left / max(1, self.count[stage]))
            self.lower[stage, start, end] = max(self.lower[stage, start, end], base + bound)

    def settled(self, ends: Sequence[int]) -> bool:
        """Make the entries of a plan exact; return whether they were."""
        stages = list(_stages(ends))
        if all(self.known[each] for each in stages):
            return True
        for each in stages:
            self.settle(*each)
        return False


_RANGES = 60  # shares of what may run in forward or backward that are simulated for a bound
_SMALL = 150  # ops of a stage for which an integer program is solved


_CUTS = 200  # the most positions of cuts that are looked at
_LIMITS = 12  # limits on the slowest stage that are tried
_STEPS = 40  # rounds of a dynamic program in which entries become exact
_MOVES = 300  # candidates of a local search
_LEAN = 24  # cuts near the best ones that are looked at for the lowest peak
_TINY = 60  # ops that may be saved, of a graph of which all cuts are looked at for the lowest peak
_ALL = 400  # cuts that are all looked at
_REPAIRS = 200  # cuts that are looked at to make a candidate fit
_RELAXED = 6  # candidates that the bound found
_STARTS = 3  # candidates from which a local search starts


class CutSearch:
    """A search for one graph, schedule and memory.

    Attributes:
        problems: the problems of all stages.
        order: the actions of the schedule.
        links: the links between ranks.
        limits: the bytes of each rank.
        cuts: the positions that are looked at, with 0 and the end; there must be enough of them for the stages.
        single: whether each rank has one stage, so that the bound comes from a dynamic program.
    """

    def __init__(
        self,
        frontiers: StageFrontiers,
        order: PipelineOrder,
        links: Links | None,
        limits: Sequence[int | None],
    ) -> None:
        self.problems, self.order, self.links, self.limits = frontiers.problems, order, links, tuple(limits)
        self.frontiers = frontiers
        self.stages = len(order.rank_of)
        self.choices = RankChoice(frontiers, rank_loads(order), limits)
        self.scoring: CutScoring = CutScoring(self.choices, order, links)
        self.cuts = candidate_cuts(self.problems)
        self.single = order.rank_of == tuple(range(self.stages))
        self._time = self.problems.seconds[self.cuts]

    def run(self) -> tuple[ScoredCuts | None, float]:
        """Return the best cuts found, ``None`` if none fit, and a lower bound on the step of all cuts that were looked
        at, infinite if none can fit.
        """
        seeds = dict.fromkeys(self.seeds())
        known = self._fitting(seeds)
        if self.single:
            bound = self.bound()
        else:
            proven, near = self.proven(seeds, min((s.seconds for s in known), default=np.inf))
            bound = max(proven, self._average_bound())
            candidates = dict.fromkeys([*near[:_RELAXED], *seeds])
            known = self._fitting(candidates)
            if len(known) < len(candidates):
                known += [s for ends in list(candidates)[:2] if (s := self.repaired(ends)) is not None]
        best = self.local(known or self._fitting(self._tight()) or self._lean_ones())
        if self.few:
            least, best = self.all_cuts(best, self.scoring)
            bound = max(bound, least)
        return best, bound

    def _lean_ones(self) -> list[ScoredCuts]:
        """Return the cuts with the lowest peak if they fit: what a refusal names is found with more memory, too."""
        found = self.smallest
        return [self.scoring.relaxed(found)] if self.scoring.fits(found) else []

    def _fitting(self, candidates: Iterable[tuple[int, ...]]) -> list[ScoredCuts]:
        return [scored for scored in map(self.scored, candidates) if scored is not None]

    @property
    def few(self) -> bool:
        """Whether all cuts can be looked at."""
        return comb(len(self.cuts) - 2, self.stages - 1) <= _ALL

    @cached_property
    def _times(self) -> CutTimes:
        return CutTimes(self.choices, self.cuts)

    def seeds(self) -> list[tuple[int, ...]]:
        """Return cuts from which to start, as numbers of positions."""
        seeds = [self._even(), *self._balanced(), *self._by_blocks()]
        return [*seeds, *self._by_path(self._times)] if self.single else seeds

    def bound(self, below: float = np.inf) -> float:
        """Return a lower bound on the step of all cuts.

        Args:
            below: the step of some cuts; the bound may be of shorter ones only.
        """
        if self.single:
            return max(self._path_bound(self._times), self._average_bound())
        return max(self.proven(dict.fromkeys(self.seeds()), below)[0], self._average_bound())

    def proven(self, seeds: Iterable[tuple[int, ...]], below: float) -> tuple[float, Candidates]:
        """Return the bound for any order of actions, with candidates; arguments as for `StepBound.run`."""
        return StepBound(self.choices, self.order, self.links, self.cuts).run(seeds, below)

    @cached_property
    def smallest(self) -> ScoredCuts:
        """The lowest peak that was found; what is looked at does not depend on the limits."""
        if self.few and len(self.problems.whole.ops) <= _TINY:
            last = len(self.cuts) - 1
            every = [(*inner, last) for inner in combinations(range(1, last), self.stages - 1)]
            return self._leaner(every, None)
        best = self._leaner(dict.fromkeys([self._even(), *self._balanced(), *self._by_blocks(), *self._tight()]), None)
        place = {int(c): i for i, c in enumerate(self.cuts)}
        tried: dict[tuple[int, ...], None] = {}
        while len(tried) < _LEAN:
            tight = max(range(best.run.ranks), key=best.run.peaks.__getitem__)
            near = (e for e in self._neighbours(tuple(place[c] for c in best.ends), tight) if e not in tried)
            some = list(islice(dict.fromkeys(near), _LEAN - len(tried)))
            tried.update(dict.fromkeys(some))
            found = self._leaner(some, best)
            if found is best:
                break
            best = found
        return best

    def _leaner(self, candidates: Iterable[tuple[int, ...]], best: ScoredCuts | None) -> ScoredCuts:
        """Return the cuts with the lowest peak."""
        ends = [[int(self.cuts[e]) for e in each] for each in candidates]
        for least, each in sorted((self.scoring.least_peak(each), each) for each in ends):
            if best is None or least < max(best.run.peaks):
                found = self.scoring.leanest(each)
                if best is None or max(found.run.peaks) < max(best.run.peaks):
                    best = found
        assert best is not None
        return best

    def all_cuts(self, best: ScoredCuts | None, scoring: CutScoring) -> tuple[float, ScoredCuts | None]:
        """Return a lower bound over all cuts, each simulated with the least times that its stages can have.

        A simulated step is not longer if stages are quicker, so this is a bound for each. Cuts whose bound is below the
        best step are scored.

        Args:
            best: the best cuts so far.
            scoring: scores cuts.
        """
        least = []
        for inner in combinations(range(1, len(self.cuts) - 1), self.stages - 1):
            ends = tuple(int(self.cuts[e]) for e in (*inner, len(self.cuts) - 1))
            least.append((self.least_step(ends), ends))
        heapq.heapify(least)
        exact: set[tuple[int, ...]] = set()
        lowest = float("inf")  # of the cuts that were scored
        while least and np.isfinite(least[0][0]):
            bound, ends = least[0]
            if best is not None and bound >= best.seconds * (1 - 1e-12):
                break
            if ends in exact:
                heapq.heappop(least)
                scored = scoring.of(ends)
                lowest = min(lowest, max(bound, scoring.proven.get(ends, 0.0)))
                if scored is not None and (best is None or scored.seconds < best.seconds):
                    best = scored
            else:
                exact.add(ends)
                enough = np.inf if best is None else best.seconds
                heapq.heapreplace(least, (max(bound, self.least_step(ends, enough)), ends))
        return min([lowest, *(bound for bound, _ in least[:1])]), best

    def least_step(self, ends: Sequence[int], enough: float | None = None) -> float:
        """Return a lower bound on the step of some cuts; infinite if a rank cannot hold its stages.

        It is a simulation with the least times that their stages can have. A simulated step is not longer if stages are
        quicker, so this holds for everything that the stages may save.

        Args:
            ends: the cuts.
            enough: look for a sharper bound, up to this.
        """
        spans, exact = list(pairwise((0, *ends))), enough is not None
        costs: list[StageCosts] = [StageCosts(0.0, 0.0)] * len(spans)
        for rank, load in enumerate(self.choices.loads):
            fixed = sum(self.choices.fixed(spans[stage]) for stage in load.stages)
            for stage, count in zip(load.stages, load.surely().tolist(), strict=True):
                limit, again = self.choices.limits[rank], 0.0
                if limit is not None:
                    made = self.problems.peaks.gradients[list(spans[stage])]
                    left = limit - fixed - int(made[1] - made[0])
                    frontier = self.choices.frontiers.of(*spans[stage])
                    bound = frontier.least if exact and len(frontier.problem.ops) <= _SMALL else frontier.bound
                    again = bound(left // max(1, count)) if left >= 0 else np.inf
                if not np.isfinite(again):
                    return float("inf")
                costs[stage] = self.problems.least_seconds(*spans[stage], again)
        either = np.array([self.problems.either[b] - self.problems.either[a] for a, b in spans])
        return self._with_shares(costs, either, 0.0 if enough is None else enough)

    def _with_shares(self, costs: Sequence[StageCosts], either: Floats, enough: float) -> float:
        """Return a lower bound on the step if each stage has any share of ``either`` in forward, the rest in backward.

        Halve the range of a share where the bound is lowest: each range counts with the least that is in either half.
        """

        def bound(low: Floats, high: Floats) -> float:
            early, late = (low * either).tolist(), ((1.0 - high) * either * (not self.problems.divided)).tolist()
            shared = [
                replace(c, forward=c.forward + f, backward_input=c.backward_input + b)
                for c, f, b in zip(costs, early, late, strict=True)
            ]
            return simulate_schedule(shared, self.order, links=self.links).seconds

        low, high, number = np.zeros(len(costs)), np.ones(len(costs)), 0
        ranges = [(bound(low, high), number, low, high)]
        while ranges[0][0] < enough and number < _RANGES and either.any():
            _, _, low, high = heapq.heappop(ranges)
            stage = int(np.argmax((high - low) * either))
            middle, change = (low[stage] + high[stage]) / 2, np.arange(len(low)) == stage
            for pair in ((low, np.where(change, middle, high)), (np.where(change, middle, low), high)):
                number += 1
                heapq.heappush(ranges, (bound(*pair), number, *pair))
        return ranges[0][0]

    @property
    def looked_at(self) -> tuple[int, int]:
        """How many positions are looked at, of how many."""
        return len(self.cuts) - 2, len(self.problems.positions.legal)

    def scored(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        """Return the score of cuts by the numbers of their positions."""
        return self.scoring.of([int(self.cuts[e]) for e in ends])

    def _even(self) -> tuple[int, ...]:
        """Return cuts that divide the time of forward and backward evenly."""
        return nearest_cuts(self._time, [self._time[-1] * (i + 1) / self.stages for i in range(self.stages)])

    def _balanced(self) -> Iterator[tuple[int, ...]]:
        """Yield the cuts with the least slowest stage without recompute, which do not depend on the memory."""
        table = self._time[None, :] - self._time[:, None]
        size = len(self.cuts)
        table = np.where(np.arange(size)[:, None] < np.arange(size)[None, :], table, np.inf)
        times = np.broadcast_to(table, (self.stages, size, size))
        zero = np.zeros(size)
        slowest = least_path(times, zero, 1_000_000)
        most = max(table[pair] for pair in pairwise((0, *slowest.ends)))
        yield least_sum(times, self._link_seconds(), most * (1 + 1e-9)).ends
        if not self.single:
            yield self._by_rank()

    def _by_blocks(self) -> Iterator[tuple[int, ...]]:
        """Yield the cuts that give each stage as many blocks of the model, if it has enough."""
        positions, inner = self.problems.positions, self.cuts[1:-1]
        forward = set(positions.forward)
        blocks = model_blocks(positions.flow, self.problems.costs).values()
        starts = sorted(
            min(positions.place[n] for n in nodes if n in forward) for nodes in blocks if forward & {*nodes}
        )
        if len(starts) >= self.stages:
            firsts = (starts[len(starts) * s // self.stages] for s in range(1, self.stages))
            ends = (*(int(np.abs(inner - first).argmin()) + 1 for first in firsts), len(self.cuts) - 1)
            if all(a < b for a, b in pairwise((0, *ends))):
                yield ends

    def _by_rank(self) -> tuple[int, ...]:
        """Return cuts in which ranks of several stages are even, although the last stage has a heavy head."""
        ranks, whole = len(self.order.ranks), float(self._time[-1])
        head = float(self._time[-1] - self._time[-2])
        of, last = np.array(self.order.rank_of), self.order.rank_of[-1]
        local = int((of == last).sum())
        least = head + (local - 1) * whole / (100 * self.stages)
        own = max(whole / ranks, least)
        times = np.full(self.stages, (whole - own) / max(1, ranks - 1) / local)
        times[of == last] = (own - max(head, own / local)) / max(1, local - 1)
        times[-1] = max(head, own / local)
        return nearest_cuts(self._time, np.cumsum(times).tolist())

    def _tight(self) -> Iterator[tuple[int, ...]]:
        """Yield cuts that give ranks even shares of the fixed bytes, for memory that hardly suffices."""
        fixed = np.array([self.choices.fixed((0, int(c))) if c else 0 for c in self.cuts], np.float64)
        for weight in (0.25, 0.5, 0.75, 1.0):
            mixed = weight * fixed / max(1.0, fixed[-1]) + (1 - weight) * self._time / max(1e-30, self._time[-1])
            yield nearest_cuts(mixed, [(i + 1) / self.stages for i in range(self.stages)])

    def _link_seconds(self) -> Floats:
        """Return (n + 1,) the seconds of an activation and its gradient over each cut, by the quickest link."""
        problems, cuts = self.problems, self.cuts
        found = np.zeros(len(cuts))
        if self.links is None:
            return found
        of = self.order.rank_of
        pairs = set(pairwise(of))
        if not pairs or any(a == b for a, b in pairs):
            return found
        for i in range(1, len(cuts) - 1):
            on, back = float(problems.sent_on[cuts[i]]), float(problems.sent_back[cuts[i]])
            found[i] = min(
                self.links.seconds(a, b, on) + (self.links.seconds(b, a, back) if not problems.divided else 0.0)
                for a, b in pairs
            )
        return found

    def _by_path(self, times: CutTimes) -> list[tuple[int, ...]]:
        """Return candidates for one stage a rank: the least path bound, and the least sum below several limits."""
        links, count = self._link_seconds(), self.order.microbatches
        found: list[tuple[int, ...]] = []
        waits = self._waits()
        first = self._settle(times, lambda: least_path(times.upper, links, count, waits))
        if first is None:
            return found
        found.append(first)
        slowest = self._settle(times, lambda: least_path(times.upper, np.zeros(len(links)), 1_000_000))
        plans = [first] if slowest is None else [first, slowest]
        found += plans[1:]
        tops = [max(times.upper[k, a, b] for k, a, b in _stages(ends)) for ends in plans]
        low, high = min(tops), max(*tops, min(tops) * 1.08)
        for limit in np.linspace(low, high, _LIMITS).tolist():
            ends = self._settle(times, lambda limit=limit: least_sum(times.upper, links, limit * (1 + 1e-9)))  # type: ignore[misc]
            if ends is not None:
                found.append(ends)
        return found

    def _settle(self, times: CutTimes, solve: Callable[[], LineCuts]) -> tuple[int, ...] | None:
        """Solve until all stages of the solution are exact."""
        for _ in range(_STEPS):
            plan = solve()
            if not np.isfinite(plan.value):
                return None
            if times.settled(plan.ends):
                return plan.ends
        return None

    def _path_bound(self, times: CutTimes) -> float:
        """Return the least path bound over lower bounds of all stages, made sharper where it is attained."""
        links, waits = self._link_seconds(), self._waits()
        bound = 0.0
        for _ in range(_STEPS):
            plan = least_path(times.lower, links, self.order.microbatches, waits)
            bound = plan.value
            if not np.isfinite(bound) or times.settled(plan.ends):
                break
        return bound

    def _waits(self) -> Floats | None:
        """Return (p, n + 1, n + 1) the seconds for which each stage waits for its first gradient, at least.

        A stage that runs w forwards before its first backward cannot go on until one of these microbatches has been
        through all later stages and back. Where backward is divided, ranks have other work then.
        """
        if self.problems.divided:
            return None
        forward = self.problems.forward[self.cuts]
        own = np.maximum(0.0, forward[None, :] - forward[:, None])
        later = self._time[-1] - self._time
        return np.array([first_wait(own, later[None, :], count) for count in warm_up(self.order)])

    def _average_bound(self) -> float:
        """Return a bound that holds for any placement.

        All work, and the least recompute, is evenly on all ranks; and one rank has the piece that takes longest.
        """
        ranks, count = len(self.order.ranks), self.order.microbatches
        work = float(self._time[-1])
        if all(limit is not None for limit in self.limits):
            size = int(self.cuts[-1])
            fixed = self.choices.fixed((0, size))
            held = sum(limit or 0 for limit in self.limits) - fixed
            least = min(int(load.surely().min()) for load in self.choices.loads)
            hull = Hull(self.problems.problem(0, size, relaxed=True).savings)
            work += hull.bound(held / max(1, least))
        piece = float(np.diff(self._time).max())
        return max(work / ranks, piece) * count

    def repaired(self, ends: tuple[int, ...]) -> ScoredCuts | None:
        """Move cuts as long as the ranks lack fewer bytes; return the score once they lack none."""
        here = [int(self.cuts[e]) for e in ends]
        lacking, tries = self.scoring.shortfall(here), 0
        while lacking and tries < _REPAIRS:
            before = lacking
            for step in (8, 4, 2, 1):
                for cut, change in ((c, d) for c in range(len(ends) - 1) for d in (-step, step)):
                    for moved in self._moved(ends, [cut], change):
                        tries += 1
                        found = self.scoring.shortfall([int(self.cuts[e]) for e in moved])
                        if found < lacking:
                            ends, lacking = moved, found
                if lacking < before:
                    break
            if lacking == before:
                return None
        return None if lacking else self.scored(ends)

    def local(self, found: list[ScoredCuts]) -> ScoredCuts | None:
        """Move cuts as long as the simulated step gets shorter."""
        found.sort(key=lambda scored: scored.seconds)
        if not found:
            return None
        place = {int(c): i for i, c in enumerate(self.cuts)}
        best = found[0]
        budget = _MOVES
        for start in found[:_STARTS]:
            now, better = start, True
            while better and budget > 0:
                better = False
                for ends in self._neighbours(tuple(place[e] for e in now.ends), now.run.busiest_rank):
                    if self._surely(ends) >= now.seconds:
                        continue
                    before = len(self.scoring.tried)
                    scored = self.scored(ends)
                    budget -= len(self.scoring.tried) - before
                    if scored is not None and scored.seconds < now.seconds * (1 - 1e-9):
                        now, better = scored, True
                        break
                    if budget <= 0:
                        break
            best = min(best, now, key=lambda scored: scored.seconds)
        return best

    def _surely(self, ends: tuple[int, ...]) -> float:
        """Return a quick lower bound on the step of some cuts: the work of the busiest rank without recompute."""
        loads = np.zeros(len(self.order.ranks))
        np.add.at(loads, list(self.order.rank_of), np.diff(self._time[[0, *ends]]))
        return float(loads.max()) * self.order.microbatches

    def _neighbours(self, ends: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
        """Yield cuts that differ a little: first cuts that make a rank's stages smaller."""
        own = [s for s, r in enumerate(self.order.rank_of) if r == rank]
        inner = range(len(ends) - 1)
        for step in (1, 2, 4):
            for stage in own:
                yield from self._moved(ends, [c for c in inner if c >= stage], -step)
                yield from self._moved(ends, [stage] if stage in inner else [], -step)
                yield from self._moved(ends, [c for c in inner if c < stage], step)
                yield from self._moved(ends, [stage - 1] if stage else [], step)
        for step in (1, 2, 4):
            for cut in inner:
                for change in (-step, step):
                    yield from self._moved(ends, [cut], change)

    def _moved(self, ends: tuple[int, ...], which: Iterable[int], change: int) -> Iterator[tuple[int, ...]]:
        chosen = set(which)
        moved = tuple(e + change if i in chosen else e for i, e in enumerate(ends))
        if chosen and all(a < b for a, b in pairwise((0, *moved))):
            yield moved


def _stages(ends: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    yield from zip(range(len(ends)), (0, *ends[:-1]), ends, strict=True)


def candidate_cuts(problems: StageProblems, most: int = _CUTS) -> Ints:
    """Return the positions at which cuts are looked at, with 0 and the end.

    All that are possible, if these are not too many; else those that send the fewest bytes. Of neighbours between which
    no time passes, one that sends the fewest is enough.
    """
    positions = problems.positions
    size, legal = len(positions.forward), positions.legal
    if len(legal) > most:
        sent = bytes_across(positions.activations, legal) + bytes_across(positions.gradients, legal)
        both = problems.seconds[legal]
        kept: dict[float, int] = {}
        for i in range(len(legal)):
            best = kept.setdefault(float(both[i]), i)
            if sent[i] < sent[best]:
                kept[float(both[i])] = i
        chosen = np.array(sorted(kept.values()), np.int64)
        if len(chosen) > most:
            chosen = np.sort(chosen[np.argsort(sent[chosen], kind="stable")[:most]])
        legal = legal[chosen]
    return np.concatenate([[0], legal, [size]]).astype(np.int64)
