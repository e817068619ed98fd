"""Describes a format: where its cuts may fall, what it carries, how it is written and read."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from splitkit.errors import FileError
from splitkit.exports.carried_plan import CarriedPlan, Level, StagesInText

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


# Reads the lists and dictionaries in texts of other tools, without running them.


def no_such_text(tool: str, reason: str, example: str) -> FileError:
    """Return the refusal of a text that is not in a format (SK524)."""
    return FileError("SK524", f"this text is not for {tool}: {reason}", f"It looks like this: {example}")


def whole_numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers of ``"9, 8, 8"``; None if the text is anything else."""
    words = [word.strip() for word in text.strip().strip("\"'[]()").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", word) for word in words):
        return None
    return tuple(map(int, words))


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text, or of a Python dictionary of constants; None if the text is neither."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = literal(text.strip())
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else None


def literal(text: str | ast.expr) -> Any:
    """Return the value of a Python text or expression of constants; None for any other."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def python_values(text: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for each assignment and keyword argument of a Python text; nothing if it is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                yield name, node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value


# The format of torch.distributed.pipelining: split points for ``pipeline()``, and a schedule CSV for ``_load_csv``.
#
# Read: torch 2.13, ``torch/distributed/pipelining/_IR.py`` (``pipeline``, ``annotate_split_points``): the split falls
# before the first op of the module. A module that runs twice would be split twice, so none is named.


_EXAMPLE = 'split_spec = {"model.layers.3": SplitPoint.BEGINNING}'


def _write(carried: CarriedPlan) -> str:
    lines = [f"    {name!r}: SplitPoint.BEGINNING," for name in carried.starts]
    return "\n".join(
        [
            "from torch.distributed.pipelining import SplitPoint, pipeline",
            "",
            "split_spec = {",
            *lines,
            "}",
            "# pipe = pipeline(model, mb_args, mb_kwargs, split_spec=split_spec)",
            "",
        ]
    )


def _read(text: str) -> StagesInText:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise no_such_text("torch.distributed.pipelining", "it is not Python", _EXAMPLE) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and (found := _points(node)):
            return StagesInText(starts=found)
    raise no_such_text("torch.distributed.pipelining", "it has no dictionary of split points", _EXAMPLE)


def _points(node: ast.Dict) -> tuple[tuple[str, bool], ...] | None:
    """Return (module, whether the split falls after it) for each item; None if some item is not a split point."""
    found = []
    for key, value in zip(node.keys, node.values, strict=True):
        where = value.attr if isinstance(value, ast.Attribute) else ""
        if not isinstance(key, ast.Constant) or not isinstance(key.value, str) or where not in ("BEGINNING", "END"):
            return None
        found.append((key.value, where == "END"))
    return tuple(found) or None


TORCH = ExportFormat(
    name="torch",
    tool="torch.distributed.pipelining",
    where="pipeline(model, mb_args, split_spec=...); the schedule: _PipelineScheduleRuntime._load_csv(FILE)",
    level="modules",
    write=_write,
    read=_read,
    known_by=r"SplitPoint\.",
    schedules="csv",
    use="both",
    example=_EXAMPLE,
)
