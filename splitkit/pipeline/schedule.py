"""Defines a pipeline schedule, with all that the planner, simulator, runtime, pages and command line need to know.

Imports neither torch nor numpy, so that the command line can list schedules at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from splitkit.checks import MOST, is_whole, shown
from splitkit.errors import ScheduleError
from splitkit.pipeline.order import Action

OrderMaker = Callable[[int, int, int], Iterable[Iterable[Action]]]
"""(stages, microbatches, ranks) -> the actions of each rank."""
Refusal = Callable[[int, int, int], tuple[str, str] | None]
"""(stages, microbatches, ranks) -> (what is wrong with these numbers, what would do); ``None`` if they are fine."""


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    Everything else is derived from the order: microbatches in flight, the rank of each stage, bytes over time.

    Attributes:
        name: its name in results. Users may write it in any case, with or without hyphens.
        order: makes the actions of each rank. May be left out if ``window`` is given.
        window: for a schedule with one stage per rank that runs forward until this many microbatches are in flight, and
            then backward and forward in turn.
        stages_per_rank: the number of stages on each rank; ``None`` for any number, two unless the ranks are given.
        placement: ``"loop"``: stage s is on rank s mod ranks. ``"V"``: of two stages on each rank, the first ones go
            from the first rank to the last, the second ones back.
        divided: whether backward is divided into an input part (``I``) and a weight part (``W``).
        torch_class: the class in ``torch.distributed.pipelining`` that runs it. ``""``: torch has none, and its
            interpreter of actions runs the order.
        word: its spelling on the command line, a second name; the name in lower case if left out.
        refusal: says which numbers of stages, microbatches and ranks the schedule does not take, besides those that do
            not fit ``stages_per_rank``.
        swept: whether `splitkit.sweep` tries it by default.

    Raises:
        ScheduleError: SK333 if fields contradict each other; names the field.
    """

    name: str
    order: OrderMaker | None = None
    window: Window | None = None
    stages_per_rank: int | None = 1
    placement: Literal["loop", "V"] = "loop"
    divided: bool = False
    torch_class: str = ""
    word: str = ""
    refusal: Refusal | None = None
    swept: bool = False

    def __post_init__(self) -> None:
        for name in (self.name, self.word or self.name):
            if not isinstance(name, str) or not plain(name):
                raise _unsound(self, f"the name {shown(name)}", "Use letters and digits.")
        if not self.word:
            object.__setattr__(self, "word", self.name.lower())
        if self.stages_per_rank is not None and not is_whole(self.stages_per_rank, 1):
            raise _unsound(self, f"stages_per_rank={shown(self.stages_per_rank)}", "Use a number >= 1, or None.")
        if self.placement not in ("loop", "V") or (self.placement == "V" and self.stages_per_rank != 2):
            what = f"placement={shown(self.placement)} with stages_per_rank={self.stages_per_rank}"
            raise _unsound(self, what, 'Use "loop", or "V" with two stages on each rank.')
        if (self.order is None) == (self.window is None):
            raise _unsound(self, "not one of order and window", "Give order=, or window= and no order.")
        if self.window is not None and (not self.is_single or self.divided):
            text = "a window, and several stages on a rank or a divided backward"
            raise _unsound(self, text, "Give order= in place of window=.")

    @property
    def is_single(self) -> bool:
        """Whether each rank has one stage."""
        return self.stages_per_rank == 1

    @property
    def usual_stages_per_rank(self) -> int:
        """The number of stages per rank if the number of ranks is not given."""
        return 2 if self.stages_per_rank is None else self.stages_per_rank

    def rank_of(self, stage: int, ranks: int) -> int:
        """Return the rank of a stage."""
        return rank_of_stage(self.placement, stage, ranks)

    def windows(self, stages: int, microbatches: int) -> list[int] | None:
        """Return the most microbatches that each stage has in flight; ``None`` without ``window``.

        Args:
            stages: the number of stages.
            microbatches: of a step.

        Raises:
            ScheduleError: SK331 for windows under which stages could deadlock.
        """
        if self.window is None:
            return None
        found = [min(self.window(stages, stage), microbatches) for stage in range(stages)]
        if min(found) < 1:
            raise ScheduleError("SK331", f"{self.name} has a window of {min(found)} microbatches", "Use 1 or more.")
        if pair := stalls(found):
            before, stage = pair
            text = f"{self.name} may never end: stage {stage} has {found[stage]} microbatches in flight, and"
            remedy = "Let earlier stages have at least as many in flight."
            raise ScheduleError("SK331", f"{text} stage {before} before it {found[before]}", remedy)
        return found

    def rows(self, stages: int, microbatches: int, ranks: int) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank.

        Raises:
            ScheduleError: SK330 if the schedule does not allow these numbers; says which it allows.
        """
        self.require(stages, microbatches, ranks)
        if self.order is not None:
            return tuple(tuple(actions) for actions in self.order(stages, microbatches, ranks))
        numbers, windows = range(microbatches), self.windows(stages, microbatches) or []
        return tuple(tuple(windowed_row(stage, numbers, window)) for stage, window in enumerate(windows))

    def usual_ranks(self, stages: int) -> int:
        """Return the number of ranks for a number of stages.

        Raises:
            ScheduleError: SK330 if ranks would have different numbers of stages.
        """
        local = self.usual_stages_per_rank
        if stages % local or not stages:
            low = stages - stages % local
            numbers = f"{low} or {low + local}" if low else f"{local}"
            rest = "." if self.stages_per_rank else ", or say how many ranks there are: ranks=..."
            text = f"{self.name} of {stages} stages puts {_counted(local)} on each rank"
            raise ScheduleError("SK330", text, f"Split into {numbers} stages{rest}")
        return stages // local

    def require(self, stages: int, microbatches: int, ranks: int) -> None:
        """Refuse numbers that the schedule does not allow.

        Raises:
            ScheduleError: SK330; says which numbers it allows.
        """
        require_numbers(stages, microbatches, ranks)
        numbers = f"{self.name} of {stages} stages and {microbatches} microbatches on {ranks} ranks"
        local = self.stages_per_rank
        if local is not None and stages != local * ranks:
            what = f"split into {local * ranks} stages"
            what = f"use {stages} ranks, or {what}" if local == 1 else what
            plural = "" if local == 1 else "s"
            remedy = f"{self.name} has {_counted(local)} stage{plural} on each rank: {what}."
            raise ScheduleError("SK330", numbers, remedy)
        if stages % ranks:
            whole = f"{stages - stages % ranks} or " if stages > ranks else ""
            remedy = f"All ranks have the same number of stages: split into {whole}{stages + ranks - stages % ranks}."
            raise ScheduleError("SK330", numbers, remedy)
        refused = None if self.refusal is None else self.refusal(stages, microbatches, ranks)
        if refused is not None:
            reason, remedy = refused
            raise ScheduleError("SK330", f"{numbers}{': ' * bool(reason)}{reason}", remedy)


def rank_of_stage(placement: Literal["loop", "V"], stage: int, ranks: int) -> int:
    """Return the rank of a stage: in a loop around the ranks, or there and back (`Schedule.placement`)."""
    return 2 * ranks - 1 - stage if placement == "V" and stage >= ranks else stage % ranks


def require_numbers(stages: object, microbatches: object, ranks: object = 1) -> None:
    """Refuse numbers that no schedule allows.

    Raises:
        ScheduleError: SK330.
    """
    for what, number in (("stages", stages), ("microbatches", microbatches), ("ranks", ranks)):
        if not is_whole(number, 1):
            raise ScheduleError("SK330", f"{shown(number)} {what}", "Give a whole number, 1 or more.")
    if int(stages) * int(microbatches) > MOST:  # type: ignore[call-overload]
        text = f"{shown(stages)} stages and {shown(microbatches)} microbatches"
        raise ScheduleError("SK330", text, f"A step has at most {MOST} forward actions: use fewer.")


def plain(name: str) -> str:
    """Return the letters and digits of a name in lower case, by which spellings are compared."""
    return "".join(c for c in name.lower() if c.isalnum())


def _counted(number: int) -> str:
    return {1: "one", 2: "two", 3: "three", 4: "four"}.get(number, str(number))


def _unsound(schedule: Schedule, what: str, remedy: str) -> ScheduleError:
    return ScheduleError("SK333", f"Schedule({shown(schedule.name)}) has {what}", remedy)


# Makes orders with one stage per rank: forward until a window of microbatches is full, then B and F in turn.
#
# The *window* of a stage is the most microbatches that it has in flight, between forward and the end of backward::
#
#     window 1    F0 B0 F1 B1 F2 B2          the last stage of 1F1B
#     window 2    F0 F1 B0 F2 B1 B2          the stage before it
#     window 3    F0 F1 F2 B0 B1 B2          all three microbatches, as in GPipe


Window = Callable[[int, int], int]
"""(number of stages, a stage) -> the most microbatches that the stage has in flight."""


def unlimited(stages: int, stage: int) -> int:
    """Return a window for all microbatches of a step, as in GPipe (Huang et al., NeurIPS 2019)."""
    return MOST


def as_stages_behind(stages: int, stage: int) -> int:
    """Return one microbatch plus one per later stage: 1F1B, or PipeDream-flush (Narayanan et al., ICML 2021)."""
    return stages - stage


def twice_as_stages_behind(stages: int, stage: int) -> int:
    """Return one microbatch plus two per later stage: eager 1F1B (Zhuang et al., MLSys 2023, as Alpa runs it).

    A message between two stages then has the time of one microbatch to arrive, hidden behind computation.
    """
    return 1 + 2 * (stages - 1 - stage)


def stalls(windows: Sequence[int]) -> tuple[int, int] | None:
    """Find two stages whose windows may deadlock, the earlier one first; ``None`` if there are none.

    Proof: let m be the least microbatch whose backward is not done. Until it is, a stage with window w runs forward of
    microbatch m + w - 1 at most. An earlier stage with window w' reaches that forward without needing a backward of m
    or later if w <= w'. If this holds for all pairs of stages, backward of m completes from the last stage to the
    first.

    Args:
        windows: stage -> its window, at most the number of microbatches.
    """
    first = 0
    for stage, window in enumerate(windows):
        if window > windows[first]:
            return first, stage
        if window < windows[first]:
            first = stage
    return None


def windowed_row(stage: int, numbers: Sequence[int], window: int) -> Iterator[Action]:
    """Yield forward and backward of these microbatches, with at most ``window`` in flight."""
    window = min(window, len(numbers))
    for i in range(len(numbers) + window - 1):
        if i < len(numbers):
            yield Action(stage, "F", numbers[i])
        if i >= window - 1:
            yield Action(stage, "B", numbers[i - window + 1])
