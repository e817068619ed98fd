"""The format of torch.distributed.pipelining: split points for ``pipeline()``, and a schedule CSV for ``_load_csv``.

Read: torch 2.13, ``torch/distributed/pipelining/_IR.py`` (``pipeline``, ``annotate_split_points``): the split falls
before the first op of the module. A module that runs twice would be split twice, so none is named.
"""

from __future__ import annotations

import ast

from splitkit.exports.carried_plan import CarriedPlan, StagesInText
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.text_parsing import no_such_text

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
