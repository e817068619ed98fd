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

from splitkit import _torch
from splitkit.costs.links import Link, Links
from splitkit.pipeline.action import Action
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.runtime.ranks.last_stage import last_stage_of
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.stage_chain import Chain

SMALL = 1 << 10
"""Bytes of the smaller of the two messages, whose time is nearly all latency."""

STATIC_BUFFERS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
"""Whether torch holds receive buffers for all microbatches throughout: it did in 2.11 and 2.13, not in 2.15."""

_CALLS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


@dataclass(frozen=True)
class RankStep:
    """What one rank did in steps of a schedule.

    Attributes:
        seconds: from the barrier to the end of the rank's last action, the median over the steps.
        busy: seconds in its actions, the median over the steps.
        actions: (stage, letter) -> the seconds of each such action in all steps.
        nbytes: peak bytes of a step, above what was allocated before it.
    """

    seconds: float
    busy: float
    actions: Mapping[tuple[int, str], list[float]]
    nbytes: int


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
    watch = _ActionTimer(pipe)
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


class _ActionTimer:
    """Times the actions of a rank's stages.

    Attributes:
        actions: as `RankStep.actions`.
        busy: seconds in all actions.
        end: when the last action ended, by ``time.perf_counter``.
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


def median_or_none(found: Sequence[float] | None) -> float | None:
    """Return the median; ``None`` of no numbers."""
    return median(found) if found else None


def is_divided(order: PipelineOrder) -> bool:
    """Whether an order divides backward into an input part and a weight part."""
    return any(action.kind == "I" for row in order.ranks for action in row)


def measure_links(order: PipelineOrder, nbytes: int, rounds: int = 7) -> Links:
    """Measure the links between ranks with neighbouring stages, by half the time of a round trip.

    Args:
        order: the order, for the rank of each stage.
        nbytes: bytes of the larger message, about as many as the stages send.
        rounds: round trips of each size; the first is dropped, and the median of the others counts.
    """
    of = order.rank_of
    pairs = sorted({(min(a, b), max(a, b)) for a, b in pairwise(of) if a != b})
    large = max(nbytes, 4 * SMALL)
    measured: dict[tuple[Any, Any], Link] = {}
    for here, there in pairs:
        dist.barrier()
        times = [_message_seconds(here, there, size, rounds) for size in (SMALL, large)]
        dist.broadcast(sent := torch.tensor(times, dtype=torch.float64), src=here)
        small, big = sent.tolist()
        rate = (large - SMALL) / max(big - small, 1e-9)
        link = Link(rate, max(0.0, small - SMALL / rate), "measured")
        measured |= {(here, there): link, (there, here): link}
    return Links(pairs=measured)


def _message_seconds(here: int, there: int, nbytes: int, rounds: int) -> float:
    """Return the seconds of one message from ``here`` to ``there``; 0 on other ranks."""
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
