"""``Budget`` against exact models of small training steps: ``--json`` for machines.

plans     every plan that splitkit can emit, each simulated: the least recompute within a budget, and the lowest peak
          (blocks with at most ``--plans`` of them)
schedule  a mixed-integer program after Checkmate (Jain et al., MLSys 2020): before each step of backward any op may be
          computed again, in any schedule, ``--times`` times at most; HiGHS with a time limit, so with a bound

Budgets lie between the lowest peak that `Budget` found and that of saving everything. "of exact" is Budget's recompute
time divided by the exact model's; where HiGHS stopped early, "proven" is less than what it found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array, csr_array
from small_nets import loss_or_sum
from smallblocks import BLOCKS

import splitkit as sk
from splitkit.costs import Costs
from splitkit.frontends.joint_capture import Joint
from splitkit.policies import SaveAll
from splitkit.search.recompute.memory_limits import MomentLimits
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.training.choices import Savings, savings
from splitkit.training.flow import STATIC
from splitkit.training.peaks import Peaks

Bools = NDArray[np.bool_]
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Block:
    """A captured block.

    Attributes:
        joint: its training step.
        costs: prices of its nodes.
        problem: its choices.
        peaks: simulates them.
    """

    joint: Joint
    costs: Costs
    problem: Savings
    peaks: Peaks

    @classmethod
    def of(cls, name: str) -> Block:
        """Capture a block by its name."""
        torch.manual_seed(0)
        net, inputs = BLOCKS[name]()
        joint = sk.capture_joint(net, *inputs, loss=loss_or_sum)
        costs = sk.costs.roofline(joint.graph_module)
        return cls(joint, costs, savings(joint.flow, costs), Peaks(joint.flow))

    @property
    def free(self) -> Bools:
        """(n,): the ops that may be saved or computed again."""
        free = np.zeros(len(self.problem.ops), np.bool_)
        free[self.problem.maker[self.problem.savable]] = True
        return free & ~self.problem.fixed


def every_plan(problem: Savings, most: int) -> list[Bools] | None:
    """What runs in backward, of every choice; ``None`` if there are more than ``most``.

    Readers come after what they read, so that from the last op to the first it is known which are needed.
    """
    needed = np.zeros(len(problem.ops), np.bool_)
    needed[problem.maker[problem.needed]] = True
    savable = np.zeros(len(problem.ops), np.bool_)
    savable[problem.maker[problem.savable]] = True
    found: list[Bools] = []
    stack = [(len(problem.ops) - 1, needed, np.zeros(len(problem.ops), np.bool_))]
    while stack:
        op, wanted, runs = stack.pop()
        while op >= 0 and (not wanted[op] or problem.fixed[op]):
            op -= 1
        if op < 0:
            found.append(runs)
            if len(found) > most:
                return None
            continue
        more, again = wanted.copy(), runs.copy()
        again[op] = True
        more[problem.maker[list(problem.read_by[op])]] = True
        stack.append((op - 1, more, again))
        if savable[op]:
            stack.append((op - 1, wanted, runs))
    return found


class Schedule:
    """The program over schedules of backward: what runs again before each of its own steps, what is there when.

    ``runs[t, o]`` is binary; ``there[k]`` is a chain of variables from 0 to 1, one after each event of storage k in a
    stage: it is made there, or read, or it was there before. Reads need it; what is there while a step runs counts.
    Forward, and backward's own steps, run in the order of the graph.
    """

    def __init__(self, problem: Savings, peaks: Peaks, times: int) -> None:
        self.problem, self.peaks, self.moments = problem, peaks, MomentLimits(problem, peaks)
        self._cost: list[float] = []
        self._whole: list[int] = []
        self._rows: list[tuple[list[int], list[float], float]] = []  # sum of coefficients <= most
        self._memory: list[tuple[list[int], list[float], float]] = []  # the same and the peak, on the right
        self._saved = [self._new(0.0) for _ in problem.nbytes]
        self._forward()
        self._backward(times)

    def _new(self, cost: float, whole: bool = False) -> int:
        self._cost.append(cost)
        self._whole.append(int(whole))
        return len(self._cost) - 1

    def _at_most(self, plus: list[int], minus: list[int], most: float = 0.0) -> None:
        self._rows.append(([*plus, *minus], [1.0] * len(plus) + [-1.0] * len(minus), most))

    def _forward(self) -> None:
        """Forward in graph order: what is saved stays to its end."""
        problem, peaks = self.problem, self.peaks
        trace = peaks.trace(problem.choose(np.ones(len(problem.ops), np.bool_)).plan())
        early, born = trace.forward, trace.born
        left = np.searchsorted(trace.steps[:early], self.moments.at[self.moments.base])
        for slot, b, last in zip(trace.slot, trace.born, trace.left, strict=True):
            if b < early and (k := self.moments.storage[slot]) != STATIC:
                left[k] = last
        ready = self._ready(left)
        left = np.where(problem.late[self.moments.base], ready[self.moments.base], left)
        self._held = trace.baseline + int(trace.nbytes[(born < early) & (trace.left >= len(trace.steps))].sum())
        self._free = left >= len(trace.steps)  # an output of forward: the caller holds it anyway
        for step in range(early):
            alive = (born <= step) & (np.where(trace.left >= early, early, trace.left) >= step) & (born < early)
            fixed = trace.baseline + int(trace.nbytes[alive].sum()) + int(peaks.transient[trace.steps[step]])
            later = np.flatnonzero(left < step)
            self._memory.append(([self._saved[k] for k in later], [float(problem.nbytes[k]) for k in later], -fixed))

    def _ready(self, left: NDArray[np.int64]) -> NDArray[np.int64]:
        """Op that only backward needs -> the step of forward behind which it may stand, of its inputs' makers."""
        problem = self.problem
        made = {int(op): int(left[k]) for k, op in enumerate(self.moments.base) if op >= 0 and not problem.late[op]}
        ready = np.full(len(problem.ops), -1)
        for op in range(len(problem.ops)):
            makers = (int(problem.maker[v]) for v in problem.read_by[op])
            ready[op] = max(
                (made.get(m, int(ready[m])) if not problem.late[m] else int(ready[m]) for m in makers), default=-1
            )
        return ready

    def _backward(self, times: int) -> None:
        problem, peaks, moments = self.problem, self.peaks, self.moments
        trace = peaks.trace(problem.choose(np.zeros(len(problem.ops), np.bool_)).plan())
        own = sorted(moments.own.intersection(trace.steps.tolist()))
        slot, born, dies = peaks.alone(own)
        nbytes = np.array(peaks.nbytes)[slot]
        touched = [self._storages(peaks.touched[i]) for i in own]
        makes, reads = self._ops()
        price = problem.price
        count: list[list[int]] = [[] for _ in problem.ops]
        there = list(self._saved)
        weight = np.where(self._free, 0, problem.nbytes).astype(float)
        last = self._last_use(touched, makes, reads)
        for t, node in enumerate(own):
            before = self._held + int(nbytes[(born < t) & (dies >= t)].sum())
            for op in range(len(problem.ops)):
                if np.isinf(price[op]) or not makes[op] or last[op] < t:
                    continue
                runs = self._new(float(price[op]), whole=True)
                count[op].append(runs)
                for k in reads[op]:
                    self._at_most([runs], [there[k]])
                more = sum(weight[k] for k in makes[op]) + self._beside(op)
                self._memory.append(([*there, runs], [*weight, more], -before))
                for k in {*makes[op], *reads[op]}:
                    after = self._new(0.0)
                    self._at_most([after], [there[k], *([runs] if k in makes[op] else [])])
                    there[k] = after
            for k in touched[t]:
                self._rows.append(([there[k]], [-1.0], -1.0))
            now = self._held + int(nbytes[(born <= t) & (dies >= t)].sum()) + int(peaks.transient[node])
            self._memory.append((list(there), list(weight), -now))
            for k in touched[t]:
                after = self._new(0.0)
                self._at_most([after], [there[k]])
                there[k] = after
        for runs in count:
            if runs:
                self._at_most(runs, [], float(times))

    def _storages(self, slots: tuple[int, ...]) -> list[int]:
        """The storages of `Savings` that slots lie in."""
        root = self.peaks.storages.root
        known = (int(self.moments.storage[root[slot]]) for slot in slots if root[slot] != STATIC)
        return list(dict.fromkeys(k for k in known if k != STATIC))

    def _ops(self) -> tuple[list[list[int]], list[list[int]]]:
        """Op -> the storages that it makes, and those that it reads; views make none."""
        makes: list[list[int]] = [[] for _ in self.problem.ops]
        for k, op in enumerate(self.moments.base.tolist()):
            if op >= 0:
                makes[op].append(k)
        owner = self.problem.storage
        return makes, [list(dict.fromkeys(int(owner[v]) for v in reads)) for reads in self.problem.read_by]

    def _beside(self, op: int) -> float:
        """Bytes that an op takes while it runs: transient ones, and results that backward never reads."""
        index, peaks = self.problem.flow.index, self.peaks
        node = index[self.problem.ops[op]]
        storages = peaks.storages
        unread = [s for s in storages.made[node] if storages.source[s] == s and self.moments.storage[s] == STATIC]
        return float(peaks.transient[node] + sum(peaks.nbytes[s] for s in unread))

    def _last_use(self, touched: list[list[int]], makes: list[list[int]], reads: list[list[int]]) -> list[int]:
        """Op -> the last of backward's own steps that it can serve."""
        last = [-1] * len(self.problem.nbytes)
        for t, storages in enumerate(touched):
            for k in storages:
                last[k] = t
        found = [-1] * len(makes)
        for op in range(len(makes) - 1, -1, -1):
            found[op] = max((last[k] for k in makes[op]), default=-1)
            for k in reads[op]:
                last[k] = max(last[k], found[op])
        return found

    def solve(self, budget: int | None, seconds: float) -> tuple[float, float]:
        """The least seconds within a budget, found and proven; without one, the lowest peak in bytes.

        Both infinite if there is no schedule.
        """
        size = len(self._cost)
        rows = [*self._rows]
        unit = 1e6
        for variables, weights, most in self._memory:
            scaled = [w / unit for w in weights]
            if budget is None:
                rows.append(([*variables, size], [*scaled, -1.0], most / unit))
            else:
                rows.append((variables, scaled, (budget + most) / unit))
        cost = np.array([*(np.array(self._cost) if budget is not None else np.zeros(size)), float(budget is None)])
        scale = float(cost[:size].max(initial=0.0)) or 1.0 if budget is not None else 1.0
        numbers = np.repeat(np.arange(len(rows)), [len(r[0]) for r in rows])
        columns = np.concatenate([np.array(r[0], int) for r in rows])
        matrix = coo_array((np.concatenate([r[1] for r in rows]), (numbers, columns)), shape=(len(rows), size + 1))
        result = milp(
            cost / scale,
            integrality=np.array([*self._whole, 0]),
            bounds=Bounds(0.0, np.array([*np.ones(size), np.inf])),
            constraints=LinearConstraint(csr_array(matrix), -np.inf, np.array([r[2] for r in rows])),
            options={"time_limit": seconds, "mip_rel_gap": 1e-4},
        )
        if result.status == 2:
            return float("inf"), float("inf")
        back = scale if budget is not None else unit
        bound = result.mip_dual_bound if result.mip_dual_bound is not None else 0.0
        return (float(result.fun) if result.x is not None else float("inf")) * back, max(0.0, float(bound)) * back


def budgets_of(block: Block) -> tuple[Seen, list[int]]:
    """The plan with the lowest peak, and budgets from there to the peak of saving everything."""
    seen = Pool(block.problem, block.peaks)
    whole = seen.see_plan(SaveAll().assign(block.joint.flow, block.costs))
    low = RecomputeSearch(seen).lowest_peak()
    return low, [low.peak, *(int(low.peak + share * (whole.peak - low.peak)) for share in SHARES)]


def found(block: Block, budget: int) -> Seen:
    """What `Budget` finds."""
    plan = sk.policies.Budget(budget).assign(block.joint.flow, block.costs)
    return Pool(block.problem, block.peaks).see_plan(plan)


def rows_of(name: str, most: int, seconds: float, times: int) -> Iterator[dict[str, Any]]:
    """One row for each budget; the first is the lowest peak that was found."""
    block = Block.of(name)
    low, budgets = budgets_of(block)
    masks = every_plan(block.problem, most)
    plans = None if masks is None else [Pool(block.problem, block.peaks).see(runs) for runs in masks]
    schedule = Schedule(block.problem, block.peaks, times) if seconds else None
    lowest = {
        "found": low.peak,
        "plans": min(p.peak for p in plans) if plans else None,
        "schedule": schedule.solve(None, seconds) if schedule else None,
    }
    for budget in budgets:
        start = time.perf_counter()
        best = found(block, budget)
        took = time.perf_counter() - start
        yield {
            "block": name, "ops": int(block.free.sum()), "nodes": len(block.peaks.nodes), "budget": budget,
            "count": None if plans is None else len(plans), "lowest": lowest, "budget seconds": best.seconds,
            "planned in": took,
            "plans": min(p.seconds for p in plans if p.peak <= budget) if plans else None,
            "schedule": schedule.solve(budget, seconds) if schedule else None,
        }  # fmt: skip


def ratio(ours: float, exact: float) -> float:
    """How many times as much; 1 where both are nothing."""
    return 1.0 if ours <= exact * (1 + 1e-3) else ours / exact if exact else float("inf")


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How often `Budget` equals the exact models, and how far off it is where it does not."""
    found: dict[str, Any] = {"rows": len(rows), "torch": torch.__version__}
    for oracle in ("plans", "schedule"):
        known = [r for r in rows if r[oracle] is not None]
        exact = [r[oracle] if oracle == "plans" else r[oracle][1] for r in known]
        ratios = [ratio(r["budget seconds"], e) for r, e in zip(known, exact, strict=True)]
        finite = [r for r in ratios if np.isfinite(r)]
        found[oracle] = {
            "rows": len(known), "equal": sum(r == 1.0 for r in ratios),
            "median": statistics.median(finite) if finite else None, "worst": max(finite, default=None),
            "infinite": len(ratios) - len(finite),
        }  # fmt: skip
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """A table."""
    table = Table(
        "block", "ops", "plans", "budget, kB", "Budget, us", "best plan", "of it", "schedule: found", "proven"
    )
    table.add_column("of proven")
    table.add_column("lowest peak, kB: Budget / plans / schedule (proven)")
    for r in rows:
        best, schedule, low = r["plans"], r["schedule"], r["lowest"]
        floor = "-" if low["schedule"] is None else "{:.1f} ({:.1f})".format(*(x / 1e3 for x in low["schedule"]))
        table.add_row(
            r["block"], str(r["ops"]), str(r["count"]), f"{r['budget'] / 1e3:.1f}", f"{1e6 * r['budget seconds']:.3f}",
            "-" if best is None else f"{1e6 * best:.3f}",
            "-" if best is None else f"{ratio(r['budget seconds'], best):.3f}",
            "-" if schedule is None else f"{1e6 * schedule[0]:.3f}",
            "-" if schedule is None else f"{1e6 * schedule[1]:.3f}",
            "-" if schedule is None else f"{ratio(r['budget seconds'], schedule[1]):.3f}",
            f"{low['found'] / 1e3:.1f} / {'-' if low['plans'] is None else round(low['plans'] / 1e3, 1)} / {floor}",
        )  # fmt: skip
    Console(width=190).print(table)


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--blocks", nargs="*", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument("--plans", type=int, default=20000, help="enumerate up to so many plans")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each program; 0: none")
    parser.add_argument("--times", type=int, default=1, help="how often an op may be computed again")
    args = parser.parse_args()
    rows = [row for name in args.blocks for row in rows_of(name, args.plans, args.seconds, args.times)]
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary_of(rows)}))
    else:
        show(rows)
        print(summary_of(rows))


if __name__ == "__main__":
    main()
