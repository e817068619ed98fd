"""What a pipeline takes for real, to hold a simulation against it: times of stages and links, and whole steps.

Stages are timed while all other ranks wait, one microbatch after the other; links by messages of two sizes that go
there and back. A step is timed from a barrier to the end of the last action of any rank: adding up the gradients of
tied weights and the optimizer come later. Its memory is what torch's allocator gave and took back on the CPU, in
a step of its own, above what was there when it began.
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

from splitkit import _torch
from splitkit.costs.links import Link, Links
from splitkit.pipeline.order import Action, PipelineOrder
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.runtime.chain import Chain
from splitkit.runtime.ends import ends_of
from splitkit.runtime.pipeline import Pipeline

SMALL = 1 << 10
"""Bytes of the smaller message."""

STATIC_BUFFERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether torch holds receive buffers for all microbatches all the time, as before 2.15."""

_CALLS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


@dataclass(frozen=True)
class RankStep:
    """What one rank did in steps of a schedule.

    Attributes:
        seconds: from the barrier to the end of its last action, the median of the steps.
        busy: seconds in its actions, the same.
        actions: "stage, letter" -> seconds of each such action, of all steps.
        nbytes: the most that it took above what was there, in a step.
    """

    seconds: float
    busy: float
    actions: Mapping[tuple[int, str], list[float]]
    nbytes: int


def one_by_one(order: PipelineOrder, microbatches: int) -> PipelineOrder:
    """Microbatches one after the other through all stages, placed as in ``order``: no two ranks compute at once.

    Every other one has its backward divided, if ``order`` divides any.
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
    """Steps of training, without an optimizer: one to set up, some that are timed, one whose memory is counted."""
    pipe.step(*batch[0], **batch[1])
    watch = _Watch(pipe)
    seconds, busy = [], []
    for _ in range(repeat):
        dist.barrier(group=pipe.group)
        begin, before = time.perf_counter(), watch.busy
        pipe.step(*batch[0], **batch[1])
        seconds.append(watch.end - begin)
        busy.append(watch.busy - before)
    dist.barrier(group=pipe.group)
    actions = {kind: list(found) for kind, found in watch.actions.items()}
    changes = _torch.allocations(lambda: pipe.step(*batch[0], **batch[1]))
    return RankStep(median(seconds), median(busy), actions, max(accumulate(changes, initial=0)))


class _Watch:
    """Times the actions of a rank's stages.

    Attributes:
        actions: see `RankStep`.
        busy: seconds in all of them.
        end: when the last one ended.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.actions: dict[tuple[int, str], list[float]] = {}
        self.busy = self.end = 0.0
        for number, stage in zip(pipe.stages, pipe.torch_stages, strict=True):
            for name, kind in _CALLS.items():
                setattr(stage, name, self._timed(getattr(stage, name), kind, number))

    def _timed(self, call: Callable[..., Any], kind: str, stage: int) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            found = call(*args, **kwargs)
            self.end = time.perf_counter()
            letter = kind if kwargs.get("full_backward", True) else "I"
            self.actions.setdefault((stage, letter), []).append(self.end - begin)
            self.busy += self.end - begin
            return found

        return timed


def timed_stages(
    stages: Sequence[StageCosts], seconds: Mapping[tuple[int, str], Sequence[float]], divided: bool
) -> tuple[StageCosts, ...]:
    """Stages with measured times: the median of each action.

    Args:
        stages: what they hold.
        seconds: as `RankStep.actions`, of all ranks.
        divided: whether the schedule divides backward: its whole ones then count as both parts together.
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


def with_passed_on(chain: Chain, stages: Sequence[StageCosts]) -> list[StageCosts]:
    """What stages hold of a microbatch that talk to their neighbours only: also what they pass on without reading it.

    Args:
        chain: the stages.
        stages: what each costs wherever values come from (`splitkit.pipeline.stageprices.stage_costs`).
    """
    wanted, found = ends_of(chain, None, True, False).wanted, list(stages)
    for stage in range(1, len(stages) - 1):
        passed = (chain.value(node).like for node in chain.passed_on(stage, wanted))
        found[stage] = replace(found[stage], saved_bytes=found[stage].saved_bytes + sum(v.nbytes for v in passed))
    return found


def middle(found: Sequence[float] | None) -> float | None:
    """The median, if there is one."""
    return median(found) if found else None


def is_divided(order: PipelineOrder) -> bool:
    """Whether it has backwards in two parts."""
    return any(action.kind == "I" for row in order.ranks for action in row)


def ping(order: PipelineOrder, nbytes: int, rounds: int = 7) -> Links:
    """The links between ranks that have neighbouring stages, by half the time of a message there and back.

    Args:
        order: which stage is where.
        nbytes: of the larger message, as large as what stages send.
        rounds: how often each; the median counts, the first one does not.
    """
    of = order.rank_of
    pairs = sorted({(min(a, b), max(a, b)) for a, b in pairwise(of) if a != b})
    large = max(nbytes, 4 * SMALL)
    measured: dict[tuple[Any, Any], Link] = {}
    for here, there in pairs:
        dist.barrier()
        times = [_trips(here, there, size, rounds) for size in (SMALL, large)]
        dist.broadcast(sent := torch.tensor(times, dtype=torch.float64), src=here)
        small, big = sent.tolist()
        rate = (large - SMALL) / max(big - small, 1e-9)
        link = Link(rate, max(0.0, small - SMALL / rate), "measured")
        measured |= {(here, there): link, (there, here): link}
    return Links(pairs=measured)


def _trips(here: int, there: int, nbytes: int, rounds: int) -> float:
    """Seconds of a message one way; 0 on other ranks."""
    rank, found = dist.get_rank(), list[float]()
    if rank not in (here, there):
        return 0.0
    message = torch.zeros(nbytes, dtype=torch.uint8)
    for _ in range(rounds):
        begin = time.perf_counter()
        if rank == here:
            dist.send(message, there)
            dist.recv(message, there)
        else:
            dist.recv(message, here)
            dist.send(message, here)
        found.append((time.perf_counter() - begin) / 2)
    return median(found[1:])
