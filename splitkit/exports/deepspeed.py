"""The format of DeepSpeed: the borders of ``PipelineModule``, set by a subclass.

Read: DeepSpeed 0.19.8, ``deepspeed/runtime/pipe/module.py`` (``_partition_layers``): ``self.parts`` has the number of
layers before each stage, then their total. ``partition_method`` takes no list (microsoft/DeepSpeed#2974).
"""

from __future__ import annotations

import re
from itertools import pairwise

from splitkit.exports.carried_plan import CarriedPlan, StagesInText, cannot_carry
from splitkit.exports.export_format import ExportFormat, no_such_text, whole_numbers

_EXAMPLE = "self.parts = [0, 9, 17, 24]"


def _write(carried: CarriedPlan) -> str:
    if carried.order is not None and carried.order.name != "1F1B":
        remedy = "Use --schedule 1f1b, or export to torch or torchtitan."
        raise cannot_carry("DeepSpeed", f"it runs 1F1B, but not {carried.order.name}", remedy)
    parts = [0, *carried.cuts, len(carried.sequence.layers)]
    listed = [f"#   {i}: {' + '.join(layer.names)}" for i, layer in enumerate(carried.sequence.layers)]
    return "\n".join(
        [
            "from deepspeed.pipe import PipelineModule",
            "",
            "",
            "class PlannedPipeline(PipelineModule):",
            '    """A PipelineModule with the stages of a plan."""',
            "",
            '    def _partition_layers(self, method="uniform"):',
            f"        self.parts = {parts}",
            "        stage = self._topo.get_coord(self.global_rank).pipe",
            "        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])",
            "",
            "",
            f"# layers= must be these {len(carried.sequence.layers)}, in this order (tied ones as TiedLayerSpec):",
            *listed,
            f"# model = PlannedPipeline(layers, num_stages={carried.stages})",
            "",
        ]
    )


def _read(text: str) -> StagesInText:
    found = re.search(r"\bparts\s*=\s*\[([0-9, ]*)\]", text)
    parts = whole_numbers(found[1] if found else text)
    if parts is None or len(parts) < 2 or parts[0] != 0 or any(a >= b for a, b in pairwise(parts)):
        raise no_such_text("DeepSpeed", "it has no increasing list of borders that begins with 0", _EXAMPLE)
    return StagesInText(layers=tuple(b - a for a, b in pairwise(parts)))


DEEPSPEED = ExportFormat(
    name="deepspeed",
    tool="DeepSpeed",
    where="the file that makes the PipelineModule: use this class in its place",
    level="chain",
    write=_write,
    read=_read,
    known_by=r"\bparts\s*=\s*\[",
    schedules="name",
    ties="any",
    example=_EXAMPLE,
)
