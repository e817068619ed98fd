"""Defines an action of a pipeline schedule: one microbatch in one stage. Imports no numpy: for the command line."""

from __future__ import annotations

from typing import NamedTuple

KINDS = {"F": "forward", "B": "backward", "I": "backward, input part", "W": "backward, weight part"}
"""Torch's letter -> the computation of an action."""


class Action(NamedTuple):
    """The computation of one microbatch in one stage. ``str`` writes it as torch does: ``3F0``."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"
