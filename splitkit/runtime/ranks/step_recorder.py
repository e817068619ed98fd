"""Notes when the actions of a pipeline's training steps start and end on each rank, by one clock.

The clocks of two machines differ. Each rank asks rank 0 for its time and takes the answer of the shortest round trip,
whose error is at most half of that trip (Cristian 1989, "Probabilistic clock synchronization").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from splitkit.errors import PipelineError
from splitkit.pipeline.measured_step import MeasuredStep
from splitkit.pipeline.trace import Event
from splitkit.runtime.ranks.pipeline import Pipeline

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
        every: list[Any] = [None] * dist.get_world_size(self._pipe.group)
        dist.all_gather_object(every, self.steps, group=self._pipe.group)
        whole = [number for number in self.steps if all(number in steps for steps in every)]
        if not whole:
            raise PipelineError("SK802", "no step has been recorded", "Run a step first.")
        steps = [[event for steps in every for event in steps[number]] for number in whole]
        return MeasuredStep.of(self._pipe.order.name, median_step(steps), [])

    def _timed(self, call: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def timed(chunk: int, *args: Any, **kwargs: Any) -> Any:
            letter = kind if kwargs.get("full_backward", True) else "I"
            microbatch = self._pipe.microbatch_of(chunk)
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
