"""Which bytes are alive at one moment of a run, as limits on what is saved and what is computed again.

When a value is freed depends on the plan, so a limit that is exact for one plan is an estimate for its neighbours
(`MomentLimits.limits`). Where it does not depend on it, a limit holds for every plan whose peak is low enough
(`MemoryFloors`).

Why an estimate: a limit says which storages are there at one step if they are saved or made again, and what they are
read by decides until when. Compute a reader again, and its input lives longer; save it instead, and the input dies
sooner. A program that knew that would need a variable for each storage and step, as that of Checkmate (Jain et al.,
MLSys 2020), which grows with the square of the graph. Here the spans are those of the run at hand, and the next run
corrects them: cuts that are added until a solution breaks none (Kelley 1960), but without its promise, as these may cut
off good plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from torch.fx import Node

from splitkit.solvers.recompute import Limit
from splitkit.training.choices import Bools, Choice, Floats, Savings
from splitkit.training.flow import BACKWARD, STATIC, save_all_plan
from splitkit.training.peaks import Ints, Peaks, PeakTrace

_AT_ONCE = 6  # limits that one simulation adds
_APART = 50  # of as many parts of the run, each adds one limit at most


class MomentLimits:
    """Limits for one joint graph, with everything that does not depend on the plan.

    Attributes:
        savings: the choices.
        peaks: simulates them.
        storage: storage by its root -> its number in `Savings`; `STATIC` for storages that backward never reads.
        base: storage of `Savings` -> the op that makes it.
        own: nodes that only backward can run, by position in the graph.
    """

    def __init__(self, savings: Savings, peaks: Peaks) -> None:
        self.savings, self.peaks = savings, peaks
        index, flow = savings.flow.index, savings.flow
        self.at = np.array([index[n] for n in savings.ops], dtype=np.int64)
        self.base = np.full(len(savings.nbytes), -1, dtype=np.int64)
        self.storage = np.full(len(flow.storages.source), STATIC, dtype=np.int64)
        self.values_of: list[list[int]] = [[] for _ in savings.ops]
        self.readers: list[list[int]] = [[] for _ in savings.values]
        for v, (op, k) in enumerate(zip(savings.maker.tolist(), savings.storage.tolist(), strict=True)):
            self.values_of[op].append(v)
            for root in flow.storages.under(savings.values[v]):
                self.storage[root] = k
                if (
                    flow.storages.maker[root] == index[savings.ops[op]]
                ):  # of a member of a tuple, the tuple has the root
                    self.base[k] = op
        for op, v in savings.reads.tolist():
            self.readers[v].append(op)
        known, home = set(savings.ops), save_all_plan(flow)
        makers = {n: flow.producer(n) for n in flow.scope}
        self.own = {index[n] for n, maker in makers.items() if home.home(maker) == BACKWARD and maker not in known}
        taken = {n: [len(index)] for n in flow.gradients if isinstance(n, Node)}
        self.own_readers = [
            [index[user] for user in v.users if index[user] in self.own] + taken.get(v, []) for v in savings.values
        ]

    def limits(self, choice: Choice, trace: PeakTrace, budget: int) -> Iterator[Limit]:
        """Return limits that the choice exceeds, at the moments of its run that are furthest over the budget."""
        spans = _Spans(self, choice, trace)
        for step in islice(furthest(trace.timeline - budget, _APART), _AT_ONCE):
            yield spans.limit(step, budget)


class _Spans:
    """The span in which each value would be alive, were it saved or recomputed, in a run much like this one."""

    def __init__(self, moments: MomentLimits, choice: Choice, trace: PeakTrace) -> None:
        self.moments, self.choice, self.trace = moments, choice, trace
        self.when = np.full(len(moments.peaks.nodes) + 1, len(trace.steps), dtype=np.int64)
        self.when[trace.steps[trace.forward :]] = np.arange(trace.forward, len(trace.steps))
        self.start, self.last = self._in_backward(choice.runs.tolist(), self.when.tolist())
        self.born, self.left = self._in_forward()

    def _in_backward(self, runs: list[bool], when: list[int]) -> tuple[Ints, Ints]:
        """Return op -> the step at which it would run, and storage -> the last step that would read it.

        A storage that this run does not read would be read by the earliest of its possible readers.
        """
        # Backward over the ops, as those that read a value come after its maker. An op runs as late as its first reader
        # lets it (`EmissionOrder`), so it starts where that one does.
        moments, end = self.moments, len(self.trace.steps)
        start = [end] * len(runs)
        last, guess = [-1] * len(moments.base), [end] * len(moments.base)
        storage = moments.savings.storage.tolist()
        for op in range(len(runs) - 1, -1, -1):
            first = end
            for v in moments.values_of[op]:
                steps = [when[i] for i in moments.own_readers[v]] + [start[q] for q in moments.readers[v] if runs[q]]
                possible = steps or [start[q] for q in moments.readers[v]] or [end]
                first, k = min(first, *possible), storage[v]
                last[k] = max(last[k], *steps) if steps else last[k]
                guess[k] = min(guess[k], *possible)
            start[op] = first
        ends = [made if made >= 0 else guessed for made, guessed in zip(last, guess, strict=True)]
        return np.array(start, dtype=np.int64), np.array(ends, dtype=np.int64)

    def _in_forward(self) -> tuple[Ints, Ints]:
        """Return storage -> the step of forward that makes it, and the last step that reads it."""
        moments, trace = self.moments, self.trace
        born = np.searchsorted(trace.steps[: trace.forward], moments.at[moments.base])
        left = born.copy()
        early = np.flatnonzero((trace.born < trace.forward) & (moments.storage[trace.slot] != STATIC))
        k = moments.storage[trace.slot[early]]
        born[k], left[k] = trace.born[early], trace.left[early]
        return born, left

    def limit(self, step: int, budget: int) -> Limit:
        """Return the bytes alive at a step as a limit, which is exact for this choice."""
        savings, base = self.moments.savings, self.moments.base
        runs = np.zeros(len(savings.ops), dtype=np.int64)
        if step < self.trace.forward:
            there = (self.born <= step) & (self.left < step)
        else:
            there = self.last >= step
            again = there & (self.start[base] <= step) & (base >= 0)
            np.add.at(runs, base[again], savings.nbytes[again])
        # What is there now and is neither saved nor made again, by these spans, is not up to the choice: it leaves less
        # for the rest. So the limit is exact here, where all that these spans miss, and all that they see too much, is
        # in it.
        saved = np.where(there, savings.nbytes, 0)
        chosen = saved_storages(self.choice)
        alive = int(saved[chosen].sum() + runs[self.choice.runs].sum())
        return Limit(runs, saved, budget - (int(self.trace.timeline[step]) - alive))


def saved_storages(choice: Choice) -> Bools:
    """Return (k,) whether a choice saves each storage."""
    found = np.zeros(len(choice.savings.nbytes), np.bool_)
    found[choice.savings.storage[choice.saved]] = True
    return found


class MemoryFloors:
    """What is alive at least, whatever the plan: limits that every plan within a budget keeps to.

    They hold for plans in which forward and backward run their own nodes in the order of the graph. Then, while a node
    of forward runs, what was saved before is there; and while one of backward runs, all is there that backward's own
    nodes read before and after it, and what is saved for those after it.

    Why they hold for every plan: backward's own nodes run in all plans, and what one of them reads is there from before
    the first to the last that reads it, saved or made again, as nothing is made again twice. What is saved is there
    from forward's last own reader to backward's first. What a plan makes again besides, and for how long, is left out,
    so the true sum is never less. The relaxed program with these limits is then a bound for the exact one.

    Attributes:
        least: moment -> bytes that are there in every plan. MomentLimits are the steps of forward, then those of
        backward. since, until: storage -> the moments at which it is there as well, if it is saved.
        between: bytes that are there in every plan when forward has ended and backward has not begun.
        handed: storage -> bytes that it adds to them, if it is saved.
        own: backward's own nodes, by position, in the order in which they run.
        early: the moment of the first of them.
        made: storage -> the moment of forward that makes it; -1 for what forward makes only to save it.
        steps: moment -> the node that runs, by position.
        first, final: storage -> the first and the last moment at which one of them reads it, or backward's end, where
            it returns the storage; an empty range if none does.
    """

    def __init__(self, moments: MomentLimits) -> None:
        savings, peaks = moments.savings, moments.peaks
        self.savings = savings
        everything = savings.choose(np.ones(len(savings.ops), np.bool_))
        trace = peaks.trace(everything.plan())
        own = sorted(moments.own.intersection(trace.steps.tolist()))
        early, end = trace.forward, trace.forward + len(own)
        slot, born, dies = peaks.alone(own)
        change = np.zeros(end + 2, dtype=np.int64)
        forward = np.flatnonzero(trace.born < early)
        held = trace.left[forward] >= early
        last = np.where(held, end, trace.left[forward])
        _add(change, trace.born[forward], last, trace.nbytes[forward])
        _add(change, early + born, np.minimum(early + dies, end), np.array(peaks.nbytes, dtype=np.int64)[slot])
        spans = _Spans(moments, everything, trace)
        left = np.full(len(savings.nbytes), early - 1, dtype=np.int64)  # of what forward makes only to save it
        made = moments.storage[trace.slot[forward]]
        made = made[made != STATIC]
        left[made] = spans.left[made]
        self.made = np.full(len(savings.nbytes), -1, dtype=np.int64)
        self.made[made] = spans.born[made]
        self.steps = np.array([*trace.steps[:early], *own], dtype=np.int64)
        self.between = trace.baseline + int(trace.nbytes[forward][held].sum())
        self.handed = np.where(left < early, savings.nbytes, 0)
        self.since, self.until = left + 1, np.full(len(savings.nbytes), early - 1, dtype=np.int64)
        first, final = self._read_by_own(moments, own, early)
        read = (first < end) & (left < early)
        self.until[read] = first[read] - 1
        _add(change, first[read], np.minimum(final[read], end), savings.nbytes[read])
        transient = peaks.transient[self.steps]
        self.least = trace.baseline + np.cumsum(change)[:end] + transient
        self.own, self.early, self.first, self.final = own, early, first, final

    def _read_by_own(self, moments: MomentLimits, own: list[int], early: int) -> tuple[Ints, Ints]:
        """Storage -> the first and the last moment at which a node reads it that only backward can run."""
        number = {i: early + n for n, i in enumerate(own)}
        end = early + len(own)
        first = np.full(len(self.savings.nbytes), end + 1, dtype=np.int64)
        final = np.full(len(self.savings.nbytes), -1, dtype=np.int64)
        for v, k in enumerate(self.savings.storage.tolist()):
            for reader in moments.own_readers[v]:
                moment = number.get(reader, end)
                first[k], final[k] = min(first[k], moment), max(final[k], moment)
        return first, final

    def over(self, saved: Floats, budget: int) -> Iterator[Limit]:
        """The limits that what is saved exceeds, the furthest first, a few; ``saved``: (k,), a fraction of each."""
        nothing = np.zeros(len(self.savings.ops), dtype=np.int64)
        # a little less than the fractions that HiGHS gives, which are right to 1e-6: else a limit that it keeps to, as
        # far as it can tell, would be added again and again
        taken = np.floor(saved * (1 - 1e-6) * self.savings.nbytes).astype(np.int64)
        if self.between + int(taken[self.handed > 0].sum()) > budget:
            yield Limit(nothing, self.handed, budget - self.between)
        over = self.least + alive(len(self.least), self.since, self.until, taken) - budget
        for moment in islice(furthest(over, _APART), _AT_ONCE):
            there = (self.since <= moment) & (moment <= self.until)
            yield Limit(nothing, np.where(there, self.savings.nbytes, 0), budget - int(self.least[moment]))


def furthest(over: Ints | Floats, apart: int, above: float = 0.0) -> Iterator[int]:
    """Yield the moments that are furthest over, of as many parts of the run one each at most.

    Much the same storages are there at the moments around one, so that a limit of theirs would say the same.
    """
    width = max(1, len(over) // apart)
    while over.max(initial=0) > above:
        moment = int(over.argmax())
        yield moment
        over[max(0, moment - width) : moment + width + 1] = 0


def alive(count: int, first: Ints, last: Ints, nbytes: Ints) -> Ints:
    """Return (count,) the bytes at each moment of what is there from one moment to another, both included."""
    change = np.zeros(count + 2, dtype=np.int64)
    _add(change, first, last, nbytes)
    return np.cumsum(change)[:count]


def _add(change: Ints, first: Ints, last: Ints, nbytes: Ints) -> None:
    """Let bytes be there from one moment to another, both included; never, if the first comes later."""
    some = first <= last
    np.add.at(change, first[some], nbytes[some])
    np.subtract.at(change, last[some] + 1, nbytes[some])
