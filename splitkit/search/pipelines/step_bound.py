"""A lower bound on the simulated step of every plan of a pipeline, for any fixed order of actions on each rank.

**What bounds the step.** The schedule gives the order of the actions of each rank. So a step takes as long as the
longest path through its actions; an action follows the previous action on its rank and the message that it reads.
Waits for busy links are left out, which only makes paths shorter. And the order alone says how many microbatches a rank
holds at each moment (`splitkit.search.pipelines.rank_choice`), whatever times its actions take: what its stages hold
then must fit its memory. All times and bytes are sums over stages, of numbers that depend on the two cuts of the stage
and on its saved values.

**The bound.** For any mean of paths and any prices of the moments, the least over all cuts and choices of

    the length of the mean path  +  sum of price * (bytes that are held at the moment - memory of the rank)

is a lower bound: the mean of some paths is not longer than the longest one, and the second term is not positive for a
plan that fits (`splitkit.solvers.line.column_bound` finds good means and prices). With these given, the sum falls apart
into stages: times * weights, bytes in any case * prices, and recompute seconds * weight + saved bytes * price. This
last part is at least the sum of the same over all pieces between neighbouring cuts, as if what passes a cut were free.
For the intervals that the dynamic program over cuts chooses, it is exact (`Hull.least`), and the program is solved
again. Both are lower bounds of the part, so the value of the program is a lower bound in every round.

The bound may be below the best step, because mixtures of cuts and of points of frontiers count as plans, temporary
bytes count one op only, and messages take no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from splitkit.costs import Links
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, PipelineOrder
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.rank_choice import RankChoice, RankLoads
from splitkit.search.pipelines.stage_frontiers import problem_key
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.solvers.line.column_bound import CutMaster, DualWeights, StageColumn
from splitkit.solvers.line.path_bound import least_sum, nearest_cuts
from splitkit.training.choices import Floats, Ints

# Tables over pairs of cuts: what a stage between two cuts takes at least, whatever it saves.
#
# Times are exact; bytes are lower bounds. Entry [i, j] is for the stage from cut i to cut j > i; other entries mean
# nothing.


class SpanTables:
    """The tables of one graph.

    Attributes:
        cuts: (n + 1,) the positions of the cuts, with 0 and the end.
        forward: (n + 1, n + 1) seconds of forward.
        inputs: the same of the input part of backward, without recompute; all of backward where it is not divided.
        weights: the same of the weight part. The first stage has all of its backward there.
        either: the same of what is either in forward or in one of these parts.
        fixed: bytes of weights, gradients and optimizer.
        held: bytes of a microbatch that are held in any case: received and sent values.
        waiting: bytes of a microbatch that wait for the weight part. The first stage's are its saved bytes, and 0 here.
        temporary: bytes that the stage takes while it computes.
    """

    def __init__(self, problems: StageProblems, cuts: Ints) -> None:
        self.problems, self.cuts = problems, cuts
        self.forward = _differences(problems.forward[cuts])
        backward = _differences(problems.backward[cuts])
        self.weights = self._weights(backward) if problems.divided else np.zeros_like(backward)
        self.inputs = np.maximum(0.0, backward - self.weights)
        self.either = _differences(problems.either[cuts])
        self.fixed = fixed_bytes(problems, cuts)
        self.held = problems.sent_on[cuts][:, None] + self._sent()
        self.waiting = self._waiting() if problems.divided else np.zeros_like(backward)
        self.temporary = self._temporary()

    def _weights(self, backward: Floats) -> Floats:
        at, reach = self.problems.halves.at, self.problems.halves.reach
        seconds = self.problems.in_backward[self.problems.halves.numbers]
        found = np.zeros((len(self.cuts), len(self.cuts)))
        for i, start in enumerate(self.cuts.tolist()):
            inside = (at >= start) & (reach >= start)
            found[i] = _before(at[inside], seconds[inside], self.cuts)
        found[0] = backward[0]
        return np.minimum(found, np.maximum(0.0, backward))

    def _sent(self) -> Floats:
        """Return the bytes that a stage makes and sends on."""
        found, nbytes = np.zeros((len(self.cuts), len(self.cuts))), self.problems.flow.storages.nbytes
        for j, end in enumerate(self.cuts[:-1].tolist()):
            first: dict[int, int] = {}  # storage -> the last start of a stage that makes it and sends it over this cut
            for made, last, roots in self.problems.sent:
                if made < end <= last:
                    for root, at in roots:
                        first[root] = max(first.get(root, -1), min(made, at))
            for root, at in first.items():
                found[: np.searchsorted(self.cuts, at, side="right"), j] += nbytes[root]
        return found

    def _waiting(self) -> Floats:
        """Return the bytes that weight parts read and other parts made, with what the stage received."""
        at, reach, root, nbytes, made, makers = self.problems.halves.reads_of_backward()
        found = np.zeros((len(self.cuts), len(self.cuts)))
        for i, start in enumerate(self.cuts.tolist()):
            inside = (at >= start) & (reach >= start) & (made >= start) & (makers < start)
            roots, number = np.unique(root[inside], return_inverse=True)
            first = np.full(len(roots), np.iinfo(np.int64).max)
            np.minimum.at(first, number, at[inside])
            size = np.zeros(len(roots))
            size[number] = nbytes[inside]
            found[i] = _before(first, size, self.cuts)
        found += self.problems.sent_on[self.cuts][:, None]
        found[0] = 0.0
        return found

    def _temporary(self) -> Floats:
        """Return the most bytes that one op of backward needs, or the gradients that are alive at its end."""
        size = len(self.cuts)
        found = np.zeros((size, size))
        for low, high, nbytes in self.problems.peaks.needs_of_backward():
            i = int(np.searchsorted(self.cuts, low, side="right")) - 1
            j = int(np.searchsorted(self.cuts, high, side="right"))
            found[i, j] = max(found[i, j], nbytes)
        found = np.maximum.accumulate(np.maximum.accumulate(found[::-1], axis=0)[::-1], axis=1)
        made = self.problems.peaks.gradients[self.cuts]
        return np.asarray(np.maximum(found, made[None, :] - made[:, None]), np.float64)


def fixed_bytes(problems: StageProblems, cuts: Ints) -> Floats:
    """Return (n + 1, n + 1) the bytes of weights, gradients and optimizer of the stages between all cuts."""
    size = len(cuts)
    gradients, parameters = np.zeros((size, size)), np.zeros((size, size))
    for nbytes, gradient, used in problems.parameters:
        before = -1
        for piece in np.unique(np.searchsorted(cuts, used, side="right") - 1).tolist():
            parameters[before + 1 : piece + 1, piece + 1 :] += nbytes
            gradients[before + 1 : piece + 1, piece + 1 :] += gradient
            before = piece
    state = STATE_OF[problems.optimizer] if problems.optimizer else 0
    return parameters + gradients * (1 + state)


def _differences(sums: Floats) -> Floats:
    return np.asarray(sums[None, :] - sums[:, None])


def _before(at: Ints, values: Floats, cuts: Ints) -> Floats:
    """Return (n + 1,) the sum of the values that are at a position before each cut."""
    order = np.argsort(at, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(values[order])])
    return np.asarray(sums[np.searchsorted(at[order], cuts, side="left")])


_ROUNDS = 60  # of columns
_WIDTHS = 5  # pieces of 1, 2, 4 ... cuts
_SETTLED = 3  # rounds of a dynamic program in which entries become exact
_PATHS = 2  # rounds of paths before each round of columns
_CLOSE = 1e-3  # relative: a bound so near the value of its linear program cannot rise much
_LITTLE, _PATIENCE = 5e-4, 8  # relative: after so many rounds that raise the bound by less, it is good enough
_SMOOTH = 0.5  # of the way from the best weights to the linear program's
_LONGER = 1e-6  # relative: a new path must be longer than the program's longest by more than this
_F, _I, _W, _ON, _BACK = range(5)
Candidates = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class _Prices:
    """What times and bytes of a stage cost: (p,) arrays, and (p, 5) of times."""

    times: Floats
    saved: Floats
    waiting: Floats
    fixed: Floats
    temporary: Floats


class StepBound:
    """The bound for one graph, schedule and memory."""

    def __init__(self, choices: RankChoice, order: PipelineOrder, links: Links | None, cuts: Ints) -> None:
        self.choices, self.order, self.cuts = choices, order, cuts
        self.problems = choices.frontiers.problems
        self.stages = len(order.rank_of)
        self.tables = SpanTables(self.problems, cuts)
        self._hulls = SpanHulls(self.problems, cuts)
        self.pieces = PieceHulls(self._hulls)
        self._messages = _message_seconds(self.problems, order, links, cuts)
        limited = [(load, n) for load, n in zip(choices.loads, choices.limits, strict=True) if n is not None]
        self.limits = np.array([float(limit) for load, limit in limited for _ in load.runs])
        self._moments = np.concatenate(
            [np.zeros((4, 0, self.stages)), *(_moments(load, self.stages) for load, _ in limited)], axis=1
        )
        self._settled: list[dict[tuple[int, int], None]] = [{} for _ in range(self.stages)]
        self._outside = np.where(np.arange(len(cuts))[:, None] < np.arange(len(cuts))[None, :], 0.0, np.inf)

    def run(self, seeds: Iterable[Sequence[int]], below: float = np.inf) -> tuple[float, Candidates]:
        """Return the bound, and good candidates: cuts near the mean of mixtures, the best mixture first.

        Args:
            seeds: the ends of the stages of some plans, as numbers of cuts: one at least.
            below: the bound may be of plans of a shorter step only; then it is not above this.
        """
        alone = self.tables.forward + self.tables.inputs + self.tables.weights + self.tables.either
        self._outside[alone * self.order.microbatches >= below] = np.inf
        master, found = CutMaster(np.maximum(self.limits, 1.0)), dict[tuple[int, ...], None]()
        center = self._even_weights()
        best, last = self._price(center)[0], _ROUNDS
        for ends in seeds:  # excluded columns do no harm: the bound does not come from the mixture
            for price, weight in ((0.0, 1.0), (1.0, 0.0)):
                for column in self._columns(ends, [(price, weight)] * self.stages):
                    master.add_column(column)
        for number in range(_ROUNDS):
            dual = self._with_paths(master)
            if dual is None:
                break
            near = nearest_cuts(self.tables.forward[0], np.cumsum(dual.mean[:, _F]).tolist())
            found = {near: None} | found
            for weights in (center.towards(dual, _SMOOTH), dual):
                value, columns = self._price(weights)
                if value > best:
                    last = number if value > best * (1 + _LITTLE) else min(last, number)
                    best, center = value, weights
                if sum(master.add_column(column) for column in columns):
                    break
            else:
                break
            if best >= dual.value * (1 - _CLOSE) or number >= last + _PATIENCE:
                break
        return min(best, below), tuple(found)

    def _even_weights(self) -> DualWeights:
        """Return the mean of the paths that follow one rank from its first action to its last."""
        times = np.zeros((self.stages, 5))
        times[:, [_F, _I, _W]] = self.order.microbatches / len(self.order.ranks)
        return DualWeights(0.0, 0.0, times, np.zeros(len(self.limits)), times)

    def _with_paths(self, master: CutMaster) -> DualWeights | None:
        """Solve until no path is longer than the value of the program."""
        if not master.has_paths:
            master.add_path(next(self._paths(np.ones((self.stages, 5)), 0.0)))
        dual = None
        for _ in range(_PATHS):
            dual = master.solve()
            longer = () if dual is None else self._paths(dual.mean, dual.longest * (1 + _LONGER))
            if not sum(master.add_path(path) for path in longer):
                break
        return dual

    def _paths(self, times: Floats, above: float) -> Iterator[Floats]:
        """Yield the longest path to the last action of each rank that is longer than ``above``."""
        order = self.order
        durations = np.stack([times[:, _F], times[:, _I] + times[:, _W], times[:, _I], times[:, _W]])
        columns = order.columns
        took = durations[columns.kind, columns.stage].tolist()
        sends = np.where(columns.kind == FORWARD, times[columns.stage, _ON], times[columns.stage, _BACK]).tolist()
        rank, data = columns.rank.tolist(), order.links.data.tolist()
        ends, before, last = [0.0] * len(rank), [-1] * len(rank), [-1] * len(order.ranks)
        for i in order.links.sequence:
            own, need = last[rank[i]], data[i]
            start = ends[own] if own >= 0 else 0.0
            if need >= 0 and ends[need] + sends[need] > start:
                start, own = ends[need] + sends[need], need
            ends[i], before[i], last[rank[i]] = start + took[i], own, i
        for action in sorted(last, key=lambda i: -ends[i]):
            if ends[action] > above:
                yield self._counted(action, before)

    def _counted(self, action: int, before: Sequence[int]) -> Floats:
        """Return how often a path has each time of each stage."""
        columns, path = self.order.columns, []
        while action >= 0:
            path.append(action)
            action = before[action]
        found = np.zeros((self.stages, 5))
        at = np.array(path)
        kind, stage, rank = columns.kind[at], columns.stage[at], columns.rank[at]
        for time, kinds in ((_F, [FORWARD]), (_I, [BACKWARD, BACKWARD_INPUT]), (_W, [BACKWARD, BACKWARD_WEIGHT])):
            np.add.at(found[:, time], stage[np.isin(kind, kinds)], 1.0)
        sent = np.flatnonzero(rank[1:] != rank[:-1]) + 1  # the path is from the last action to the first
        for time, on in ((_ON, True), (_BACK, False)):
            np.add.at(found[:, time], stage[sent[(kind[sent] == FORWARD) == on]], 1.0)
        return found

    def _prices(self, dual: DualWeights) -> _Prices:
        return _Prices(dual.times, *(dual.loads[:, None] * self._moments).sum(axis=1))

    def _rates(self, prices: _Prices) -> list[tuple[float, float]]:
        """Return the price of a saved byte, and of a second of recompute, for each stage."""
        again = prices.times[:, _I].copy()
        saved = prices.saved.copy()
        if self.problems.divided:  # the first stage has all of its backward in the weight part, and all waits for it
            again[0] = prices.times[0, _W]
            saved[0] += prices.waiting[0]
        return list(zip(saved.tolist(), again.tolist(), strict=True))

    def _price(self, dual: DualWeights) -> tuple[float, list[StageColumn]]:
        """Return a lower bound for these weights, and columns for the linear program."""
        prices, tables = self._prices(dual), self.tables
        rates = self._rates(prices)
        costs = []
        for s, (price, _) in enumerate(rates):
            w, (on, back) = prices.times[s], self._messages[s]
            cost = w[_F] * tables.forward + w[_I] * tables.inputs + w[_W] * tables.weights
            cost += min(w[: _W + 1 if self.problems.divided else _W]) * tables.either
            cost += w[_ON] * on[None, :] + w[_BACK] * back[:, None] + prices.fixed[s] * tables.fixed
            cost += price * tables.held + prices.waiting[s] * tables.waiting + prices.temporary[s] * tables.temporary
            costs.append(cost + self._outside)
        base = np.array(costs)
        full = base + self.pieces.least(rates)
        for s, (price, weight) in enumerate(rates):
            for i, j in self._settled[s]:
                full[s, i, j] = max(full[s, i, j], base[s, i, j] + self._hulls.of(i, j).least(price, weight)[0])
        columns = list[StageColumn]()
        for _ in range(_SETTLED):
            least = least_sum(full, np.zeros(len(self.cuts)), np.inf)
            if not np.isfinite(least.value):  # all plans that are left out take longer
                return np.inf, []
            columns += self._columns(least.ends, rates)
            new = [(s, i, j) for s, (i, j) in enumerate(pairwise((0, *least.ends))) if (i, j) not in self._settled[s]]
            for s, i, j in new:
                self._settled[s][i, j] = None
                full[s, i, j] = max(full[s, i, j], base[s, i, j] + self._hulls.of(i, j).least(*rates[s])[0])
            if not new:
                break
        return least.value - float(dual.loads @ self.limits), columns

    def _columns(self, ends: Sequence[int], rates: Sequence[tuple[float, float]]) -> Iterator[StageColumn]:
        """Yield the columns of a plan whose stages save the best values for these rates."""
        for s, (i, j) in enumerate(pairwise((0, *ends))):
            hull = self._hulls.of(i, j)
            _, corner = hull.least(*rates[s])
            yield self._column(s, i, j, corner.first, corner.second * hull.tick)

    def _column(self, s: int, i: int, j: int, nbytes: float, again: float) -> StageColumn:
        tables, (on, back) = self.tables, self._messages[s]
        times = np.array([t[i, j] for t in (tables.forward, tables.inputs, tables.weights)] + [on[j], back[i]])
        times[_W if self.problems.divided and s == 0 else _I] += tables.either[i, j]
        late = self.problems.divided and s == 0
        times[_W if late else _I] += again
        saved = tables.held[i, j] + nbytes
        waiting = saved if late else tables.waiting[i, j]
        held, waits, here, runs = self._moments[:, :, s]
        loads = held * saved + waits * waiting + here * tables.fixed[i, j] + runs * tables.temporary[i, j]
        return StageColumn(s, i, j, times, loads)


class PieceHulls:
    """The hulls of pieces between cuts, each as if all values that pass its two cuts were free.

    A piece spans 1, 2, 4 ... cuts. An interval is at least the sum of disjoint pieces: the longest that fit, one after
    the other.
    """

    def __init__(self, hulls: SpanHulls) -> None:
        self._size = len(hulls.cuts)
        self._number: dict[int, Ints] = {}
        """Width -> for each start the number of the hull."""
        known: dict[Hull, int] = {}
        for width in (2**k for k in range(_WIDTHS) if 2**k < self._size):
            found = [hulls.of(i, i + width, relaxed=True) for i in range(self._size - width)]
            self._number[width] = np.array([known.setdefault(hull, len(known)) for hull in found], np.int64)
        self._hulls = list(known)

    def least(self, rates: Sequence[tuple[float, float]]) -> Floats:
        """Return (r, n + 1, n + 1) lower bounds on price * saved bytes + weight * recompute seconds of all intervals.

        Args:
            rates: (price, weight) r times.
        """
        least = np.array([[hull.least(*rate)[0] for hull in self._hulls] for rate in rates])
        found, size = np.zeros((len(rates), self._size, self._size)), self._size
        sums: list[Floats] = [np.zeros((len(rates), size))]  # length -> of the intervals of this length, by their start
        for length in range(1, size):
            width = max(w for w in self._number if w <= length)
            own = (
                least[:, self._number[width][: size - length]] + sums[length - width][:, width : width + size - length]
            )
            sums.append(own)
            starts = np.arange(size - length)
            found[:, starts, starts + length] = own
        return found


class SpanHulls:
    """The hulls of intervals between cuts, one for all isomorphic ones."""

    def __init__(self, problems: StageProblems, cuts: Ints) -> None:
        self.problems, self.cuts = problems, cuts
        self._of: dict[tuple[int, int, bool], Hull] = {}
        self._known: dict[object, Hull] = {}

    def of(self, i: int, j: int, *, relaxed: bool = False) -> Hull:
        """Return the hull of a stage between two cuts; if ``relaxed``, as if all values that pass them were free."""
        if (i, j, relaxed) not in self._of:
            problem = self.problems.problem(int(self.cuts[i]), int(self.cuts[j]), relaxed=relaxed).savings
            key = problem_key(problem)
            if key not in self._known:
                self._known[key] = Hull(problem)
            self._of[i, j, relaxed] = self._known[key]
        return self._of[i, j, relaxed]


def _moments(load: RankLoads, stages: int) -> Floats:
    """Return (4, v, p) how often a rank holds the saved, waiting, fixed and temporary bytes of each stage."""
    place = np.eye(stages)[list(load.stages)]
    fixed = np.ones(load.saved.shape) @ place
    return np.array([load.saved @ place, load.waiting @ place, fixed, place[load.runs]])


def _message_seconds(
    problems: StageProblems, order: PipelineOrder, links: Links | None, cuts: Ints
) -> list[tuple[Floats, Floats]]:
    """Return, for each stage, (n + 1,) seconds of the activation over its end, and of the gradient over its start."""
    of, nothing = order.rank_of, np.zeros(len(cuts))
    found = []
    for s, here in enumerate(of):
        on, back = nothing, nothing
        if links is not None and s + 1 < len(of) and of[s + 1] != here:
            on = np.array([links.seconds(here, of[s + 1], float(b)) for b in problems.sent_on[cuts]])
        if links is not None and s and of[s - 1] != here:
            back = np.array([links.seconds(here, of[s - 1], float(b)) for b in problems.sent_back[cuts]])
        found.append((on, back))
    return found
