"""Names of the parts of a joint graph that is divided into pipeline stages.

Stage ``s`` has the parts ``("forward", s)`` and ``("backward", s)``, or ``("forward", s)``, ``("input", s)`` and
``("weight", s)``, where backward is two graphs: one computes the gradient that goes to the stage before, the other the
gradients of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from splitkit.plans.parts import PartKey

Half = Literal["forward", "backward", "input", "weight"]
HALVES: tuple[Half, ...] = ("forward", "backward", "input", "weight")
FULL_BACKWARD: tuple[Half, ...] = ("forward", "backward")
SPLIT_BACKWARD: tuple[Half, ...] = ("forward", "input", "weight")


class StagePart(NamedTuple):
    """The key of a part, equal to the plain tuple ``(half, stage)``."""

    half: Half
    stage: int


def stage_part(key: PartKey) -> StagePart | None:
    """Return the key as a `StagePart`, or ``None`` for a key of another kind."""
    if not isinstance(key, tuple) or len(key) != 2:
        return None
    half, stage = key
    if half not in HALVES or type(stage) is not int or stage < 0:
        return None
    return StagePart(half, stage)


def known_part(key: PartKey) -> StagePart:
    """Return the key of a plan whose keys have been checked as a `StagePart`."""
    part = stage_part(key)
    assert part is not None
    return part


def is_staged(keys: Iterable[PartKey]) -> bool:
    """Return whether any of the parts of a plan is of a pipeline stage."""
    return any(stage_part(key) is not None for key in keys)
