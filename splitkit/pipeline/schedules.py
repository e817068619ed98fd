"""Registers pipeline schedules: one entry each, which the planner, simulator, runtime, pages and command line read.

To add a schedule to splitkit, add an entry here; users add theirs with `register_schedule`. Listing them loads neither
torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from splitkit.checks import shown
from splitkit.errors import ScheduleError, nearest
from splitkit.pipeline.order import Action, v_half, v_min
from splitkit.pipeline.schedule import (
    Schedule,
    as_stages_behind,
    plain,
    require_numbers,
    twice_as_stages_behind,
    unlimited,
)

if TYPE_CHECKING:
    from splitkit.pipeline.order import PipelineOrder


def _torchs(torch_class: str, stages: int, microbatches: int, ranks: int) -> list[list[Action]]:
    from splitkit.pipeline.torch_orders import torch_rows

    return torch_rows(torch_class, stages, microbatches, ranks)


def _fewer_than_stages(other: str, stages: int, microbatches: int, ranks: int) -> tuple[str, str] | None:
    if microbatches >= stages:
        return None
    return "", f"Use {stages} microbatches or more, or fewer stages; {other} takes fewer."


def _no_equal_rounds(stages: int, microbatches: int, ranks: int) -> tuple[str, str] | None:
    rounds = max(1, microbatches // ranks)
    if not microbatches % rounds:
        return None
    fits = [m for m in range(1, microbatches + 2 * ranks) if not m % max(1, m // ranks)]
    near = max(m for m in fits if m < microbatches), min(m for m in fits if m > microbatches)
    return f"they do not go into {rounds} equal rounds", f"Use {near[0]} or {near[1]} microbatches."


def _of_torch(name: str, **fields: Any) -> Schedule:
    """Return a schedule whose order is read off torch's class."""
    return Schedule(name, partial(_torchs, f"Schedule{name}"), torch_class=f"Schedule{name}", **fields)


_BUILT_IN = (
    Schedule("GPipe", window=unlimited, torch_class="ScheduleGPipe", swept=True),
    Schedule(
        "1F1B",
        window=as_stages_behind,
        torch_class="Schedule1F1B",
        refusal=partial(_fewer_than_stages, "GPipe"),
        swept=True,
    ),
    Schedule("Eager1F1B", window=twice_as_stages_behind, word="eager-1f1b"),
    _of_torch(
        "Interleaved1F1B",
        stages_per_rank=None,
        word="interleaved-1f1b",
        refusal=_no_equal_rounds,
        swept=True,
    ),
    _of_torch("LoopedBFS", stages_per_rank=None, word="looped-bfs"),
    _of_torch(
        "InterleavedZeroBubble",
        stages_per_rank=None,
        divided=True,
        word="interleaved-zero-bubble",
        refusal=_no_equal_rounds,
    ),
    _of_torch("ZBVZeroBubble", stages_per_rank=2, placement="V", divided=True, word="zbv", swept=True),
    _of_torch(
        "DualPipeV",
        stages_per_rank=2,
        placement="V",
        divided=True,
        refusal=partial(_fewer_than_stages, "ZBVZeroBubble"),
    ),
    Schedule("V-Half", v_half, stages_per_rank=2, placement="V", divided=True),
    Schedule("V-Min", v_min, stages_per_rank=2, placement="V", divided=True),
)

USUAL_MICROBATCHES = 8
"""The microbatches of a step that runs on ranks, if neither the caller nor an order of their own says how many."""

_KNOWN = {plain(name): schedule for schedule in _BUILT_IN for name in (schedule.name, schedule.word)}


def known_schedules() -> tuple[Schedule, ...]:
    """Return all known schedules in the order in which they were registered."""
    return tuple(dict.fromkeys(_KNOWN.values()))


def is_built_in(name: str) -> bool:
    """Return whether splitkit itself has a schedule of this name."""
    return _KNOWN.get(plain(name)) in _BUILT_IN


def schedule_named(name: object) -> Schedule:
    """Return the schedule of this name, in any case, with or without hyphens.

    Raises:
        ScheduleError: SK330 if there is none; lists the known ones.
    """
    spelled = plain(name) if isinstance(name, str) else ""
    if spelled not in _KNOWN:
        known = [schedule.name for schedule in known_schedules()]
        remedy = nearest(spelled, known, f"Known: {', '.join(known)}.")
        raise ScheduleError("SK330", f"no schedule is called {shown(name)}", remedy)
    return _KNOWN[spelled]


def words_of(fits: Callable[[Schedule], object] = bool) -> str:
    """List the schedules that fit, for help and errors: ``gpipe, 1f1b or zbv``; all schedules by default."""
    words = [schedule.word for schedule in known_schedules() if fits(schedule)]
    return " or ".join([*filter(None, [", ".join(words[:-1])]), *words[-1:]])


def register_schedule(schedule: Schedule) -> None:
    """Register a schedule under its name, for policies, `splitkit.simulate_schedule`, pipelines, pages and sweeps.

    ::

        def one_by_one(stages, microbatches, ranks):
            return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(stages)]

        register_schedule(Schedule("one by one", one_by_one))
        splitkit.policies.Stages(4, schedule="one by one")

    A schedule that was registered under the same name is replaced, so that a notebook cell can run again.

    Raises:
        ScheduleError: SK333 if a name is taken by another schedule.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError("SK333", f"{shown(schedule)} is not a schedule", "Give a splitkit.extend.Schedule.")
    names = [plain(name) for name in (schedule.name, schedule.word)]
    for name in names:
        other = _KNOWN.get(name, schedule)
        if other != schedule and (other.name != schedule.name or other in _BUILT_IN):
            text = f"{other.name} has the name {name!r}"
            raise ScheduleError("SK333", text, "Give the schedule another name or word.")
    for name in [name for name, other in _KNOWN.items() if other.name == schedule.name]:
        del _KNOWN[name]
    _KNOWN.update(dict.fromkeys(names, schedule))


def pipeline_order(schedule: str, stages: int, microbatches: int, ranks: int | None = None) -> PipelineOrder:
    """Return the order of actions on each rank under a schedule.

    In DualPipeV's overlapped pairs forward runs before backward, as in torch.

    Args:
        schedule: the name of one of `known_schedules`, in any case, with or without hyphens.
        stages: the number of stages.
        microbatches: the number of microbatches in a step.
        ranks: the number of ranks; ``None``: as many as stages if each rank has one, otherwise half as many.

    Raises:
        ScheduleError: SK330 if there is no such schedule, or it does not allow these numbers; SK331 if a registered
            schedule makes no valid order.
    """
    found = schedule_named(schedule)
    if ranks is None:
        require_numbers(stages, microbatches)
        ranks = found.usual_ranks(stages)
    found.require(stages, microbatches, ranks)
    return _order(found, stages, microbatches, ranks)


def schedule_of(order: PipelineOrder) -> Schedule | None:
    """Return the known schedule whose order this is; ``None`` for any other order, whatever its name.

    An order of messages is another one, since torch's classes place the messages themselves.
    """
    from splitkit.pipeline.message_order import MessageOrder

    if isinstance(order, MessageOrder):
        return None
    found = _KNOWN.get(plain(order.name))
    if found is None or found.name != order.name:
        return None
    try:
        same = pipeline_order(found.name, len(order.rank_of), order.microbatches, len(order.ranks))
    except ScheduleError:
        return None
    return found if same is order or same.ranks == order.ranks else None


@lru_cache(maxsize=64)
def _order(schedule: Schedule, stages: int, microbatches: int, ranks: int) -> PipelineOrder:
    from splitkit.pipeline.order import PipelineOrder

    order = PipelineOrder(schedule.name, schedule.rows(stages, microbatches, ranks))
    _require_as_told(schedule, order, stages, microbatches, ranks)
    return order


def _require_as_told(schedule: Schedule, order: PipelineOrder, stages: int, microbatches: int, ranks: int) -> None:
    """Refuse an order that contradicts its entry, on which other packages rely."""
    told = tuple(schedule.rank_of(stage, ranks) for stage in range(stages))
    asked, has = (stages, microbatches, ranks), (len(order.rank_of), order.microbatches, len(order.ranks))
    if has != asked:
        text = f"{schedule.name} has {has} stages, microbatches and ranks where {asked} were asked for"
        raise ScheduleError("SK331", text, "Correct its order=.")
    if order.rank_of != told:
        text = f"{schedule.name} has its stages on the ranks {order.rank_of}, and placement says {told}"
        raise ScheduleError("SK331", text, "Correct its order= or placement=.")
    if not schedule.divided and any(action.kind == "I" for row in order.ranks for action in row):
        text = f"{schedule.name} divides backward, but its entry does not say so"
        raise ScheduleError("SK331", text, "Set divided=True.")
