"""Simulates one step of a pipeline schedule: its time, its bubbles, and the memory of each rank.

An order of actions with a rank each is a DAG: an action waits for the one before it on its rank and for its message.
`PipelineOrder.links` sorts it topologically once; the longest path is then one pass over that sequence, and so are the
memories, since what is alive changes only where an action starts or ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from splitkit.checks import shown
from splitkit.errors import ScheduleError
from splitkit.pipeline.memory import ring_rounds, share
from splitkit.pipeline.message_order import MessageOrder, waits
from splitkit.pipeline.order import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    LETTERS,
    PipelineOrder,
    times_with_copies,
)
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.stage_costs import StageCosts, bytes_back, require_stages
from splitkit.pipeline.trace import LinkTimes, Transport, message_seconds

__all__ = ["LinkTimes", "PipelineOrder", "ScheduleRun", "StageCosts", "simulate_schedule"]


def simulate_schedule(
    stages: Sequence[StageCosts],
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    ranks: int | None = None,
    links: str | LinkTimes | None = None,
    devices: Sequence[Hashable] | None = None,
    static_buffers: bool = False,
) -> ScheduleRun:
    """Simulate one step of a pipeline: each action starts when its rank is free and its inputs have arrived.

    The simulation takes time linear in the number of actions.

    A message leaves when the action that makes it ends; stages of one rank exchange values at no cost. Ranks compute
    while messages travel. From one rank to another they travel one at a time, in the order in which they are made; the
    two directions, and other pairs of ranks, do not delay each other.

    In an order of actions and messages (`splitkit.pipeline.message_order.MessageOrder`), messages wait for one another
    on the communicators of both ranks, and every message waits until both ranks have come to it.

    The replicas of a stage act as one rank. A message between stages of a and b replicas takes as long as the larger
    share, 1 / min(a, b), over the slowest of their links. After its last action a rank all-reduces the gradients of its
    replicas in a ring, while nothing else runs there.

    Args:
        stages: the stages, in the order of the model.
        schedule: the name of a schedule (``"1f1b"``, ``"zbv"``; `splitkit.pipeline.schedules` lists all, and says
            how to add one), or an order of your own.
        microbatches: how many microbatches the step has; an order of your own says so itself.
        ranks: how many ranks share the stages. ``None``: as many as stages under schedules with one stage per rank,
            half as many otherwise.
        links: how long messages take, or the name of a preset (``"nvlink4"``); ``None`` for no time.
        devices: the names of the ranks in ``links``, ``0 .. ranks - 1`` if not given; with replicas those of all
            devices, the devices of the first rank first.
        static_buffers: whether every stage holds a receive buffer for each microbatch all the time, as on torch
            2.11 and 2.13, and, except under GPipe and 1F1B, what it sent until the end of the step; otherwise a
            buffer exists from when its message leaves until it is read (close to torch 2.15).

    Raises:
        ScheduleError: SK330 if the schedule is unknown or does not fit these numbers; the message says what does. SK331
            if an order of your own never ends.
        CostError: SK322 if two ranks that talk have no link, or ``links`` is not a set of links.
    """
    step = price_actions(stages, schedule, microbatches, ranks=ranks, links=links, devices=devices)
    starts, ends, leaves, arrives, *goes_on = (np.array(column, float) for column in _times(step))
    given = static_buffers, step.syncs, step.transport
    return ScheduleRun(step.order, step.stages, starts, ends, leaves, arrives, *given, *goes_on)


@dataclass(frozen=True)
class PricedStep:
    """A step before it is simulated: the order of its actions, and what each of them takes.

    Attributes:
        order: the actions of each rank.
        stages: the costs of the stages.
        durations: seconds of each action of ``order.columns``.
        channels: a number for the pair of ranks between which the result of each action travels, -1 if it stays.
        travel: seconds of the message with the result, 0 if it stays.
        syncs: as in `splitkit.pipeline.trace.StepTrace`.
        transport: the communication model.
    """

    order: PipelineOrder
    stages: tuple[StageCosts, ...]
    durations: list[float]
    channels: list[int]
    travel: list[float]
    syncs: tuple[float, ...]
    transport: Transport


def price_actions(
    stages: Sequence[StageCosts],
    schedule: str | PipelineOrder,
    microbatches: int | None = None,
    *,
    ranks: int | None = None,
    links: str | LinkTimes | None = None,
    devices: Sequence[Hashable] | None = None,
) -> PricedStep:
    """Return the order of a step and the seconds of its actions and messages; arguments as in `simulate_schedule`."""
    order, links = _order(stages, schedule, microbatches, ranks), _links_of(links)
    replicas = _replicas(order, stages)
    names = _names(replicas, devices)
    transport = Transport(links, names)
    _, stage, kind, _ = order.columns
    table = {
        FORWARD: [s.forward for s in stages],
        BACKWARD: [s.backward for s in stages],
        BACKWARD_INPUT: [s.backward_input for s in stages],
        BACKWARD_WEIGHT: [s.backward_weight for s in stages],
    }
    durations = np.array([table[k] for k in range(len(LETTERS))], float)[kind, stage].tolist()
    result = kind * len(stages) + stage
    channels, travel = (np.array(column)[result].tolist() for column in _messages(order, stages, transport))
    syncs = () if links is None or max(replicas) == 1 else _syncs(order, stages, names, links)
    return PricedStep(order, tuple(stages), durations, channels, travel, syncs, transport)


def _order(
    stages: Sequence[StageCosts], schedule: str | PipelineOrder, microbatches: int | None, ranks: int | None
) -> PipelineOrder:
    require_stages(stages)
    if not isinstance(schedule, PipelineOrder):
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
    from splitkit.costs.links import as_links

    return as_links(links)


def _replicas(order: PipelineOrder, stages: Sequence[StageCosts]) -> list[int]:
    """Return the number of devices of each rank."""
    found: dict[int, int] = {}
    for rank, stage in zip(order.rank_of, stages, strict=True):
        if found.setdefault(rank, stage.replicas) != stage.replicas:
            text = f"the stages of rank {rank} have {found[rank]} and {stage.replicas} replicas"
            raise ScheduleError("SK330", text, "Give all stages of one rank the same number.")
    return [found.get(rank, 1) for rank in range(len(order.ranks))]


def _names(replicas: Sequence[int], devices: Sequence[Hashable] | None) -> list[Sequence[Hashable]]:
    """Return the names of the devices of each rank."""
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
    """Return the seconds in which the replicas of each rank all-reduce the gradients of its stages."""
    total = [0.0] * len(order.ranks)
    for rank, stage in zip(order.rank_of, stages, strict=True):
        own = names[rank]
        if stage.gradient_bytes and len(own) > 1:
            each = stage.gradient_bytes / len(own)
            hops = zip(own, [*own[1:], own[0]], strict=True)
            total[rank] += ring_rounds(len(own)) * max(
                message_seconds(links, here, there, each) for here, there in hops
            )
    return tuple(total)


def _messages(
    order: PipelineOrder, stages: Sequence[StageCosts], transport: Transport
) -> tuple[list[int], list[float]]:
    """Return how the results of actions are handed on, by kind * stages + stage: a number for the pair of ranks, -1
    where nothing travels, and the seconds of the message.
    """
    count = len(stages)
    channel, seconds = [-1] * (len(LETTERS) * count), [0.0] * (len(LETTERS) * count)
    for stage in range(count):
        for target, kinds in ((stage + 1, (FORWARD,)), (stage - 1, (BACKWARD, BACKWARD_INPUT))):
            if not 0 <= target < count or order.rank_of[stage] == order.rank_of[target]:
                continue
            here, there = order.rank_of[stage], order.rank_of[target]
            nbytes = stages[stage].activation_bytes if target > stage else bytes_back(stages, stage)
            each = share(nbytes, min(stages[stage].replicas, stages[target].replicas))
            took = transport.seconds(here, there, each)
            for kind in kinds:
                channel[kind * count + stage] = here * len(order.ranks) + there
                seconds[kind * count + stage] = took
    return channel, seconds


def _times(step: PricedStep) -> tuple[list[float], ...]:
    """Return start and end of every action, and when its message leaves and arrives (its end, if it sends none).

    If stages copy to the host, a fifth list says when the rank of each action goes on.
    """
    order = step.order
    copies = [stage.copies for stage in step.stages]
    if any(copies):
        if isinstance(order, MessageOrder):
            text = "stages that offload need messages without an order of their own"
            raise ScheduleError("SK330", text, "Give the actions without messages.")
        return times_with_copies(order, step.durations, step.channels, step.travel, copies)
    if isinstance(order, MessageOrder):
        return times_of_messages(order, step.durations, step.travel)
    return _overlapped(order, order.columns.rank.tolist(), step.durations, step.channels, step.travel)


def _overlapped(
    order: PipelineOrder, rank: list[int], durations: list[float], channels: list[int], travel: list[float]
) -> tuple[list[float], ...]:
    """Let messages travel beside the work, one at a time on each channel."""
    data = order.links.data.tolist()
    free, idle = [0.0] * len(order.ranks), [0.0] * len(order.ranks) ** 2
    starts, ends, departures, arrivals = ([0.0] * len(rank) for _ in range(4))
    for i in order.links.sequence:
        start, need = free[rank[i]], data[i]
        if need >= 0 and arrivals[need] > start:
            start = arrivals[need]
        end = departure = arrival = start + durations[i]
        if (channel := channels[i]) >= 0:
            departure = max(end, idle[channel])
            idle[channel] = arrival = departure + travel[i]
        free[rank[i]] = end
        starts[i], ends[i], departures[i], arrivals[i] = start, end, departure, arrival
    return starts, ends, departures, arrivals


# Gives times to the actions and messages of a step whose messages are in a given order.


def times_of_messages(
    order: MessageOrder,
    durations: Sequence[float],
    travel: Sequence[float],
) -> tuple[list[float], ...]:
    """Return start and end of every action, and when its message leaves and arrives (its end, if it sends none).

    The execution model is that of `splitkit.pipeline.message_order`: the longest path over its waits. Takes time linear
    in the number of actions.

    Args:
        order: the order of actions and messages.
        durations: seconds of each action of ``order.columns``.
        travel: seconds of the message that each action computes.
    """
    found, count = waits(order), len(durations)
    takes = [*durations, *travel, *[0.0] * (len(found.before) - 2 * count)]
    starts, ends = [0.0] * len(takes), [0.0] * len(takes)
    for node in found.sequence:
        start = max((ends[need] for need in found.before[node]), default=0.0)
        starts[node], ends[node] = start, start + takes[node]
    sent = [count + action if action in order.readers else action for action in range(count)]
    leaves = [starts[node] if node >= count else ends[node] for node in sent]
    return starts[:count], ends[:count], leaves, [ends[node] for node in sent]
