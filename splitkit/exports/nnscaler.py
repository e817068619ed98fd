"""The format of nnScaler: the modules at which stages begin, as ``pas_config`` of its autodist policy.

Read: microsoft/nnscaler ``nnscaler/policies.py`` (1585c15) and ``nnscaler/autodist/`` (4f9c332). "Stages searched by
pipeline solver only start from" the pivots, so with as many stages as pivots + 1 there is one plan. A name also matches
the ends of paths. ``pas_autodist`` runs 1F1B alone, and its solver drops stages and their numbers beyond two ratios,
by default 0.2 of bubbles and half or twice the average time; here nothing is left to search, so both are wide open.
"""

from __future__ import annotations

import json
import re

from splitkit.exports.carried_plan import CarriedPlan, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat, json_object, no_such_text

_EXAMPLE = '{"pipeline_nstages": 2, "pipeline_pivots": "model.layers.4"}'


def _write(carried: CarriedPlan) -> str:
    order = carried.order
    if order is not None and order.name != "1F1B":
        remedy = "Use --schedule 1f1b, or export to torch or torchtitan."
        raise cannot_carry("nnScaler", f"its autodist policy runs 1F1B, but not {order.name}", remedy)
    if strange := [name for name in carried.starts if "," in name]:
        raise cannot_carry(
            "nnScaler", f"the name {strange[0]!r} has a comma, which separates pivots", "Rename the module."
        )
    again = [name for i, flag in enumerate(carried.recompute) if flag for name in carried.sequence.layers[i].names]
    microbatches = 1 if order is None else order.microbatches
    data = {
        "pipeline_nstages": carried.stages,
        "pipeline_pivots": ",".join(carried.starts),
        "pipeline_nmicros": microbatches,
        "update_freq": microbatches,  # what the policy itself reads
        "pipeline_scheduler": "1f1b",
        "max_pipeline_bubble_ratio": 0.99,
        "max_pipeline_unbalance_ratio": 0.01,
        **({"recompute_modules": ",".join(again)} if again else {}),
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _read(text: str) -> StagesInText:
    data = json_object(text) or {}
    pivots = data.get("pipeline_pivots")
    if not isinstance(pivots, str):
        found = re.search(r"pipeline_pivots[\"']?\s*[:=]\s*[\"']?([^\"'\n]+)", text)
        pivots = found[1].strip() if found else ""
    names = [name.strip() for name in pivots.split(",") if name.strip()]
    if not names:
        raise no_such_text("nnScaler", "it has no pipeline_pivots", _EXAMPLE)
    count = data.get("pipeline_nstages", len(names) + 1)
    if count != len(names) + 1:
        reason = f"{len(names)} pivots leave the choice of {count} stages to nnScaler"
        raise no_such_text("nnScaler", reason, _EXAMPLE)
    return StagesInText(starts=tuple((name, False) for name in names))


NNSCALER = ExportFormat(
    name="nnscaler",
    tool="nnScaler",
    where="ComputeConfig(pas_config=...), with pas_policy='autodist'",
    level="layers",
    write=_write,
    read=_read,
    known_by=r"pipeline_pivots",
    schedules="name",
    recompute=True,
    example=_EXAMPLE,
)
