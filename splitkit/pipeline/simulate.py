"""Simulates a pipeline schedule: step time, bubbles, microbatches in flight and memory of each rank, event by event."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from splitkit.checks import shown
from splitkit.errors import ScheduleError
from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, LETTERS, PipelineOrder
from splitkit.pipeline.replication import rounds, share
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stagecosts import StageCosts, bytes_back, bytes_on
from splitkit.pipeline.trace import Floats
from splitkit.pipeline.wires import LinkTimes, Wires, trip

__all__ = ["LinkTimes", "PipelineOrder", "ScheduleRun", "StageCosts", "simulate_schedule"]


def simulate_schedule(
    stages: Sequence[StageCosts],
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    ranks: int | None = None,
    links: str | LinkTimes | None = None,
    devices: Sequence[Hashable] | None = None,
    overlap: bool = True,
    static_buffers: bool = False,
) -> ScheduleRun:
    """Run one step of a pipeline on paper: each action starts when its rank is free and what it needs is there.

    The order of actions is that of torch's own schedule classes. Time is linear in the number of actions.

    A message goes off when the action that makes it ends; stages of one rank hand values over at no cost.

    * ``overlap=True``: ranks compute while messages travel. From one rank to another they travel one at a time, in the
      order in which they are made; the two directions, and other pairs of ranks, do not disturb each other.
    * ``overlap=False``: a rank computes nothing while it sends (right after the action) or receives (right before the
      action that reads). Both ends do so at the same time if both are free; else each pays at its own time, out of
      a buffer, so that an order that ends with overlap ends without.

    The replicas of a stage act as one rank. A message between stages of a and b replicas takes as long as the larger
    share, of 1 / min(a, b), over the slowest of their links; after its last action a rank adds up the gradients of its
    replicas in a ring, while nothing else runs there.

    Args:
        stages: in the order of the model.
        schedule: ``"gpipe"``, ``"1f1b"``, ``"interleaved-1f1b"``, ``"looped-bfs"``, ``"interleaved-zero-bubble"``,
            ``"zbv"``, ``"dualpipev"``, or an order of your own.
        microbatches: how many the step has; an order of your own says so itself.
        ranks: how many share the stages. ``None``: one a stage for GPipe and 1F1B, one for two stages otherwise.
        links: how long messages take, or the name of a preset (``"nvlink4"``); ``None``: no time.
        devices: what the links call the ranks, ``0 .. ranks - 1`` if not given; with replicas all of their devices,
            those of the first rank first.
        overlap: whether ranks compute while they send and receive.
        static_buffers: every stage holds a receive buffer for each microbatch all the time, as on torch 2.11 and 2.13,
            and, under other orders than GPipe and 1F1B, what it sent to the end of the step; else a buffer is there
            from when its message goes off, until it is read (near torch 2.15).

    Raises:
        ScheduleError: SK330 if the schedule is not known or does not go with these numbers; the message says what does.
            SK331 if an order of your own never ends.
        CostError: SK322 if two ranks that talk have no link, or ``links`` are none.
    """
    order, links = _order(stages, schedule, microbatches, ranks), _links_of(links)
    replicas = _replicas(order, stages)
    names = _names(replicas, devices)
    wires = Wires(links, names, overlap)
    starts, ends, departures, arrivals = _times(order, stages, _messages(order, stages, wires), overlap)
    syncs = () if links is None or max(replicas) == 1 else _syncs(order, stages, names, links)
    return ScheduleRun(order, tuple(stages), starts, ends, departures, arrivals, static_buffers, syncs, wires)


def _order(
    stages: Sequence[StageCosts], schedule: str | PipelineOrder, microbatches: int | None, ranks: int | None
) -> PipelineOrder:
    if not isinstance(stages, Sequence) or not stages or not all(isinstance(stage, StageCosts) for stage in stages):
        raise ScheduleError("SK330", f"stages are {shown(stages)}", "Give a StageCosts for each stage, one at least.")
    if not isinstance(schedule, PipelineOrder):
        from splitkit.pipeline.torch_orders import pipeline_order

        if microbatches is None:
            raise ScheduleError("SK330", "the number of microbatches is not given", "Give microbatches=8, for example.")
        return pipeline_order(schedule, len(stages), microbatches, ranks)
    for what, given, has in (
        ("stages", len(stages), len(schedule.rank_of)),
        ("microbatches", microbatches, schedule.microbatches),
        ("ranks", ranks, len(schedule.ranks)),
    ):
        if given not in (None, has):
            raise ScheduleError("SK330", f"{schedule.name} has {has} {what}, not {given}", "Give as many.")
    return schedule


def _links_of(links: object) -> LinkTimes | None:
    if links is None or (callable(getattr(links, "seconds", None)) and not isinstance(links, type)):
        return cast("LinkTimes | None", links)
    from splitkit.costs.links import links_of

    return links_of(links)


def _replicas(order: PipelineOrder, stages: Sequence[StageCosts]) -> list[int]:
    """How many devices each rank is."""
    found: dict[int, int] = {}
    for rank, stage in zip(order.rank_of, stages, strict=True):
        if found.setdefault(rank, stage.replicas) != stage.replicas:
            text = f"the stages of rank {rank} have {found[rank]} and {stage.replicas} replicas"
            raise ScheduleError("SK330", text, "Give stages of one rank as many.")
    return [found.get(rank, 1) for rank in range(len(order.ranks))]


def _names(replicas: Sequence[int], devices: Sequence[Hashable] | None) -> list[Sequence[Hashable]]:
    """What the devices of each rank are called."""
    names: Sequence[Hashable] = range(sum(replicas)) if devices is None else devices
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ScheduleError("SK330", f"devices are {shown(devices)}", "List a name for each rank.")
    if len(names) != sum(replicas):
        several = f" of {sum(replicas)} replicas" if max(replicas) > 1 else ""
        text = f"{len(names)} devices for {len(replicas)} ranks{several}"
        raise ScheduleError("SK330", text, f"Name one for each {'replica' if several else 'rank'}.")
    ends = np.cumsum(replicas).tolist()
    return [names[end - count : end] for end, count in zip(ends, replicas, strict=True)]


def _syncs(
    order: PipelineOrder, stages: Sequence[StageCosts], names: Sequence[Sequence[Hashable]], links: LinkTimes
) -> tuple[float, ...]:
    """Seconds in which the replicas of each rank add up the gradients of its stages."""
    total = [0.0] * len(order.ranks)
    for rank, stage in zip(order.rank_of, stages, strict=True):
        own = names[rank]
        if stage.gradient_bytes and len(own) > 1:
            each = stage.gradient_bytes / len(own)
            hops = zip(own, [*own[1:], own[0]], strict=True)
            total[rank] += rounds(len(own)) * max(trip(links, here, there, each) for here, there in hops)
    return tuple(total)


@dataclass(frozen=True)
class _Messages:
    """What the results of actions cost to hand on, by kind * stages + stage.

    Attributes:
        wire: a number for each pair of ranks, -1 where nothing travels.
        seconds: how long the message takes.
    """

    wire: list[int]
    seconds: list[float]


def _messages(order: PipelineOrder, stages: Sequence[StageCosts], wires: Wires) -> _Messages:
    count = len(stages)
    wire, seconds = [-1] * (len(LETTERS) * count), [0.0] * (len(LETTERS) * count)
    for stage in range(count):
        for target, kinds in ((stage + 1, (FORWARD,)), (stage - 1, (BACKWARD, BACKWARD_INPUT))):
            if not 0 <= target < count or order.rank_of[stage] == order.rank_of[target]:
                continue
            here, there = order.rank_of[stage], order.rank_of[target]
            nbytes = bytes_on(stages, stage) if target > stage else bytes_back(stages, stage)
            each = share(nbytes, min(stages[stage].replicas, stages[target].replicas))
            took = wires.seconds(here, there, each)
            for kind in kinds:
                wire[kind * count + stage] = here * len(order.ranks) + there
                seconds[kind * count + stage] = took
    return _Messages(wire, seconds)


def _times(
    order: PipelineOrder, stages: Sequence[StageCosts], messages: _Messages, overlap: bool
) -> tuple[Floats, Floats, Floats, Floats]:
    """Start and end of every action, and when its message goes off and is there (its end, if it sends none)."""
    rank, stage, kind, _ = order.columns
    table = {
        FORWARD: [s.forward for s in stages],
        BACKWARD: [s.backward for s in stages],
        BACKWARD_INPUT: [s.backward_input for s in stages],
        BACKWARD_WEIGHT: [s.backward_weight for s in stages],
    }
    durations = np.array([table[k] for k in range(len(LETTERS))], float)[kind, stage].tolist()
    result = kind * len(stages) + stage
    wires = np.array(messages.wire)[result].tolist()
    trips = np.array(messages.seconds)[result].tolist()
    run = _overlapped if overlap else _in_turn
    found = run(order, rank.tolist(), durations, wires, trips)
    starts, ends, departures, arrivals = (np.array(times, float) for times in found)
    return starts, ends, departures, arrivals


def _overlapped(
    order: PipelineOrder, rank: list[int], durations: list[float], wires: list[int], trips: list[float]
) -> tuple[list[float], ...]:
    """Messages travel beside the work, one at a time on each wire."""
    data = order.links.data.tolist()
    free, idle = [0.0] * len(order.ranks), [0.0] * len(order.ranks) ** 2
    starts, ends, departures, arrivals = ([0.0] * len(rank) for _ in range(4))
    for i in order.links.sequence:
        start, need = free[rank[i]], data[i]
        if need >= 0 and arrivals[need] > start:
            start = arrivals[need]
        end = departure = arrival = start + durations[i]
        if (wire := wires[i]) >= 0:
            departure = max(end, idle[wire])
            idle[wire] = arrival = departure + trips[i]
        free[rank[i]] = end
        starts[i], ends[i], departures[i], arrivals[i] = start, end, departure, arrival
    return starts, ends, departures, arrivals


def _in_turn(
    order: PipelineOrder, rank: list[int], durations: list[float], wires: list[int], trips: list[float]
) -> tuple[list[float], ...]:
    """Ranks send, receive and compute one after the other."""
    data = order.links.data.tolist()
    free = [0.0] * len(order.ranks)
    starts, ends, departures, arrivals = ([0.0] * len(rank) for _ in range(4))
    for i in order.links.sequence:
        start, need = free[rank[i]], data[i]
        if need >= 0:
            start = max(start, departures[need]) + (trips[need] if wires[need] >= 0 else 0.0)
        end = start + durations[i]
        free[rank[i]] = arrival = end + (trips[i] if wires[i] >= 0 else 0.0)
        starts[i], ends[i], departures[i], arrivals[i] = start, end, end, arrival
    return starts, ends, departures, arrivals
