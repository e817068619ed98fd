"""Computes the memory of each rank of a simulated step: its peak by kind, and its course over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from splitkit.pipeline.host_copies_of_stage import windows_of
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Ints
from splitkit.pipeline.replication_costs import share
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.stage_costs import bytes_back, bytes_on
from splitkit.pipeline.trace import Floats, StepTrace

_SOONEST, _LATEST = -1, np.iinfo(np.int64).max


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank at its peak.

    Attributes:
        parameters: bytes of the parameters and buffers of its stages.
        gradients: bytes of the gradients of the parameters.
        optimizer: the state of the optimizer.
        saved: bytes saved for backward by the microbatches in flight, and gradients that wait for the weight part.
        messages: bytes of messages that are on their way or not yet read.
        temporaries: additional bytes of the action that runs.
        seconds: the time of the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    messages: int
    temporaries: int
    seconds: float

    @property
    def peak(self) -> int:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.messages + self.temporaries

    def to_dict(self) -> dict[str, float]:
        """Return the bytes as plain data, with the sum as ``peak``."""
        return {"peak": self.peak, **asdict(self)}


@dataclass(frozen=True)
class Changes:
    """Allocations (positive) and frees (negative): rank, time, order, amount and column.

    Changes at the same time happen in the order of ``place``: twice the number of the action at its start, and one more
    at its end. The receive buffer of a message is allocated before any other change at its time. ``amount`` is bytes,
    or a number of things of equal bytes; ``column`` is what they are of: of all changes, or of each.
    """

    rank: Ints
    seconds: Floats
    place: Ints
    amount: Ints
    column: int | Ints


MESSAGES = 0
"""The column of messages."""
_SAVED, _TEMPORARIES = 1, 2


def rank_memory(run: StepTrace) -> tuple[RankMemory, ...]:
    """Return the memory of each rank at its peak, the first of equal ones."""
    fixed, static = _fixed(run), static_bytes(run)
    return tuple(_peak(fixed[r], static[r], live, seconds) for r, (live, seconds) in enumerate(_live(run)))


def memory_over_time(run: StepTrace) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return (seconds, bytes from then on) for each rank, from the start of the step.

    At each time the largest value comes first, so that the maximum is the peak of `rank_memory`.
    """
    found = []
    for fixed, static, (live, seconds) in zip(_fixed(run), static_bytes(run), _live(run), strict=True):
        held = sum(fixed) + static
        most: dict[float, int] = {0.0: held}
        after: dict[float, int] = {}
        for nbytes, time in zip(live.sum(axis=1).tolist(), seconds.tolist(), strict=True):
            most[time] = max(most.get(time, 0), held + nbytes)
            after[time] = held + nbytes
        points = [point for t, top in most.items() for point in ((t, top), (t, after.get(t, top)))]
        found.append(tuple(dict.fromkeys(points)))
    return tuple(found)


def _live(run: StepTrace) -> list[tuple[Ints, Floats]]:
    """Return, for each rank, (n, 3) bytes of messages, saved and temporary, and (n,) the times from which they hold."""
    return accumulated([*_of_actions(run), *message_changes(run)], 3, run.ranks)


def accumulated(changes: Iterable[Changes], columns: int, ranks: int) -> list[tuple[Ints, Floats]]:
    """Return, for each rank, (n, columns) sums of all changes so far, and (n,) the times from which they hold."""
    changes = [c for c in changes if c.amount.any()]
    if not changes:
        return [(np.zeros((0, columns), np.int64), np.zeros(0))] * ranks
    rank, seconds, place = (np.concatenate([getattr(c, n) for c in changes]) for n in ("rank", "seconds", "place"))
    amounts = np.zeros((len(rank), columns), np.int64)
    column = np.concatenate([np.broadcast_to(c.column, len(c.rank)) for c in changes])
    amounts[np.arange(len(rank)), column] = np.concatenate([c.amount for c in changes])
    order = np.lexsort((place, seconds, rank))
    rank, seconds, place = rank[order], seconds[order], place[order]
    live = amounts[order].cumsum(axis=0)  # each rank frees all that it allocates, so the next starts from 0
    last = np.ones(len(rank), bool)  # of changes at the same time and place, only the result counts
    last[:-1] = (np.diff(rank) != 0) | (np.diff(seconds) != 0) | (np.diff(place) != 0)
    found = np.flatnonzero(last)
    split = np.split(found, np.searchsorted(rank[found], np.arange(1, ranks)))
    return [(live[at], seconds[at]) for at in split]


def _peak(fixed: tuple[int, int, int], static: int, live: Ints, seconds: Floats) -> RankMemory:
    if not len(live):
        return RankMemory(*fixed, 0, static, 0, 0.0)
    at = int(live.sum(axis=1).argmax())
    messages, saved, temporaries = live[at].tolist()
    return RankMemory(*fixed, saved, messages + static, temporaries, float(seconds[at]))


def _fixed(run: StepTrace) -> list[tuple[int, int, int]]:
    """Return the bytes of parameters, gradients and optimizer state of each rank."""
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    owned = [[s for s, r in zip(run.stages, run.order.rank_of, strict=True) if r == k] for k in range(run.ranks)]
    sums = [[sum(int(getattr(stage, name)) for stage in stages) for name in names] for stages in owned]
    return [(parameters, gradients, optimizer) for parameters, gradients, optimizer in sums]


def _of_actions(run: StepTrace) -> Iterator[Changes]:
    """Yield the changes of saved and temporary bytes."""
    rank, stage, kind, _ = run.order.columns
    saved, left, captured = np.array([units_of(run, s) for s in range(len(run.stages))]).T
    ends = [kind == BACKWARD, kind == BACKWARD_INPUT, kind == BACKWARD_WEIGHT]
    taken = np.select([kind == FORWARD, kind == BACKWARD_INPUT], [saved[stage], captured[stage]], 0)
    freed = np.select(ends, [saved[stage], (saved - left)[stage], (left + captured)[stage]], 0)
    temporary = np.array([s.temporary_bytes for s in run.stages])[stage]
    first, last = 2 * np.arange(len(rank)), 2 * np.arange(len(rank)) + 1
    yield Changes(rank, run.starts, first, taken, _SAVED)
    yield Changes(rank, run.ends, last, -freed, _SAVED)
    yield Changes(rank, run.starts, first, temporary, _TEMPORARIES)
    yield Changes(rank, run.ends, last, -temporary, _TEMPORARIES)
    yield from host_changes(run, _SAVED)


def host_changes(run: StepTrace, column: int) -> Iterator[Changes]:
    """Yield the saved bytes that leave the device for the host, and those that come back."""
    moved = {s: costs.copies.nbytes for s, costs in enumerate(run.stages) if costs.copies is not None}
    if not moved or run.goes_on is None:
        return
    found = [(stage, window) for (stage, _), window in windows_of(run.order).items() if stage in moved]
    nbytes = np.array([moved[stage] for stage, _ in found], np.int64)
    gone = np.array([window.released for _, window in found], np.int64)
    come = np.array([window.asked for _, window in found], np.int64)
    yield Changes(run.order.columns.rank[gone], run.goes_on[gone], 2 * gone + 1, -nbytes, column)
    yield Changes(run.order.columns.rank[come], run.starts[come], 2 * come, nbytes, column)


def units_of(run: StepTrace, stage: int) -> tuple[int, int, int]:
    """Return (saved, deferred, extra) bytes of a stage.

    ``saved`` are held from forward to the end of backward; ``deferred`` of these wait for the weight part; ``extra``
    are held in addition from the start of the input part to the end of the weight part.
    """
    costs = run.stages[stage]
    later = costs.saved_bytes if costs.deferred_bytes is None else costs.deferred_bytes
    # An input in a static buffer is counted by `static_bytes`.
    static = run.static_buffers and _remote(run, stage, stage - 1)
    apart = share(bytes_on(run.stages, stage - 1), costs.replicas) if static else 0
    saved = max(0, costs.saved_bytes - apart)
    return saved, min(later, saved), max(0, later - costs.saved_bytes)


def message_changes(run: StepTrace) -> Iterator[Changes]:
    """Yield the changes of message buffers.

    A sent activation is among the saved bytes of its stage, and a received one is from the start of its reader on. The
    sender holds a gradient until it is sent, and the reader until its action ends. Each replica has its share. With
    static buffers, ranks with several stages keep what they sent to the end of the step.
    """
    rank, stage, kind, _ = run.order.columns
    data, number = run.order.links.data, np.arange(len(rank))
    on, back = (np.array([of(run.stages, s) for s in range(len(run.stages))]) for of in (bytes_on, bytes_back))
    replicas = np.array([s.replicas for s in run.stages])[stage]
    forward, remote = kind == FORWARD, rank != rank[data]
    begin, end = 2 * number, 2 * number + 1  # places
    if not run.static_buffers:
        read = number[(data >= 0) & remote & forward]
        times = run.departures[data[read]], run.starts[read]
        on_each = -(-on[stage[data[read]]] // replicas[read])
        yield from _held(rank[read], on_each, *times, np.full(len(read), _SOONEST), begin[read])
        read = number[(data >= 0) & remote & ~forward]
        times = run.departures[data[read]], run.ends[read]
        back_each = -(-back[stage[data[read]]] // replicas[read])
        yield from _held(rank[read], back_each, *times, np.full(len(read), _SOONEST), end[read])
    read = number[(data >= 0) & ~remote & ~forward]
    made = data[read]
    own = -(-back[stage[made]] // replicas[read])
    yield from _held(rank[read], own, run.ends[made], run.ends[read], end[made], end[read])
    kept = keeps_sent(run)
    sent = data[(data >= 0) & remote & ~forward] if kept else number[~forward & (run.arrivals > run.ends)]
    stop = np.full(len(sent), run.ends.max()) if kept else run.arrivals[sent]
    own = -(-back[stage[sent]] // replicas[sent])
    yield from _held(rank[sent], own, run.ends[sent], stop, end[sent], np.full(len(sent), _LATEST))
    if kept:
        yield from _kept(run, data[(data >= 0) & remote & forward])


def _kept(run: StepTrace, sent: Ints) -> Iterator[Changes]:
    """Yield sent activations, from the end of their stage's backward to the end of the step."""
    rank, stage, kind, microbatch = run.order.columns
    done = np.zeros((len(run.stages), run.order.microbatches), np.int64)
    ends = np.flatnonzero((kind == BACKWARD) | (kind == BACKWARD_WEIGHT))
    done[stage[ends], microbatch[ends]] = ends
    last = done[stage[sent], microbatch[sent]]
    on = np.array([share(bytes_on(run.stages, s), costs.replicas) for s, costs in enumerate(run.stages)])
    over = np.full(len(sent), run.ends.max())
    yield from _held(rank[sent], on[stage[sent]], run.ends[last], over, 2 * last + 1, np.full(len(sent), _LATEST))


def keeps_sent(run: StepTrace) -> bool:
    """Whether sent messages are held to the end of the step (`splitkit.pipeline.schedule.Schedule.waits_for_sends`)."""
    schedule = schedule_of(run.order) if run.static_buffers else None
    return run.static_buffers and (schedule is None or not schedule.waits_for_sends)


def _held(rank: Ints, nbytes: Ints, start: Floats, stop: Floats, first: Ints, last: Ints) -> Iterator[Changes]:
    """Yield the allocation and the free of message buffers."""
    yield Changes(rank, start, first, nbytes, MESSAGES)
    yield Changes(rank, stop, last, -nbytes, MESSAGES)


def static_bytes(run: StepTrace) -> Sequence[int]:
    """Return the bytes of the receive buffers that each rank holds throughout the step."""
    held = [0] * run.ranks
    if run.static_buffers:
        for stage, rank in enumerate(run.order.rank_of):
            replicas = run.stages[stage].replicas
            if _remote(run, stage, stage - 1):
                held[rank] += run.order.microbatches * share(bytes_on(run.stages, stage - 1), replicas)
            if _remote(run, stage, stage + 1):
                held[rank] += run.order.microbatches * share(bytes_back(run.stages, stage + 1), replicas)
    return held


def _remote(run: StepTrace, stage: int, other: int) -> bool:
    """Whether the other stage exists, on another rank."""
    of = run.order.rank_of
    return 0 <= other < len(of) and of[stage] != of[other]
