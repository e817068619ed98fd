"""The format of Galvatron: a JSON file with the layers of each stage and a checkpoint flag for each layer.

Read: PKU-DAIR/Hetu-Galvatron ``galvatron/core/runtime/hybrid_parallel_config.py`` (38b79aa,
``get_hybrid_parallel_configs_api``, ``check_hp_config``). The embedding is on the first stage and the head on the last.
"""

from __future__ import annotations

import json

from splitkit.exports.carried_plan import CarriedPlan, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat, json_object, no_such_text, whole_numbers

_EXAMPLE = '{"pp_deg": 2, "pp_division": "2,1", "checkpoint": "0,0,1"}'
_TYPES = {"1F1B": "pipedream_flush", "GPipe": "gpipe"}


def _write(carried: CarriedPlan) -> str:
    order = carried.order
    if order is not None and order.name not in _TYPES:
        remedy = "Use --schedule 1f1b or gpipe, or export to torch or torchtitan."
        raise cannot_carry("Galvatron", f"it runs 1F1B and GPipe, but not {order.name}", remedy)
    flags = [flag for stage in carried.recomputed_blocks for flag in stage]
    chunks = 1 if order is None else order.microbatches

    def each(value: int) -> str:
        return ",".join([str(value)] * len(flags))

    data = {
        "pp_deg": carried.stages,
        "tp_sizes_enc": each(1),
        "tp_consecutive_flags": each(1),
        "cp_sizes_enc": each(1),
        "dp_types_enc": each(0),
        "use_sp": each(0),
        "checkpoint": ",".join(str(int(flag)) for flag in flags),
        "global_bsz": chunks * carried.microbatch,
        "chunks": chunks,
        "pp_division": ",".join(map(str, carried.blocks)),
        "pipeline_type": _TYPES["1F1B" if order is None else order.name],
        "default_dp_type": "ddp",
        "vtp": 1,
        "vsp": 0,
    }
    return json.dumps(data, indent=1) + "\n"


def _read(text: str) -> StagesInText:
    data = json_object(text) or {}
    division = data.get("pp_division")
    blocks = whole_numbers(division) if isinstance(division, str) else None
    if blocks is None or data.get("pp_deg") != len(blocks) or 0 in blocks:
        reason = "it is not JSON with a pp_division of pp_deg numbers above 0"
        raise no_such_text("Galvatron", reason, _EXAMPLE)
    flags = data.get("checkpoint", ",".join("0" * sum(blocks)))
    again = whole_numbers(flags) if isinstance(flags, str) else None
    if again is None or len(again) != sum(blocks):
        raise no_such_text("Galvatron", "checkpoint has not one number for each layer", _EXAMPLE)
    return StagesInText(layers=blocks, recompute=tuple(flag > 0 for flag in again))


GALVATRON = ExportFormat(
    name="galvatron",
    tool="Galvatron",
    where="the file of galvatron_config_path",
    level="blocks",
    write=_write,
    read=_read,
    known_by=r"[\"']pp_division[\"']",
    schedules="name",
    recompute=True,
    ties="ends",
    example=_EXAMPLE,
)
