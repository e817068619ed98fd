"""The orders of torch's own pipeline schedules, read off its classes without a process group.

Private torch API, checked on 2.11, 2.13 and 2.15; ``tests/pipeline/test_schedule_torch.py`` fails when it goes away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules

from splitkit.checks import MOST, is_whole, shown
from splitkit.errors import ScheduleError, nearest
from splitkit.pipeline.order import KINDS, Action, PipelineOrder

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""What `pipeline_order` knows: the plain name -> what torch calls it."""

_SINGLE = {"GPipe", "1F1B"}
_V = {"ZBVZeroBubble", "DualPipeV"}
_ROUNDS = {"Interleaved1F1B", "InterleavedZeroBubble"}
_DIVIDING = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}


def pipeline_order(schedule: str, stages: int, microbatches: int, ranks: int | None = None) -> PipelineOrder:
    """What each rank does under one of torch's schedules.

    Of DualPipeV's overlapped pairs the forward runs first, then the backward, as torch runs them.

    Args:
        schedule: torch's name, in any case, with or without hyphens: one of `SCHEDULES`, or ``"zbv"``.
        stages: how many the model has.
        microbatches: how many there are in a step.
        ranks: how many ranks share the stages. ``None``: as many as stages for GPipe and 1F1B, half as many otherwise.

    Raises:
        ScheduleError: SK330 if there is no such schedule, or it does not go with these numbers.
    """
    name = _torchs_name(schedule)
    for what, number in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if number is not None and not is_whole(number, 1):
            raise ScheduleError("SK330", f"{shown(number)} {what}", "Give a whole number, 1 or more.")
    if stages * microbatches > MOST:
        text = f"{shown(stages)} stages and {shown(microbatches)} microbatches"
        raise ScheduleError("SK330", text, f"A step has {MOST} forward actions at most: use fewer.")
    if ranks is None:
        ranks = stages if name in _SINGLE else stages // 2
        if ranks * (1 if name in _SINGLE else 2) != stages:
            raise ScheduleError("SK330", f"{name} of {stages} stages puts two on each rank", _even(name, stages))
    _check(name, stages, microbatches, ranks)
    return _order(name, stages // ranks, microbatches, ranks)


def is_single(schedule: str) -> bool:
    """Whether a schedule has one stage on each rank (SK330 if there is no such schedule)."""
    return _torchs_name(schedule) in _SINGLE


def divides(schedule: str) -> bool:
    """Whether a schedule divides backward into a part for the input and one for weights (SK330 as `is_single`)."""
    return _torchs_name(schedule) in _DIVIDING


def _torchs_name(schedule: object) -> str:
    plain = "".join(c for c in schedule.lower() if c.isalnum()) if isinstance(schedule, str) else ""
    plain = {"zbv": "zbvzerobubble"}.get(plain, plain)
    if plain not in SCHEDULES:
        known = SCHEDULES.values()
        raise ScheduleError(
            "SK330", f"no schedule is called {shown(schedule)}", nearest(plain, known, f"Known: {', '.join(known)}.")
        )
    return SCHEDULES[plain]


def _even(name: str, stages: int) -> str:
    numbers = f"{stages + 1}" if stages < 2 else f"{stages - 1} or {stages + 1}"
    return f"Split into {numbers} stages{'.' if name in _V else ', or say how many ranks there are: ranks=...'}"


def _check(name: str, stages: int, microbatches: int, ranks: int) -> None:
    """What torch's classes ask for, with a remedy."""
    numbers = f"{name} of {stages} stages and {microbatches} microbatches on {ranks} ranks"
    if name in _SINGLE and stages != ranks:
        what = f"use {stages} ranks, or split into {ranks} stages"
        raise ScheduleError("SK330", numbers, f"{name} has one stage on each rank: {what}.")
    if name in _V and stages != 2 * ranks:
        raise ScheduleError("SK330", numbers, f"{name} has two stages on each rank: split into {2 * ranks} stages.")
    if stages % ranks:
        whole = f"{stages - stages % ranks} or " if stages > ranks else ""
        raise ScheduleError(
            "SK330", numbers, f"Each rank has as many stages: split into {whole}{stages + ranks - stages % ranks}."
        )
    if name in {"1F1B", "DualPipeV"} and microbatches < stages:
        fewer = "GPipe takes" if name == "1F1B" else "ZBVZeroBubble takes"
        raise ScheduleError("SK330", numbers, f"Use {stages} microbatches or more, or fewer stages; {fewer} fewer.")
    rounds = max(1, microbatches // ranks)
    if name in _ROUNDS and microbatches % rounds:
        fits = [m for m in range(1, microbatches + 2 * ranks) if not m % max(1, m // ranks)]
        near = max(m for m in fits if m < microbatches), min(m for m in fits if m > microbatches)
        text = f"{numbers}: they do not go into {rounds} equal rounds"
        raise ScheduleError("SK330", text, f"Use {near[0]} or {near[1]} microbatches.")


@lru_cache(maxsize=64)
def _order(name: str, local: int, microbatches: int, ranks: int) -> PipelineOrder:
    lists = _torchs_lists(name, local, microbatches, ranks)
    if name == "1F1B" and not _whole(lists, microbatches):
        lists = [list(_one_forward_one_backward(rank, ranks, microbatches)) for rank in range(ranks)]
    return PipelineOrder(name, tuple(tuple(actions) for actions in lists))


def _torchs_lists(name: str, local: int, microbatches: int, ranks: int) -> list[list[Action]]:
    """`pipeline_order` of a schedule object of torch, ``[ranks]`` lists.

    The object is made of stand-ins for stages that know only how many there are, and without the sends and receives,
    which it would work out at once (a minute for 64 ranks and 512 microbatches on 2.15).
    """
    base: Any = schedules.get_schedule_class(name)
    # _prepare_schedule_with_comms adds sends and receives and is called last in __init__: 2.11, 2.13, 2.15.
    made = base if name in _SINGLE else type(base.__name__, (base,), {"_prepare_schedule_with_comms": _skip})
    stages = [
        SimpleNamespace(group_rank=0, group_size=ranks, num_stages=local * ranks, submod=None) for _ in range(local)
    ]
    order = made(stages[0] if name in _SINGLE else stages, microbatches).pipeline_order  # 2.11, 2.13, 2.15
    return [list(_read(order[rank])) for rank in range(ranks)]


def _skip(self: object, actions: object) -> None:
    """Instead of the sends and receives."""


def _read(actions: Iterable[Any]) -> Iterator[Action]:
    """What computes, of schedules._Action (2.11, 2.13, 2.15); ``None`` is idle time, found by the simulation."""
    for action in actions:
        for one in () if action is None else action.sub_actions or (action,):
            kind = one.computation_type.value
            if kind in KINDS:
                yield Action(one.stage_index, kind, one.microbatch_index)


def _whole(lists: list[list[Action]], microbatches: int) -> bool:
    """Whether each stage runs forward of microbatches 0, 1, 2 ...

    Torch's Schedule1F1B numbers those of the last rank from 1 (2.11, 2.13, 2.15); what it executes is right.
    """
    return all([a.microbatch for a in actions if a.kind == "F"] == list(range(microbatches)) for actions in lists)


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    """PipeDream-flush (Narayanan et al. 2021), as Schedule1F1B executes it: warm up, then one F and one B in turn."""
    ahead = ranks - 1 - rank
    yield from (Action(rank, "F", m) for m in range(ahead))
    for m in range(microbatches):
        if m + ahead < microbatches:
            yield Action(rank, "F", m + ahead)
        yield Action(rank, "B", m)
