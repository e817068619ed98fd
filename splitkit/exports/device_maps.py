"""The format of accelerate and transformers: a device for each module.

Read: accelerate 1.15, ``utils/modeling.py`` (``check_device_map``: every tensor of the state dict must be below a
named module) and ``big_modeling.py`` (``dispatch_model``).
"""

from __future__ import annotations

import json
import re

from splitkit.exports.carried_plan import CarriedPlan, StagesInText
from splitkit.exports.export_format import ExportFormat, json_object, no_such_text

_EXAMPLE = '{"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "lm_head": 1}'


def _write(carried: CarriedPlan) -> str:
    """Write module -> device: the number of the rank, or the device that the plan names.

    Modules that hold weights and run in no stage of their own (the table that tied embeddings share) are on the first.
    """
    given = carried.devices or [""] * carried.stages
    devices = [_device(text, rank) for rank, text in zip(carried.rank_of, given, strict=True)]
    found = {name: devices[stage] for stage, names in enumerate(carried.names) for name in names}
    for name, layers in carried.sequence.shared_modules.items():
        found[name] = devices[carried.stage_of(min(layers, default=0))]
    for tensor in carried.sequence.flow.root.state_dict():
        if not any(tensor == name or tensor.startswith(f"{name}.") for name in found):
            holder = tensor.rpartition(".")[0]
            inside = holder and not any(name.startswith(f"{holder}.") for name in found)
            found[holder if inside else tensor] = devices[0]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _device(text: str, rank: int) -> int | str:
    kind, _, number = text.partition(":")
    if not text:
        return rank
    return int(number or 0) if kind == "cuda" else text


def _read(text: str) -> StagesInText:
    found = json_object(re.sub(r"\A\s*device_map\s*=", "", text))
    if not found or not all(isinstance(value, int | str) and not isinstance(value, bool) for value in found.values()):
        raise no_such_text("accelerate", "it is not a dictionary of modules and devices", _EXAMPLE)
    return StagesInText(devices={name: f"cuda:{to}" if isinstance(to, int) else to for name, to in found.items()})


def _format(name: str, where: str, known_by: str) -> ExportFormat:
    return ExportFormat(
        name=name,
        tool=name,
        where=where,
        level="layers",
        write=_write,
        read=_read,
        known_by=known_by,
        ties="copies",
        use="both",
        example=_EXAMPLE,
    )


ACCELERATE = _format(
    "accelerate",
    "dispatch_model(model, device_map=json.load(open(FILE)))",
    r"\A\s*(device_map\s*=\s*)?\{\s*[\"'](?!pp_deg|pipeline_|ir_version|num_)[^\"']*[\"']\s*:\s*(\d+|[\"'](cpu|disk|meta|cuda|mps|xpu)[^\"']*[\"'])\s*[,}]",
)
TRANSFORMERS = _format(
    "transformers", "AutoModelForCausalLM.from_pretrained(FOLDER, device_map=json.load(open(FILE)))", r"(?!)"
)
