"""The format of ONNX: a pipeline stage for each node (IR version 11), the one format that takes cuts inside layers.

Read: onnx 1.23.2 (``NodeDeviceConfigurationProto.pipeline_stage``) and onnx_ir 1.1.0 (``Node.set_pipeline_stage``). The
text is node -> stage; `annotate_onnx` writes it into a model that ``torch.onnx.export(..., dynamo=True)`` made of the
same module, whose nodes say which node of the graph they come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from splitkit.errors import FileError
from splitkit.exports.carried_plan import CarriedPlan, StagesInText
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.text_parsing import json_object, no_such_text
from splitkit.graph.dataflow import module_path

_EXAMPLE = '{"ir_version": 11, "num_devices": 2, "pipeline_stage": {"linear": 0, "linear_1": 1}}'
_FX_NODE = "pkg.torch.onnx.fx_node"


def _write(carried: CarriedPlan) -> str:
    stage = {key: i for i, key in enumerate(carried.keys)}
    placed = {node.name: stage[carried.plan.home(node)] for node in carried.sequence.flow.nodes}
    paths = {node.name: module_path(node) for node in carried.sequence.flow.nodes}
    data = {
        "ir_version": 11,
        "num_devices": carried.stages,
        "pipeline_stage": placed,
        "module": {name: path for name, path in paths.items() if path},
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _read(text: str) -> StagesInText:
    stages = (json_object(text) or {}).get("pipeline_stage")
    if not isinstance(stages, dict) or not stages or not all(type(s) is int and s >= 0 for s in stages.values()):
        raise no_such_text("ONNX", "it is no JSON with a pipeline_stage for each node", _EXAMPLE)
    return StagesInText(nodes=stages)


def annotate_onnx(model: Any, text: str, configuration: str = "splitkit") -> int:
    """Write the stages of an export into an ONNX model, and return how many of its nodes got one.

    A node of the model belongs to the graph's node that its metadata names; where torch does not name one, to the stage
    of the nodes before it that it reads. Stages never decrease along an edge.

    Args:
        model: an ``onnx_ir.Model``, such as the ``model`` of an ``ONNXProgram``.
        text: the text of ``splitkit.export(plan, to="onnx")``.
        configuration: the name of the device configuration that is added.

    Raises:
        FileError: SK524 for another text, SK525 if no node of the model comes from the plan's graph.
    """
    known = _read(text).nodes or {}
    count = max(known.values()) + 1
    named = [_stage_named(node, known) for node in model.graph]
    if not any(stage is not None for stage in named):
        reason = "no node of the ONNX model names a node of the plan's graph"
        raise FileError("SK525", reason, "Export the same model with torch.onnx.export(..., dynamo=True).")
    added = model.add_device_configuration(configuration, num_devices=count)
    stage_of: dict[int, int] = {}
    for node, own in zip(model.graph, named, strict=True):
        before = max((stage_of[id(p)] for p in _producers(node) if id(p) in stage_of), default=0)
        stage = before if own is None else max(own, before)
        stage_of[id(node)] = stage
        node.set_pipeline_stage(added, stage)
    model.ir_version = max(model.ir_version, 11)
    return len(named)


def _producers(node: Any) -> Iterable[Any]:
    return (value.producer() for value in node.inputs if value is not None and value.producer() is not None)


def _stage_named(node: Any, known: Any) -> int | None:
    """Return the stage of the node of the graph that an ONNX node comes from; None if it names none."""
    text = str(node.metadata_props.get(_FX_NODE, ""))
    name = text.partition(":")[0].strip().removeprefix("%")
    if name in known:
        return int(known[name])
    return None


ONNX = ExportFormat(
    name="onnx",
    tool="ONNX",
    where="splitkit.extend.annotate_onnx(onnx_program.model, open(FILE).read())",
    level="nodes",
    write=_write,
    read=_read,
    known_by=r"[\"']pipeline_stage[\"']",
    use="both",
    example=_EXAMPLE,
)
