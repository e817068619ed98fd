"""Holds what a stage copies to the host and back for one microbatch, and times the actions of ranks that copy.

Each rank has one link in each direction, for all microbatches of all its stages. A direction copies one microbatch
after the other, each beside the computation (`splitkit.pipeline.host_windows` says within which actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from splitkit.pipeline.host_windows import HostWindow, host_windows
from splitkit.pipeline.order import PipelineOrder


@dataclass(frozen=True)
class StageCopies:
    """What one microbatch of a stage moves.

    Attributes:
        nbytes: the bytes that are moved.
        out: seconds of all copies to the host.
        out_end: seconds from the start of forward to the end of the last copy, if the link is free: values leave in the
            order in which they are made.
        back: seconds of all copies back.
        back_tail: seconds from the start of the first copy back to the end of backward, if backward waits for nothing
            else: values come in the order in which they are read.
    """

    nbytes: int
    out: float
    out_end: float
    back: float
    back_tail: float


Times = tuple[list[float], list[float], list[float], list[float], list[float]]
"""For each action its start and end, when its message leaves and arrives, and when its rank goes on."""


def times_with_copies(
    order: PipelineOrder,
    durations: Sequence[float],
    channels: Sequence[int],
    travel: Sequence[float],
    copies: Sequence[StageCopies | None],
) -> Times:
    """Return the times of all actions, where ranks also wait for copies.

    Backward waits for what comes back when it reads it. Before an action begins, the copies to the host that the last
    one should have ended with are awaited, so that their memory is free.

    Args:
        order: the actions.
        durations: seconds of each action without waiting.
        channels: a number for the ranks between which the message of each action travels, -1 if there is none.
        travel: seconds of the message of each action.
        copies: what each stage copies.
    """
    rank, data = order.columns.rank.tolist(), order.links.data.tolist()
    stage, microbatch = order.columns.stage.tolist(), order.columns.microbatch.tolist()
    released, asked, windows = _by_action(order, copies)
    free, idle = [0.0] * len(order.ranks), [0.0] * len(order.ranks) ** 2
    out, back = [0.0] * len(order.ranks), [0.0] * len(order.ranks)
    left: dict[tuple[int, int], float] = {}
    begun: dict[tuple[int, int], float] = {}
    starts, ends, departures, arrivals, goes_on = ([0.0] * len(rank) for _ in range(5))
    for i in order.links.sequence:
        own, key = rank[i], (stage[i], microbatch[i])
        start, moved, window = free[own], copies[stage[i]], windows.get((stage[i], microbatch[i]))
        if (need := data[i]) >= 0:
            start = max(start, arrivals[need])
        for other in asked.get(i, ()):
            begun[other] = max(back[own], start)
            back[own] = begun[other] + _of(copies, other).back
        end = start + durations[i]
        if moved is not None and window is not None and window.made == i:
            left[key] = out[own] = max(out[own] + moved.out, start + moved.out_end)
        elif moved is not None and window is not None and window.read == i:
            end = max(end, begun[key] + moved.back_tail)
        departure = arrival = end
        if (channel := channels[i]) >= 0:
            departure = max(end, idle[channel])
            idle[channel] = arrival = departure + travel[i]
        free[own] = max([end, *(left[other] for other in released.get(i, ()))])
        starts[i], ends[i], departures[i], arrivals[i], goes_on[i] = start, end, departure, arrival, free[own]
    return starts, ends, departures, arrivals, goes_on


def _of(copies: Sequence[StageCopies | None], key: tuple[int, int]) -> StageCopies:
    found = copies[key[0]]
    assert found is not None
    return found


_Keys = dict[int, list[tuple[int, int]]]


def _by_action(
    order: PipelineOrder, copies: Sequence[StageCopies | None]
) -> tuple[_Keys, _Keys, dict[tuple[int, int], HostWindow]]:
    """Return action -> what it releases and what it asks for, and the windows, all by numbers in ``order.columns``."""
    released: _Keys = {}
    asked: _Keys = {}
    windows = windows_of(order)
    for key, window in windows.items():
        if copies[key[0]] is not None:
            released.setdefault(window.released, []).append(key)
            asked.setdefault(window.asked, []).append(key)
    for keys in asked.values():  # what is read first comes first
        keys.sort(key=lambda key: windows[key].read)
    return released, asked, windows


def windows_of(order: PipelineOrder) -> dict[tuple[int, int], HostWindow]:
    """Return (stage, microbatch) -> its window, by numbers of actions in ``order.columns``."""
    found: dict[tuple[int, int], HostWindow] = {}
    first = 0
    for row in order.ranks:
        for key, w in host_windows(row).items():
            found[key] = HostWindow(w.made + first, w.released + first, w.asked + first, w.read + first)
        first += len(row)
    return found
