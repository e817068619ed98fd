"""Describes a format: where its cuts may fall, what it carries, how it is written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from splitkit.exports.carried_plan import CarriedPlan, StagesInText
from splitkit.exports.layer_sequence import Level

Ties = Literal["any", "ends", "copies"]
"""What becomes of a parameter in several stages: the tool keeps all copies equal, only those of the embedding and the
head, or none, so that copies are right in inference alone."""


@dataclass(frozen=True)
class ExportFormat:
    """One format of another tool.

    Attributes:
        name: the word of ``--to``.
        tool: the tool, for people.
        where: where the text goes.
        level: where cuts may fall.
        write: returns the text; raises SK523 for a plan that the format cannot carry.
        read: returns the stages that a text describes; raises SK524 for a text of another form.
        known_by: a pattern that the texts of this format match, and those of other formats do not.
        schedules: whether a schedule goes with the plan: ``"csv"`` for any order of actions, ``"name"`` for some names.
        recompute: whether layers or stages may be computed again.
        ties: what becomes of a parameter that several stages hold.
        use: what the tool does. One that only trains lets copies of a parameter drift apart whatever the plan is for;
            one that only serves takes no plan of a training step.
        example: what a text looks like, for lists.
    """

    name: str
    tool: str
    where: str
    level: Level
    write: Callable[[CarriedPlan], str]
    read: Callable[[str], StagesInText]
    known_by: str
    schedules: Literal["csv", "name", "none"] = "none"
    recompute: bool = False
    ties: Ties = "copies"
    use: Literal["training", "serving", "both"] = "training"
    example: str = ""
