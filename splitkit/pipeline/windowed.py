"""Makes orders with one stage per rank: forward until a window of microbatches is full, then B and F in turn.

The *window* of a stage is the most microbatches that it has in flight, between forward and the end of backward::

    window 1    F0 B0 F1 B1 F2 B2          the last stage of 1F1B
    window 2    F0 F1 B0 F2 B1 B2          the stage before it
    window 3    F0 F1 F2 B0 B1 B2          all three microbatches, as in GPipe
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from splitkit.checks import MOST
from splitkit.pipeline.action import Action

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
