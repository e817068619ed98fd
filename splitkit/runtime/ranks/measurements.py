"""Measures a pipeline, to compare it with a simulation: times of stages and links, and time and memory of whole steps.

Stages are timed one microbatch after the other, while all other ranks wait; links are timed by messages of two sizes
that go back and forth. A step is timed from a barrier to the end of the last action of any rank. The sum of the
gradients of tied weights, and the optimizer, come after that. Memory is measured on the CPU in a step of its own: the
most that torch's allocator holds above what it held when the step began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from splitkit import _torch
from splitkit.costs.links import Links
from splitkit.errors import PipelineError
from splitkit.graph.node_values import storage_bytes
from splitkit.hardware.link_specs import Link
from splitkit.pipeline.memory import memory_over_time, static_bytes
from splitkit.pipeline.order import BACKWARD, BACKWARD_WEIGHT, Action, PipelineOrder
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import Event, MeasuredStep
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.rank_agreement import from_every
from splitkit.runtime.ranks.replicas import RngHandover, owners_of_shared
from splitkit.runtime.ranks.stage_chain import Chain, last_stage_of

PREFIX = "splitkit "
"""The start of the names of actions in torch's profiler: ``splitkit 3F0``."""

_ASKED = 8
"""How often each rank asks for the time; one of them takes as long as a message does when nothing else runs."""

_CALLS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


class StepRecorder:
    """Records what this rank does in the following steps. Create one on all ranks together, after a first step.

    On an accelerator, the recorder waits for each action to know when it ends, so a recorded step overlaps less than
    others.

    Attributes:
        steps: number of a step, as `Pipeline.steps` counts them -> its actions on this rank, by the clock of rank 0.

    Raises:
        PipelineError: SK802 if no step has run yet: the first one makes torch's stages, and warms up.
    """

    def __init__(self, pipe: Pipeline) -> None:
        if not pipe.torch_stages:
            raise PipelineError(
                "SK802", "no step has run yet", "Run one step first, because the first step is slower than the others."
            )
        self._pipe = pipe
        self._ahead = _seconds_behind_rank_0(pipe)
        self.steps: dict[int, list[Event]] = {}
        for number, stage in zip(pipe.stages, pipe.torch_stages, strict=True):
            for name, kind in _CALLS.items():
                setattr(stage, name, self._timed(getattr(stage, name), kind, number))

    def now(self) -> float:
        """Return the time in seconds by the clock of rank 0, when all work on this rank's device is done."""
        if self._pipe.device.type != "cpu":
            torch.accelerator.synchronize(self._pipe.device)
        return time.perf_counter() + self._ahead

    def measured(self) -> MeasuredStep:
        """Return the step of median time of all recorded ones. All ranks call it."""
        every = from_every(self.steps, self._pipe.group)
        whole = [number for number in self.steps if all(number in steps for steps in every)]
        if not whole:
            raise PipelineError("SK802", "no step has been recorded", "Run a step first.")
        steps = [[event for steps in every for event in steps[number]] for number in whole]
        return MeasuredStep.of(self._pipe.order.name, median_step(steps), [])

    def _timed(self, call: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            letter = kind if kwargs.get("full_backward", True) else "I"
            microbatch = self._pipe.replicas.share(self._pipe.microbatches)[chunk]
            with record_function(f"{PREFIX}{stage}{letter}{microbatch}"):
                start = self.now()
                found = call(chunk, *args, **kwargs)
                end = self.now()
            event = Event(self._pipe.rank, letter, stage, microbatch, start, end)
            self.steps.setdefault(self._pipe.steps, []).append(event)
            return found

        return timed


def median_step(steps: Sequence[list[Event]]) -> list[Event]:
    """Return the step of median time, the shorter of the two in the middle."""
    return sorted(steps, key=lambda step: max(e.end for e in step) - min(e.start for e in step))[(len(steps) - 1) // 2]


def _seconds_behind_rank_0(pipe: Pipeline) -> float:
    """Return how many seconds this rank's clock is behind rank 0's. All ranks call it."""
    told = torch.zeros(1, dtype=torch.float64, device=pipe.device)
    found, best = 0.0, float("inf")
    for rank in range(1, dist.get_world_size(pipe.group)):
        for _ in range(_ASKED):
            if pipe.rank == 0:
                dist.recv(told, group=pipe.group, group_src=rank)
                told.fill_(time.perf_counter())
                dist.send(told, group=pipe.group, group_dst=rank)
            elif pipe.rank == rank:
                asked = time.perf_counter()
                dist.send(told, group=pipe.group, group_dst=0)
                dist.recv(told, group=pipe.group, group_src=0)
                there = float(told)
                took = time.perf_counter() - asked
                if took < best:
                    found, best = there - (asked + took / 2), took
    return found


# Notes when the actions of a pipeline's training steps start and end on each rank, by one clock.
#
# The clocks of two machines differ. Each rank asks rank 0 for its time and takes the answer of the shortest round trip,
# whose error is at most half of that trip (Cristian 1989, "Probabilistic clock synchronization").


SMALL = 1 << 10
"""Bytes of the smaller of the two messages, whose time is nearly all latency."""

STATIC_BUFFERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether torch holds receive buffers for all microbatches throughout: it did in 2.11 and 2.13, not in 2.15."""


@dataclass(frozen=True)
class RankStep:
    """What one rank did in steps of a schedule.

    Attributes:
        seconds: from the barrier to the end of the rank's last action, the median over the steps.
        nbytes: peak bytes of a step, above what was allocated before it.
        steps: the actions of each timed step, by the clock of rank 0.
        held: the most bytes before the first action of a step, and those when it begins, above what was allocated
            before the step; then the same of the action, until the next one begins, and so on to the end of the last.
    """

    seconds: float
    nbytes: int
    steps: Sequence[Sequence[Event]]
    held: Sequence[tuple[int, int]]

    @property
    def busy(self) -> float:
        """Seconds in the rank's actions, the median over the steps."""
        return median(sum(event.end - event.start for event in events) for events in self.steps)

    @property
    def actions(self) -> dict[tuple[int, str], list[float]]:
        """(stage, letter) -> the seconds of each such action in all steps."""
        found: dict[tuple[int, str], list[float]] = {}
        for event in (event for events in self.steps for event in events):
            found.setdefault((event.stage, event.kind), []).append(event.end - event.start)
        return found


def one_by_one(order: PipelineOrder, microbatches: int) -> PipelineOrder:
    """Return an order in which microbatches pass all stages one after the other, so that no two ranks compute at once.

    Stages are on the ranks that they have in ``order``. If ``order`` divides backward, every second microbatch does
    too.
    """
    stages = range(len(order.rank_of))
    divided = is_divided(order)
    rows: list[list[Action]] = [[] for _ in order.ranks]
    for microbatch in range(microbatches):
        kinds = "IW" if divided and microbatch % 2 else "B"
        for stage in stages:
            rows[order.rank_of[stage]].append(Action(stage, "F", microbatch))
        for kind in kinds:
            for stage in reversed(stages):
                rows[order.rank_of[stage]].append(Action(stage, kind, microbatch))
    return PipelineOrder(f"{order.name} one by one", tuple(map(tuple, rows)))


def run_steps(pipe: Pipeline, batch: tuple[Sequence[Any], Mapping[str, Any]], repeat: int) -> RankStep:
    """Run training steps without an optimizer: one to warm up, ``repeat`` timed ones, one that measures memory."""
    pipe.step(*batch[0], **batch[1])
    recorder = StepRecorder(pipe)
    seconds = []
    for _ in range(repeat):
        dist.barrier(group=pipe.group)
        begin = recorder.now()
        pipe.step(*batch[0], **batch[1])
        seconds.append(recorder.steps[pipe.steps][-1].end - begin)
    dist.barrier(group=pipe.group)
    timed = list(recorder.steps.values())
    held = held_by_group(_torch.allocations_between(lambda: pipe.step(*batch[0], **batch[1]), PREFIX))
    # the last group is what the step does after its last action
    return RankStep(median(seconds), max(most for most, _ in held), timed, held[:-1])


def held_by_group(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return the most bytes held during each group of allocations, and those held at its end.

    Args:
        groups: bytes allocated (positive) and freed (negative), in order.
    """
    found, now = list[tuple[int, int]](), 0
    for group in groups:
        held = list(accumulate(group, initial=now))
        now = held[-1]
        found.append((max(held), now))
    return found


def of_actions(held: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return for each action the most bytes since the action before it ended, and those at its end.

    Args:
        held: `RankStep.held`.
    """
    return [(max(early, most), after) for (early, _), (most, after) in pairwise(held)][::2]


def measured_step(schedule: str, found: Sequence[RankStep]) -> MeasuredStep:
    """Return the step of median time of the timed ones, with the memory of the step in which that was measured.

    Args:
        schedule: the name of the schedule.
        found: what each rank did.
    """
    step = median_step([[event for rank in found for event in rank.steps[i]] for i in range(len(found[0].steps))])
    memory: list[list[tuple[float, int]]] = []
    for rank, of in enumerate(found):
        own = [event for event in step if event.rank == rank]
        pairs = zip(own, of_actions(of.held), strict=True)
        memory.append([point for e, (peak, after) in pairs for point in ((e.start, peak), (e.end, after))])
    return MeasuredStep.of(schedule, step, memory)


def timed_stages(
    stages: Sequence[StageCosts], seconds: Mapping[tuple[int, str], Sequence[float]], divided: bool
) -> tuple[StageCosts, ...]:
    """Return stages with the median of the measured times of each action.

    Args:
        stages: the stages, with their bytes.
        seconds: (stage, letter) -> seconds of each such action, over all ranks: `RankStep.actions`.
        divided: whether the schedule divides backward; its input and weight parts are then timed apart.
    """

    def of(stage: int, kind: str) -> float:
        return median(seconds[stage, kind])

    return tuple(
        replace(
            stage,
            forward=of(i, "F"),
            backward_input=of(i, "I" if divided else "B"),
            backward_weight=of(i, "W") if divided else 0.0,
            unit="s",
        )
        for i, stage in enumerate(stages)
    )


def with_inner_bytes(
    stages: Sequence[StageCosts], order: PipelineOrder, held: Sequence[Sequence[tuple[int, int]]]
) -> list[StageCosts]:
    """Raise the temporary bytes of each stage to what its actions were measured to hold besides what lasts.

    Kernels of convolutions copy tensors into a layout of their own, which no formula knows.

    Args:
        stages: the costs of each stage.
        order: an order in which no two stages of a rank are at work at once (`one_by_one`).
        held: rank -> `RankStep.held` of a step in this order.
    """
    found = list(stages)
    for row, own in zip(order.ranks, held, strict=True):
        # ranks compare their batches before the first action, which takes bytes that no action holds
        (_, before), first, *_ = own
        for (stage, *_), (most, after) in zip(row, [first, *of_actions(own)[1:]], strict=True):
            more = max(found[stage].temporary_bytes, most - max(before, after))
            found[stage], before = replace(found[stage], temporary_bytes=more), after
    return found


def with_passed_on(chain: Chain, stages: Sequence[StageCosts]) -> list[StageCosts]:
    """Add to the saved bytes of each stage the values that it only forwards from its predecessor to its successor.

    Args:
        chain: the stages.
        stages: the costs of each, without forwarded values (`splitkit.pipeline.stage_prices.stage_costs`).
    """
    wanted, found = last_stage_of(chain, None, True, False).wanted, list(stages)
    for stage in range(1, len(stages) - 1):
        passed = (chain.value(node).like for node in chain.passed_on(stage, wanted))
        found[stage] = replace(found[stage], saved_bytes=found[stage].saved_bytes + sum(v.nbytes for v in passed))
    return found


def with_rng_states(chain: Chain, stages: Sequence[StageCosts]) -> list[StageCosts]:
    """Add the states of random number generators that stages hand over with their activations, on CPUs."""
    found, nbytes = [], torch.get_rng_state().nbytes
    for number, stage in enumerate(stages):
        rng = RngHandover(chain, number, torch.device("cpu"), None)
        saved = stage.saved_bytes + nbytes * (rng.receives + rng.sends)
        found.append(replace(stage, saved_bytes=saved, activation_bytes=stage.activation_bytes + nbytes * rng.sends))
    return found


def without_batch(chain: Chain, stages: Sequence[StageCosts]) -> list[StageCosts]:
    """Take off what each stage holds of the batch, whose microbatches are there before a step begins."""
    found = []
    for number, stage in enumerate(stages):
        likes = (chain.facts.inputs[str(node.target)] for node in chain.inputs(number))
        given = sum(storage_bytes(like) for like in likes if like is not None)
        saved, later = max(0, stage.saved_bytes - given), stage.deferred_bytes
        late = None if later is None else min(later, max(saved, later - given))
        found.append(replace(stage, saved_bytes=saved, deferred_bytes=late))
    return found


def tied_gradients(chain: Chain, rank_of: Sequence[int]) -> dict[int, int]:
    """Return stage -> bytes of the gradients of its parameters that stages on other ranks have, too.

    A step makes these gradients apart from existing ones, so that the ranks can sum what the step adds to them.
    """
    found = dict[int, int]()
    for names in owners_of_shared(chain):
        owners = {stage: name for name, stage in names.items()}
        if len({rank_of[stage] for stage in owners}) < 2:
            continue
        # backward reaches the last of a rank's stages first, and makes the gradient there
        for stage in {rank_of[stage]: stage for stage in sorted(owners)}.values():
            parameter = chain.split.module.get_parameter(owners[stage])
            found[stage] = found.get(stage, 0) + parameter.nbytes * parameter.requires_grad
    return found


def moving_peaks(run: ScheduleRun, tied: Mapping[int, int]) -> tuple[int, ...]:
    """Return each rank's peak above what it holds from one step to the next, if all gradients exist before the step.

    Args:
        run: a simulated step.
        tied: stage -> bytes of its tied gradients, which exist from its first backward to the end of the step.
    """
    static, peaks = static_bytes(run), list[int]()
    for rank, points in enumerate(memory_over_time(run)):
        known = run.memory[rank]
        lasting = known.parameters + known.gradients + known.optimizer + static[rank]
        made = [(_first_backward(run, stage), n) for stage, n in tied.items() if run.order.rank_of[stage] == rank]
        peaks.append(max(held + sum(n for since, n in made if time >= since) for time, held in points) - lasting)
    return tuple(peaks)


def _first_backward(run: ScheduleRun, stage: int) -> float:
    """Return when the first gradients of a stage's parameters are complete."""
    kind, of = run.order.columns.kind, run.order.columns.stage
    ends = run.ends[(of == stage) & ((kind == BACKWARD) | (kind == BACKWARD_WEIGHT))]
    return float(ends.min(initial=run.seconds))


def is_divided(order: PipelineOrder) -> bool:
    """Whether an order divides backward into an input part and a weight part."""
    return any(action.kind == "I" for row in order.ranks for action in row)


def measure_links(order: PipelineOrder, nbytes: int, rounds: int = 7, group: dist.ProcessGroup | None = None) -> Links:
    """Measure the links between ranks with neighbouring stages, by half the time of a round trip.

    Args:
        order: the order, for the rank of each stage.
        nbytes: bytes of the larger message, about as many as the stages send.
        rounds: round trips of each size; the first is dropped, and the median of the others counts.
        group: the ranks; by default all.
    """
    of = order.rank_of
    pairs = sorted({(min(a, b), max(a, b)) for a, b in pairwise(of) if a != b})
    large = max(nbytes, 4 * SMALL)
    measured: dict[tuple[Any, Any], Link] = {}
    for here, there in pairs:
        dist.barrier(group=group)
        times = [_message_seconds(here, there, size, rounds, group) for size in (SMALL, large)]
        dist.broadcast(sent := torch.tensor(times, dtype=torch.float64), group=group, group_src=here)
        small, big = sent.tolist()
        rate = (large - SMALL) / max(big - small, 1e-9)
        link = Link(rate, max(0.0, small - SMALL / rate), "measured")
        measured |= {(here, there): link, (there, here): link}
    return Links(pairs=measured)


def _message_seconds(here: int, there: int, nbytes: int, rounds: int, group: dist.ProcessGroup | None) -> float:
    """Return the seconds of one message from ``here`` to ``there``; 0 on other ranks."""
    rank, found = dist.get_rank(group), list[float]()
    if rank not in (here, there):
        return 0.0
    message = torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(rounds):
        begin = time.perf_counter()
        if rank == here:
            dist.send(message, group=group, group_dst=there)
            dist.recv(message, group=group, group_src=there)
        else:
            dist.recv(message, group=group, group_src=here)
            dist.send(message, group=group, group_dst=here)
        found.append((time.perf_counter() - begin) / 2)
    return median(found[1:])
