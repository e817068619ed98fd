"""Plans that recompute and offload, with a note and a claim, or the refusal that says what would fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil, inf

import numpy as np

from splitkit.costs import Costs, unit_of
from splitkit.costs.links import HostLink, require_seconds
from splitkit.errors import NoPlanError
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.search.recompute.memory_limits import MemoryFloors, MomentLimits, alive, furthest
from splitkit.search.recompute.offload_search import OffloadPlan, OffloadSearch
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch, Snapshots, recompute_problem
from splitkit.solvers.recompute import Limit, Program
from splitkit.training.choices import Bools, Floats, Ints, savings
from splitkit.training.flow import BACKWARD, FORWARD, STATIC, JointFlow
from splitkit.training.offload_timeline import OffloadModel, OffloadRun
from splitkit.training.peaks import Peaks, eager_plan
from splitkit.units import duration, size

OBJECTIVE = "recompute and waiting"


class OffloadPlanner:
    """Plans one joint graph.

    Attributes:
        search: the search.
        model: makes timelines.
        host: bytes of the host.

    Raises:
        PolicyError: SK302 if the prices are not seconds.
    """

    def __init__(self, search: RecomputeSearch, costs: Costs, link: HostLink, host: float = inf) -> None:
        require_seconds(costs)
        model = OffloadModel(search.pool.savings, search.pool.peaks, costs, link)
        self.model, self.host = model, host
        self.search = OffloadSearch(search, model, host)

    def plan(self, found: OffloadPlan, budget: int) -> Plan:
        """Return the plan of what was found, with the transfers, a note and a claim."""
        bound = OffloadBound(self.model, self.search.pool, budget, self.host).seconds(found.seconds)
        early, late = found.run.waits
        limiting = FORWARD if early > late + found.seen.seconds else BACKWARD
        claim = Claim(OBJECTIVE, found.seconds, bound, f"{self.search.tried} timelines; HiGHS", limiting)
        moved = len(found.run.transfers)
        host = f", {size(found.run.host)} of it on the host in {moved} value{'s' * (moved > 1)}" if moved else ""
        note = (
            f"The peak is {self.model.peaks.told(found.run.trace)} (within {size(budget)}). Forward saves "
            f"{size(found.seen.saved)}{host}. Backward recomputes for {duration(found.seen.seconds)}, and the step "
            f"waits {duration(found.run.exposed)} for copies"
        )
        if found.seconds:
            proven = f"less than {duration(bound)} for both, which is {claim.gap:.2%} less" if claim.gap else "less"
            note += f". No plan in graph order takes {proven}"
        return replace(self.described(found, note), claim=claim)

    def infeasible(self, budget: int, how: str) -> NoPlanError:
        """Return the refusal of a budget, with the lowest peak that was found.

        Args:
            budget: bytes.
            how: the arguments of the policy besides the budget, as a user writes them.
        """
        lowest = self.search.lowest()
        peak = lowest.run.peak
        error = NoPlanError(
            "SK303",
            f"no plan was found whose peak is within {size(budget)} ({budget} bytes): the smallest is {size(peak)}, "
            f"with {size(lowest.run.host)} on the host",
            f"Budget({peak}, {how}) takes that plan or a better one; a smaller batch or shorter sequence needs less.",
        )
        about = f"more than {size(budget)}, but the least found"
        told = self.model.peaks.told(lowest.run.trace)
        note = f"The peak is {told} ({about}); {size(lowest.run.host)} wait on the host"
        error.nearest, error.excess = self.described(lowest, note), peak - budget
        return error

    def described(self, found: OffloadPlan, note: str) -> Plan:
        """Return the plan of what was found with a note, without a claim."""
        moved = found.timeline.described(self.search.pool.peaks.nodes, found.run.transfers)
        return replace(found.seen.choice.plan(note), offloaded=moved)


def offload_run(pool: Pool, plan: Plan, costs: Costs) -> OffloadRun | None:
    """Return the step of a plan of forward and backward whose values wait on the host, without its recompute.

    It is ``None`` if none do, if the plan does not know the link, and for prices that are not seconds.
    """
    link = plan.request.offload
    if not plan.offloaded or link is None or unit_of(costs) != "s":
        return None
    seen, trace = pool.trace(np.array([BACKWARD in plan.get(op, ()) for op in pool.savings.ops], np.bool_))
    timeline = OffloadModel(pool.savings, pool.peaks, costs, HostLink.of_data(link)).timeline(seen.choice, trace)
    return timeline.run(timeline.transfers_of(pool.peaks.nodes, plan.offloaded))


# A lower bound on recompute and waiting within a budget, where saved values may wait on the host.
#
# Suppose a plan recomputes and waits for ``z`` seconds in all. What is saved is on the device at a moment t, but for
# what the link has carried away since it was made, or will carry back until it is read::
#
#     forward,  each s < t    saved bytes made at s or later          <=  room at t + out * (time from s to t + z)
#     backward, each u > t    saved bytes first read at u or earlier  <=  room at t + back * (time from t to u + z)
#
# These are linear limits on what is saved, and so are the snapshots of `Budget` with the same room. The least
# recompute under them, r(z), comes from the relaxed program of `Budget`. It falls as z grows, so a z below r(z) is
# less than any plan takes; the largest such z is found by bisection. The limits do not ask which values are moved, as
# if all were. The minimum cut is whole without limits, so without snapshots this bound is that of the best Lagrange
# multipliers (Geoffrion 1974): those of memory weigh a storage by its bytes, those of the link by what it carries.
#
# The limits hold for plans that recompute a value at most once and whose halves run their own nodes in the order of the
# graph, as those of `MemoryFloors`.


_CLOSE = 2e-3  # of the value
_ROUNDS = 40  # relaxations for one z
_SNAPSHOTS = 3  # rounds that add snapshots
_STARTS = 12  # times from which, and to which, the link is looked at
_AT_ONCE = 6  # limits that one relaxation adds
_APART = 50  # of as many parts of the step, each adds one limit at most
_FASTEST = 1e30  # bytes a second; times 0 seconds this is 0, as infinity is not


@dataclass(frozen=True, eq=False)
class _Row:
    """``nbytes @ saved <= room + what the link carries``: the least of ``rate * (window + z)``, and the host's room."""

    nbytes: Ints
    room: int
    windows: tuple[tuple[float, float], ...]
    host: float

    def limit(self, ops: int, z: float) -> Limit:
        carried = min(self.host, *(rate * (window + z) for rate, window in self.windows), 2.0**60)
        return Limit(np.zeros(ops, np.int64), self.nbytes, self.room + ceil(carried))


class OffloadBound:
    """Lower bounds for the plans of one joint graph within one budget.

    Args:
        model: the timelines.
        pool: simulates choices.
        budget: bytes on the device.
        host: bytes on the host.
    """

    def __init__(self, model: OffloadModel, pool: Pool, budget: int, host: float = inf) -> None:
        self.savings, self.pool, self.budget, self.host = model.savings, pool, budget, host
        self._out, self._back = (min(link.bandwidth, _FASTEST) for link in (model.link.out, model.link.back))
        moments = MomentLimits(model.savings, model.peaks)
        self._floors = floors = MemoryFloors(moments)
        self._snapshots, self._problem = Snapshots(moments, floors), recompute_problem(model.savings)
        self._clock = np.concatenate([[0.0], np.cumsum(np.array(model.seconds)[floors.steps])])
        # Slack in seconds that recomputing may add between two moments, beyond its price.
        real = np.array([model.seconds[model.savings.flow.index[op]] for op in model.savings.ops])
        price = np.where(np.isfinite(model.savings.price), model.savings.price, real)
        self._spare = float(np.maximum(real - price, 0.0).sum())
        self._early = np.arange(len(floors.steps)) < floors.early
        self._rates = np.where(self._early, self._out, self._back)
        self._rows: list[_Row] = []
        self._moments: list[int] = []

    def seconds(self, value: float) -> float:
        """Return a lower bound on recompute and waiting of every plan, at most ``value``, which some plan takes."""
        low = 0.0
        for round_ in range(_SNAPSHOTS + 1):
            if not value or self._exceeds(value * (1 - _CLOSE)):
                return value * (1 - _CLOSE) if value else 0.0
            low = self._bisected(low, value)
            if low >= value * (1 - 2 * _CLOSE) or round_ == _SNAPSHOTS or not self._looked_closer(low):
                break
        return low

    def _bisected(self, low: float, high: float) -> float:
        close = _CLOSE * high
        while high - low > close:
            middle = (low + high) / 2
            low, high = (middle, high) if self._exceeds(middle) else (low, middle)
        return low

    def _exceeds(self, z: float) -> bool:
        """Return whether every plan takes more than ``z``; add the limits that show it."""
        program = self._program(z)
        for _ in range(_ROUNDS):
            saved, recompute = program.relaxed(self._limits(z))
            if recompute > z:
                return True
            broken = list(self._over(saved, z))
            self._rows += broken
            if not broken:
                break
        return False

    def _program(self, z: float) -> Program:
        room = {moment: self.budget + ceil(min(self._carried(moment, z), 2.0**60)) for moment in self._moments}
        return Program(self._problem, [self._snapshots.at(moment, room[moment]) for moment in self._moments])

    def _limits(self, z: float) -> list[Limit]:
        return [row.limit(len(self.savings.ops), z) for row in self._rows]

    def _looked_closer(self, z: float) -> bool:
        """Add snapshots where the relaxed choice is over the budget; return whether there are any."""
        saved, _ = self._program(z).relaxed(self._limits(z))
        runs = np.ones(len(self.savings.ops), np.bool_)
        runs[self.savings.maker[saved[self.savings.storage] > 0.5]] = False
        _, trace = self.pool.trace(runs)
        moments = self._snapshots.moment_of_steps(trace).tolist()
        carried = [0 if moment == STATIC else ceil(min(self._carried(moment, z), 2.0**60)) for moment in moments]
        reduced = replace(trace, timeline=trace.timeline - np.array(carried, np.int64))
        fresh = list(self._snapshots.over(reduced, self.budget, self._moments))
        self._moments += fresh
        return bool(fresh)

    def _carried(self, moment: int, z: float) -> float:
        """Return the most bytes that are on the host at a moment."""
        return min(self.host, *(rate * (window + z) for rate, window in self._ways(moment)))

    def _ways(self, moment: int) -> tuple[tuple[float, float], ...]:
        """Return (rate, seconds) of the copies to the host before a moment, and of those back after it."""
        forward, end = float(self._clock[self._floors.early]), float(self._clock[-1])
        before, after = float(self._clock[moment]), float(self._clock[moment + 1])
        out, back = min(before, forward), end - max(after, forward)
        return (self._out, out + self._spare), (self._back, back + self._spare)

    def _over(self, saved: Floats, z: float) -> Iterator[_Row]:
        """Yield the limits that this choice exceeds the most; ``saved``: (k,), the fraction of each storage."""
        floors = self._floors
        # a little less than the fractions that HiGHS gives, which are right to 1e-6
        taken = np.floor(saved * (1 - 1e-6) * self.savings.nbytes).astype(np.int64)
        room = self.budget - floors.least
        best, which = np.zeros(len(room)), np.full(len(room), -1)
        most, windows = np.array([self._carried(m, z) for m in range(len(room))]), list(self._windows())
        for number, (some, seconds) in enumerate(windows):
            there = alive(len(room), floors.since[some], floors.until[some], taken[some])
            over = there - room - np.minimum(self._rates * (seconds + z), most)
            better = (over > best) & np.isfinite(seconds)
            best[better], which[better] = over[better], number
        yield from self._between(taken, z)
        for moment in islice(furthest(best, _APART, above=1.0), _AT_ONCE):  # a limit is rounded up to a byte
            some, seconds = windows[which[moment]]
            at = some & (floors.since <= moment) & (moment <= floors.until)
            ways = ((float(self._rates[moment]), float(seconds[moment])), *self._ways(moment))
            yield _Row(np.where(at, self.savings.nbytes, 0), int(room[moment]), ways, self.host)

    def _windows(self) -> Iterator[tuple[Bools, Floats]]:
        """Yield which storages a limit is about, and for each moment the seconds that the link has for them.

        The seconds are infinite at moments of the other half.
        """
        floors, start, end = self._floors, self._clock[:-1], self._clock[1:]
        for since in self._makers():
            made = self._clock[since + 1]  # 0 for -1: what forward may make at any time
            yield floors.made >= since, np.where(self._early, np.maximum(start - made, 0.0) + self._spare, inf)
        for read in _spread(np.minimum(floors.first, len(start) - 1)):
            seconds = np.maximum(start[read] - end, 0.0) + self._spare
            yield floors.first <= read, np.where(self._early, inf, seconds)

    def _makers(self) -> list[int]:
        return _spread(np.append(self._floors.made, -1))

    def _between(self, taken: Ints, z: float) -> Iterator[_Row]:
        """Yield the limit on what is saved when forward has ended, if the choice exceeds one."""
        floors, (_, back) = self._floors, self._ways(self._floors.early - 1)
        for since in self._makers():
            out = self._out, float(self._clock[floors.early] - self._clock[since + 1]) + self._spare
            some = np.where(floors.made >= since, floors.handed, 0)
            row = _Row(some, self.budget - floors.between, (out, back), self.host)
            if int(taken[some > 0].sum()) > row.limit(0, z).most + 1:
                yield row
                return


def _spread(moments: Iterable[int]) -> list[int]:
    """Return a few of some moments, from the first to the last."""
    known = np.unique(np.array(moments))
    return [int(m) for m in known[np.unique(np.linspace(0, len(known) - 1, _STARTS).astype(np.int64))]]


# The best trade-offs between the true peak and recompute plus waiting, where saved values may wait on the host.
#
# The points of `PeakFrontier` are candidates, so no point is above the frontier without offload.


@dataclass(frozen=True, eq=False)
class OffloadFrontier:
    """The plans of a joint graph that no other plan seen beats in both peak and time.

    Attributes:
        peaks: the frontier without offload; its budgets are how many are searched here, too.
        costs: the prices in seconds.
        link: the link to the host.
        host: bytes of the host.
    """

    peaks: PeakFrontier
    costs: Costs
    link: HostLink
    host: float

    @cached_property
    def planner(self) -> OffloadPlanner:
        """Searches for plans, and describes them; SK302 if the prices are not seconds."""
        return OffloadPlanner(self.peaks.search, self.costs, self.link, self.host)

    @cached_property
    def plans(self) -> tuple[OffloadPlan, ...]:
        """The plans by rising peak and falling time."""
        planner = self.planner
        found = [planner.search.kept(seen) for seen in self.peaks.plans]
        whole = self.peaks.search.pool.see_plan(eager_plan(self.peaks.flow))
        lowest = planner.search.lowest()
        found.append(lowest)
        low, count = lowest.run.peak, self.peaks.budgets
        for number in range(count):
            better = planner.search.best(low + (whole.peak - low) * number // count, whole)
            found += [] if better is None else [better]
        front: list[OffloadPlan] = []
        for plan in sorted(found, key=lambda plan: (plan.run.peak, plan.seconds, plan.run.host)):
            if not front or plan.seconds < front[-1].seconds:
                front.append(plan)
        return tuple(front)

    def bound(self, nbytes: int) -> float:
        """Return a lower bound on recompute and waiting of plans in graph order whose peak is at most ``nbytes``."""
        within = (plan.seconds for plan in reversed(self.plans) if plan.run.peak <= nbytes)
        most = next(within, 2 * max(plan.seconds for plan in self.plans))
        return OffloadBound(self.planner.model, self.peaks.search.pool, nbytes, self.host).seconds(most)


# The Pareto frontier of true peak and recompute time, from searches for several budgets.


@dataclass(frozen=True, eq=False)
class PeakFrontier:
    """The plans of a joint graph that no other plan seen beats in both peak and time.

    Attributes:
        flow: facts about the graph.
        costs: the price of running a node again.
        budgets: how many budgets are searched, evenly spaced between the lowest peak and that of eager mode.
    """

    flow: JointFlow
    costs: Costs
    budgets: int

    @cached_property
    def search(self) -> RecomputeSearch:
        """The search, with all plans that it has seen."""
        return RecomputeSearch(Pool(savings(self.flow, self.costs), Peaks(self.flow)))

    @cached_property
    def plans(self) -> tuple[Seen, ...]:
        """The plans by rising peak and falling time."""
        search = self.search
        whole = search.pool.see_plan(eager_plan(self.flow))
        lowest = search.lowest_peak()
        search.cheapest_at(lowest)
        for number in range(1, self.budgets):
            search.peak(lowest.peak + (whole.peak - lowest.peak) * number // self.budgets)
        front: list[Seen] = []
        for seen in sorted(search.pool, key=lambda seen: (seen.peak, seen.seconds, seen.saved)):
            if not front or seen.seconds < front[-1].seconds:
                front.append(seen)
        return tuple(front)

    def bound(self, nbytes: int) -> float:
        """Return a lower bound on the seconds of plans in graph order whose peak is at most ``nbytes``."""
        return self.search.bound(nbytes)
