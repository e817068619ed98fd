"""Finds a good order of actions and a lower bound: rules, windows that contradict each other, branching, then descent.

Values between the bound and the best order are tried by halving: if the windows of a value contradict each other, it is
a lower bound; if not, list scheduling within them may find a better order. All limits count work, not time.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

from splitkit.solvers.exact_order import Windows, branch, tighten, window_cells
from splitkit.solvers.order_problem import F, I, OrderProblem, Row, Rows, StepState, TimedRows, W, time_rows

# Orders actions by list scheduling: a rank that is free takes an input part first, then a forward, then a weight part.
#
# The zero-bubble schedules (Qi et al., ICLR 2024) follow from rules of this kind; the times decide which is best.


_GAPS = (0.75, 0.0, 1.0, 0.5, 0.9, 0.25)  # as in `ListRule.gap`; the best on published times first


@dataclass(frozen=True)
class ListRule:
    """How a rank chooses its next action.

    Attributes:
        most: stage -> the most microbatches between forward and the end of the input part.
        gap: how much of a weight part may be too long for the gap that it fills, from 0 to 1.
        yields: whether a weight part runs in place of a forward that would delay a known input part.
        deep: whether a rank prefers forward of its last stages.
    """

    most: tuple[int, ...]
    gap: float
    yields: bool
    deep: bool = True


def list_rules(problem: OrderProblem) -> Iterator[ListRule]:
    """Yield rules, the best ones on published times first.

    The first input part of a stage comes back after its microbatch has been to the last stage. ``most`` is the number
    of forwards that fit into this time, a few more or fewer; or as in 1F1B; or only memory limits it.
    """
    last, several = problem.stages, max(map(len, problem.of_rank), default=1) > 1
    around = [tuple(_in_time(problem, s, share) for s in range(last)) for share in ((1.0, 0.5) if several else (1.0,))]
    shifted = [tuple(max(1, one + add) for one in most) for add in (0, -1, 1, 2, -2) for most in around]
    limits = [tuple(range(last, 0, -1)), *shifted[: len(around) * 3], (problem.microbatches,) * last]
    limits += shifted[len(around) * 3 :]
    unique = dict.fromkeys(limits)
    for gap, most, yields, deep in product(_GAPS, unique, (False, True), (True, False) if several else (True,)):
        yield ListRule(most, gap, yields, deep)


def _in_time(problem: OrderProblem, stage: int, share: float) -> int:
    """Return how many forwards fit between the first one and its input part, with one more to begin with."""
    after = range(stage + 1, problem.stages)
    there = sum(problem.seconds[s][F] + problem.travel[s - 1][F] for s in after)
    back = sum(problem.seconds[s][I] + problem.travel[s][I] for s in after)
    own = problem.seconds[stage][F]
    fit = math.ceil(min(share * (there + back) / own, problem.microbatches)) if own else problem.microbatches
    return min(problem.microbatches, fit + 1)


Choice = tuple[float, int, int]
"""(start, stage, kind) of an action."""


class ListScheduler:
    """Runs the actions in the order of their starts; a rank chooses again when a message arrives."""

    def __init__(self, problem: OrderProblem, rule: ListRule) -> None:
        self.problem, self.rule = problem, rule
        self.state = StepState(problem)
        self.versions = [0] * problem.ranks
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.reserve = [_later_bytes(problem, stage) for stage in range(problem.stages)]

    def schedule(self) -> TimedRows | None:
        """Return the order; ``None`` if memory lets no rank go on."""
        for rank in range(self.problem.ranks):
            self._choose(rank)
        for _ in range(3 * self.problem.microbatches * self.problem.stages):
            choice = self._next()
            if choice is None:
                return None
            start, stage, kind = choice
            target = self.state.run(stage, kind, start)
            rank = self.problem.rank_of[stage]
            self._choose(rank)
            if target >= 0 and self.problem.rank_of[target] != rank:
                self._choose(self.problem.rank_of[target])
        return self.state.timed()

    def _next(self) -> Choice | None:
        """Return the action that starts first; a weight part if memory lets no rank go on without."""
        while self.heap:
            start, rank, version, stage, kind = heapq.heappop(self.heap)
            if version == self.versions[rank]:
                return start, stage, kind
        state = self.state
        for stage in range(self.problem.stages):
            start_of = state.start(stage, W)
            if start_of is not None and state.fits(stage, W):
                return start_of, stage, W
        return None

    def _choose(self, rank: int) -> None:
        self.versions[rank] += 1
        choice = self.choice(rank)
        if choice is not None:
            start, stage, kind = choice
            heapq.heappush(self.heap, (start, rank, self.versions[rank], stage, kind))

    def choice(self, rank: int) -> Choice | None:
        """Return the next action of a rank; ``None`` if it must wait for a message that is not on its way."""
        now, rule = self.state.free[rank], self.rule
        inputs, forwards = self.first(rank, I), self.first(rank, F)
        if inputs is not None and inputs[0] <= now:
            return inputs
        weight = self.first(rank, W)
        spare = rule.gap * self.problem.seconds[weight[1]][W] if weight is not None else 0.0
        if forwards is not None and forwards[0] <= now:
            if inputs is not None and weight is not None and rule.yields:
                seconds = self.problem.seconds
                late = now + seconds[forwards[1]][F] - inputs[0] > rule.gap * seconds[inputs[1]][I]
                allowed = rule.gap * seconds[inputs[1]][I]
                if late and now + seconds[weight[1]][W] <= inputs[0] + allowed:
                    return weight
            return forwards
        known = min((one for one in (inputs, forwards) if one is not None), default=None)
        if weight is not None and (known is None or now + self.problem.seconds[weight[1]][W] <= known[0] + spare):
            return weight
        return known

    def first(self, rank: int, kind: int) -> Choice | None:
        """Return the action of a kind that can start first on a rank; of equally early ones, the preferred stage's."""
        found: list[Choice] = []
        for stage in self.problem.of_rank[rank]:
            start = self.state.start(stage, kind)
            if start is not None and self.allowed(stage, kind):
                found.append((start, stage, kind))
        last = (kind == F) == self.rule.deep
        return min(found, key=lambda one: (one[0], -one[1] if last else one[1]), default=None)

    def allowed(self, stage: int, kind: int) -> bool:
        """Return whether memory and the rule let an action run."""
        state, rank = self.state, self.problem.rank_of[stage]
        if kind != F:
            return state.fits(stage, kind)
        forwards, inputs, _ = state.counts[stage]
        use = self.problem.uses[stage][F]
        need = max(use.peak, use.change + self.reserve[stage])
        return forwards - inputs < self.rule.most[stage] and state.held[rank] + need <= self.problem.room[rank]


def _later_bytes(problem: OrderProblem, stage: int) -> int:
    """Return the bytes that must stay free after a forward, or its rank could not go on.

    They are those of the microbatch in later stages of the rank, and those that an input or weight part takes.
    """
    stages = problem.of_rank[problem.rank_of[stage]]
    backward = max(0, *(problem.uses[s][kind].peak for s in stages for kind in (I, W)))
    return backward + sum(problem.uses[s][F].change for s in stages if s > stage)


TOLERANCE = 1e-9
"""The relative difference up to which two values are equal."""
_CLOSE = 1e-5
"""The relative distance from the best order to which windows approach it, and the share with which they begin."""
_RULE_ACTIONS = 400_000
"""The actions that list scheduling may schedule in all."""
_CELLS = 15_000_000
"""The work of windows, in states of a stage."""
_NODES = 12_000
"""The states that branching may visit."""
_BRANCHED = 100
"""The most actions of a step for which branching is tried."""
_DESCENT = 150_000
"""The actions that descent may time in all."""


@dataclass(frozen=True)
class FoundOrder:
    """An order and what is known about better ones.

    Attributes:
        timed: the order.
        bound: no order has a smaller value.
        how: what proves the bound: ``"work"``, ``"windows"`` or ``"branching"``.
    """

    timed: TimedRows
    bound: float
    how: str

    @property
    def optimal(self) -> bool:
        """Whether no order is better."""
        return self.timed.value <= self.bound + TOLERANCE * abs(self.bound)


def search_order(problem: OrderProblem, known: Iterable[Rows] = (), effort: float = 1.0) -> FoundOrder | None:
    """Return the best order that was found; ``None`` if memory holds no order.

    Args:
        problem: the problem.
        known: orders to start from; those that deadlock or take too much memory are passed over.
        effort: multiplies the work limits.
    """
    start = [found for rows in (rows_one_by_one(problem), *known) if (found := time_rows(problem, rows)) is not None]
    if not start:
        return None
    return _OrderSearch(problem, min(start, key=lambda timed: timed.value), effort).run()


def rows_one_by_one(problem: OrderProblem) -> Rows:
    """Return an order that takes one microbatch after the other, so that ranks hold as little as they can."""
    return [_least(problem, stages) * problem.microbatches for stages in problem.of_rank]


def _least(problem: OrderProblem, stages: tuple[int, ...]) -> Row:
    """Return the actions of one microbatch on a rank: weight parts at once or at the end, whichever takes less."""
    back = stages[::-1]
    at_once = [(s, kind) for s in back for kind in (I, W)]
    later = [(s, I) for s in back]
    rows = [[(s, F) for s in stages] + rest for rest in (at_once, later + [(s, W) for s in back])]
    return min(rows, key=lambda row: row_peak(problem, row))


def row_peak(problem: OrderProblem, row: Row) -> int:
    """Return the most bytes that the actions of a rank hold in this order."""
    held = most = 0
    for stage, kind in row:
        use = problem.uses[stage][kind]
        most = max(most, held + use.peak)
        held += use.change
    return most


class _OrderSearch:
    def __init__(self, problem: OrderProblem, start: TimedRows, effort: float) -> None:
        self.problem, self.best, self.effort = problem, start, effort
        self.bound, self.how = work_or_path_bound(problem), "work"
        self.actions = 3 * problem.stages * problem.microbatches
        self.limits: tuple[tuple[int, ...], ...] = ()

    def run(self) -> FoundOrder:
        """Run all methods in turn until the order is proven optimal."""
        for method in (self._by_rules, self._by_windows, self._by_branching, self._by_descent):
            if self._closed():
                break
            method()
        return FoundOrder(self.best, min(self.bound, self.best.value), self.how)

    def _closed(self) -> bool:
        return self.best.value <= self.bound + TOLERANCE * abs(self.bound)

    def _take(self, found: TimedRows | None) -> None:
        if found is not None and found.value < self.best.value:
            self.best = found

    def _by_rules(self) -> None:
        values: dict[tuple[int, ...], float] = {}
        for rule, _ in zip(
            list_rules(self.problem), range(max(8, int(self.effort * _RULE_ACTIONS) // self.actions)), strict=False
        ):
            found = ListScheduler(self.problem, rule).schedule()
            if found is not None:
                values[rule.most] = min(values.get(rule.most, found.value), found.value)
                self._take(found)
            if self._closed():
                return
        self.limits = tuple(sorted(values, key=values.__getitem__)[:3])

    def _by_windows(self) -> None:
        """Approach the best order from the bound: first just below it, as windows are often that tight."""
        left, share, last = self.effort * _CELLS, 0.0, self.problem.stages - 1
        chosen = {0, last // 2, last}  # windows of the others raised no bound of 29 problems
        cells = sum(window_cells(self.problem, stage) for stage in chosen)
        high = self.best.value * (1 - TOLERANCE)
        while left >= cells and high - self.bound > _CLOSE * abs(high):
            left -= cells
            value = high - share * (high - self.bound)
            windows = Windows.within(self.problem, value)
            if tighten(self.problem, windows, 1, chosen):
                for found in self._within(windows):
                    self._take(found)
                high, share = min(value, self.best.value * (1 - TOLERANCE)), min(0.5, 8 * share or _CLOSE)
            else:
                self.bound, self.how, share = value, "windows", 0.5
            if self._closed():
                return

    def _within(self, windows: Windows) -> Iterator[TimedRows]:
        for most, late, inputs_first in product(self.limits, (0.0, 0.25), (False, True)):
            found = DeadlineScheduler(self.problem, windows, DeadlineRule(most, late, inputs_first)).schedule()
            if found is not None:
                yield found

    def _by_branching(self) -> None:
        if self.actions > _BRANCHED:
            return
        value = self.best.value
        windows = Windows.within(self.problem, value)
        if not tighten(self.problem, windows):
            self.bound, self.how = value, "windows"
            return
        best, whole = branch(self.problem, windows, value, int(self.effort * _NODES))
        self._take(best)
        if whole:
            self.bound, self.how = self.best.value, "branching"

    def _by_descent(self) -> None:
        count = int(self.effort * _DESCENT) // self.actions
        self.best = improve_rows(self.problem, self.best, count, self.bound * (1 + TOLERANCE))


# Lower bounds on the value of every order, from sums of times and from the windows of single stages.
#
# * **Work**: a rank cannot start before its first message, and then has all its work to do.
# * **Path**: forwards and input parts of a stage run one after the other, the first once its message has come; after
#   the last input part the gradient goes back to each earlier stage, whose last weight part still follows.
# * **Window**: if the windows of a value contradict each other (`splitkit.solvers.exact_order`), no order has it.
#   Memory enters here: what a rank can have in flight decides how soon its input parts can follow its forwards.


def work_or_path_bound(problem: OrderProblem) -> float:
    """Return the larger of the work and the path bound."""
    ends = [first + work for first, work in zip(problem.first, problem.work, strict=True)]
    work = max(end + late for end, late in zip(ends, problem.late, strict=True))
    return max(work, *(_path(problem, stage) for stage in range(problem.stages)))


def _path(problem: OrderProblem, stage: int) -> float:
    seconds, travel = problem.seconds, problem.travel
    arrival = sum(seconds[s][F] + travel[s][F] for s in range(stage))
    after = range(stage + 1, problem.stages)
    there_and_back = sum(seconds[s][F] + seconds[s][I] + travel[s - 1][F] + travel[s][I] for s in after)
    own = seconds[stage]
    busy = problem.microbatches * (own[F] + own[I])
    # One microbatch alone goes on to the last stage and back; all of them keep this stage busy.
    end = arrival + max(busy, own[F] + there_and_back + own[I])
    found = 0.0
    for s in range(stage, -1, -1):
        if s < stage:
            end += travel[s + 1][I] + seconds[s][I]
        found = max(found, end + seconds[s][W] + problem.late[problem.rank_of[s]])
    return found


# Orders actions by list scheduling within windows: of the ready actions, that with the earliest deadline runs.
#
# A weight part runs only if it keeps no action of its rank from its latest start, or fills a gap whole.


@dataclass(frozen=True)
class DeadlineRule:
    """How a rank chooses within windows.

    Attributes:
        most: stage -> the most microbatches between forward and the end of the input part.
        late: how much of itself a weight part may keep others from their latest starts, from 0 to 1.
        inputs_first: whether a ready input part runs before a forward with an earlier deadline that can still be met.
    """

    most: tuple[int, ...]
    late: float
    inputs_first: bool


class DeadlineScheduler(ListScheduler):
    """Chooses within windows; the order need not keep within them."""

    def __init__(self, problem: OrderProblem, windows: Windows, rule: DeadlineRule) -> None:
        super().__init__(problem, ListRule(rule.most, 0.0, False))
        self.due = windows.forward_to.tolist(), windows.input_to.tolist()
        self.deadlines = rule

    def choice(self, rank: int) -> Choice | None:
        """Return the next action of a rank: of the actions that are ready, the one with the earliest deadline."""
        now, ready, known = self.state.free[rank], list[Choice](), list[Choice]()
        next_due = math.inf
        for stage in self.problem.of_rank[rank]:
            for kind in (I, F):
                latest = self._latest_start(stage, kind)
                next_due = min(next_due, latest)
                start = self.state.start(stage, kind)
                if start is not None and self.allowed(stage, kind):
                    (ready if start <= now else known).append((latest if start <= now else start, stage, kind))
        if ready:
            _, stage, kind = self._first_due(ready, now)
            return now, stage, kind
        soonest, weight = min(known, default=None), self.first(rank, W)
        if weight is None:
            return soonest
        seconds = self.problem.seconds[weight[1]][W]
        fills = soonest is not None and now + seconds <= soonest[0]
        return weight if fills or now + seconds <= next_due + self.deadlines.late * seconds else soonest

    def _first_due(self, ready: list[Choice], now: float) -> Choice:
        if self.deadlines.inputs_first:
            inputs = min((one for one in ready if one[2] == I), default=None)
            forward = min((one for one in ready if one[2] == F), default=None)
            if inputs and (forward is None or forward[0] >= now + self.problem.seconds[inputs[1]][I]):
                return inputs
        return min(ready)

    def _latest_start(self, stage: int, kind: int) -> float:
        """Return the latest start of the next action of a stage; infinity if there is none yet."""
        counts = self.state.counts[stage]
        number = counts[kind]
        if number == self.problem.microbatches or (kind == I and number == counts[F]):
            return math.inf
        due: float = self.due[kind][stage][number]
        return due - self.problem.seconds[stage][kind]


# Improves an order by moving actions of its critical path: neighbours change places, weight parts go to idle times.
#
# Only a move that touches the critical path can shorten it (as in job shops: Van Laarhoven, Aarts and Lenstra, 1992).


_Place = tuple[int, int]
"""A rank, and the place of an action in its row."""


def improve_rows(problem: OrderProblem, start: TimedRows, evaluations: int, enough: float) -> TimedRows:
    """Return the best order found by descent from one, which times as many orders at most.

    An order is taken if its value falls, or stays and the ends of all ranks fall in sum. Ends at a value of ``enough``.
    """
    best, tried = start, set[str]()
    while best.value > enough:
        for rows in _neighbours(problem, best):
            key = repr(rows)
            if key in tried:
                continue
            if len(tried) == evaluations:
                return best
            tried.add(key)
            found = time_rows(problem, rows)
            if found is not None and _rank_of_order(found) < _rank_of_order(best):
                best = found
                break
        else:
            return best
    return best


def _rank_of_order(timed: TimedRows) -> tuple[float, float]:
    return timed.value, sum(timed.ends)


def _neighbours(problem: OrderProblem, timed: TimedRows) -> Iterator[Rows]:
    """Yield the orders that one move away from the critical path makes."""
    rows, starts, path = timed.rows, timed.starts, _critical(problem, timed)
    for rank, place in path:
        row = rows[rank]
        if place and row[place - 1][0:2] != row[place]:
            yield _with(rows, rank, [*row[: place - 1], row[place], row[place - 1], *row[place + 1 :]])
    for rank, place in path:
        row = rows[rank]
        if row[place][1] == W:
            rest = [*row[:place], *row[place + 1 :]]
            for gap in _gaps(problem, row, starts[rank]):
                to = gap - (gap > place)
                if to != place:
                    yield _with(rows, rank, [*rest[:to], row[place], *rest[to:]])


def _with(rows: Rows, rank: int, row: Row) -> Rows:
    return [row if r == rank else other for r, other in enumerate(rows)]


def _gaps(problem: OrderProblem, row: Row, starts: list[float]) -> Iterator[int]:
    """Yield the places before which a rank waits, and the end."""
    end = 0.0
    for place, ((stage, kind), start) in enumerate(zip(row, starts, strict=True)):
        if place and start > end * (1 + 1e-12):
            yield place
        end = start + problem.seconds[stage][kind]
    yield len(row)


def _critical(problem: OrderProblem, timed: TimedRows) -> list[_Place]:
    """Return the places of a longest path, from its end to its start."""
    rows, starts = timed.rows, timed.starts
    ends = [
        starts[r][-1] + problem.seconds[row[-1][0]][row[-1][1]] + problem.late[r] if row else -1.0
        for r, row in enumerate(rows)
    ]
    makers = _makers(rows)
    rank = ends.index(max(ends))
    path = [(rank, len(rows[rank]) - 1)]
    while True:
        rank, place = path[-1]
        start = starts[rank][place]
        if place:
            stage, kind = rows[rank][place - 1]
            if starts[rank][place - 1] + problem.seconds[stage][kind] >= start * (1 - 1e-12):
                path.append((rank, place - 1))
                continue
        if (maker := makers.get((rank, place))) is None:
            return path
        path.append(maker)


def _makers(rows: Rows) -> dict[_Place, _Place | None]:
    """Return for each action the one whose message it waits for, ``None`` if there is none."""
    places: dict[tuple[int, int, int], _Place] = {}
    for rank, row in enumerate(rows):
        counts = Counter[tuple[int, int]]()
        for place, action in enumerate(row):
            places[(*action, counts[action])] = rank, place
            counts[action] += 1
    return {
        here: places.get((stage - 1 if kind == F else stage + 1, kind, number))
        for (stage, kind, number), here in places.items()
        if kind != W
    }
