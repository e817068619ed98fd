"""The format of ONNX: a pipeline stage for each node (IR version 11), the one format that takes cuts inside layers.

Read: onnx 1.23.2 (``NodeDeviceConfigurationProto.pipeline_stage``) and onnx_ir 1.1.0 (``Node.set_pipeline_stage``). The
text is node -> stage; `annotate_onnx` writes it into a model that ``torch.onnx.export(..., dynamo=True)`` made of the
same module. Its nodes say from which module and op they come; their numbers differ, since torch decomposes ops first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from splitkit.errors import FileError
from splitkit.exports.carried_plan import CarriedPlan, StagesInText
from splitkit.exports.export_format import ExportFormat, json_object, literal, no_such_text
from splitkit.graph.dataflow import module_path

_EXAMPLE = (
    '{"ir_version": 11, "num_devices": 2, "pipeline_stage": {"linear": 0, "linear_1": 1}, '
    '"module": {"linear": "layers.0", "linear_1": "layers.1"}, '
    '"op": {"linear": "aten.linear.default", "linear_1": "aten.linear.default"}}'
)
_FX_NODE, _SCOPES = "pkg.torch.onnx.fx_node", "pkg.torch.onnx.name_scopes"


def _write(carried: CarriedPlan) -> str:
    stage = {key: i for i, key in enumerate(carried.keys)}
    placed = {node.name: stage[carried.plan.home(node)] for node in carried.sequence.flow.nodes}
    paths = {node.name: module_path(node) for node in carried.sequence.flow.nodes}
    data = {
        "ir_version": 11,
        "num_devices": carried.stages,
        "pipeline_stage": placed,
        "module": paths,
        "op": {node.name: str(node.target) for node in carried.sequence.flow.nodes},
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _read(text: str) -> StagesInText:
    stages = (json_object(text) or {}).get("pipeline_stage")
    if not isinstance(stages, dict) or not stages or not all(type(s) is int and s >= 0 for s in stages.values()):
        raise no_such_text("ONNX", "it is not JSON with a pipeline_stage for each node", _EXAMPLE)
    return StagesInText(nodes=stages)


def annotate_onnx(model: Any, text: str, configuration: str = "splitkit") -> int:
    """Write the stages of an export into an ONNX model, and return how many of its nodes got one.

    An ONNX node gets the stage of the graph's op that it comes from: the same op of the same module, matched in order
    if both have the same number. If torch decomposed the op, it gets the stage of the module, or else the latest stage
    of the nodes that it reads. Stages never decrease along an edge.

    Args:
        model: an ``onnx_ir.Model``, such as the ``model`` of an ``ONNXProgram``.
        text: the text of ``splitkit.export(plan, to="onnx")``.
        configuration: the name of the device configuration that is added.

    Raises:
        FileError: SK524 for another text, SK525 if no node of the model comes from a module of the plan's graph.
    """
    named, count = _stages(text, [_origin(node) for node in model.graph])
    if all(stage is None for stage in named):
        reason = "no node of the ONNX model comes from a module of the plan's graph"
        raise FileError("SK525", reason, "Export the same model with torch.onnx.export(..., dynamo=True).")
    added = model.add_device_configuration(configuration, num_devices=count)
    stage_of: dict[int, int] = {}
    for node, own in zip(model.graph, named, strict=True):
        made_by = (id(value.producer()) for value in node.inputs if value is not None)
        before = max((stage_of[producer] for producer in made_by if producer in stage_of), default=0)
        stage_of[id(node)] = max(own or 0, before)
        node.set_pipeline_stage(added, stage_of[id(node)])
    model.ir_version = max(model.ir_version, 11)
    return len(named)


class _Origin(NamedTuple):
    """Where an ONNX node comes from: the node that torch translated, its module and its op."""

    name: str
    module: str
    op: str


def _origin(node: Any) -> _Origin | None:
    """Read the metadata that torch leaves; None for a node without."""
    text = str(node.metadata_props.get(_FX_NODE, ""))
    found = re.match(r"%(\S+) : .*\[target=(?:torch\.ops\.)?([^\]]+)\]", text)
    scopes = literal(str(node.metadata_props.get(_SCOPES, "")).strip())
    if found is None or not isinstance(scopes, list) or not scopes:
        return None
    return _Origin(found[1], str(scopes[-2]) if len(scopes) > 1 else "", found[2])


def _stages(text: str, origins: Sequence[_Origin | None]) -> tuple[list[int | None], int]:
    """Return the stage of each ONNX node, None where the text does not say, and the number of stages."""
    stages, data = _read(text).nodes or {}, json_object(text) or {}
    modules, ops = (data.get(field) for field in ("module", "op"))
    if not isinstance(modules, dict) or not isinstance(ops, dict) or not stages.keys() <= modules.keys() & ops.keys():
        raise no_such_text("ONNX", "it has no module and op for each node", _EXAMPLE)
    of_module: dict[str, set[int]] = {}
    of_op: dict[tuple[str, str], list[int]] = {}
    for name, stage in stages.items():
        of_module.setdefault(modules[name], set()).add(stage)
        of_op.setdefault((modules[name], ops[name]), []).append(stage)
    order: dict[tuple[str, str], dict[str, int]] = {}
    for origin in filter(None, origins):
        names = order.setdefault((origin.module, origin.op), {})
        names.setdefault(origin.name, len(names))

    def stage_of(origin: _Origin) -> int | None:
        known, same = of_op.get((origin.module, origin.op), []), order[origin.module, origin.op]
        if len(known) == len(same):
            return known[same[origin.name]]
        whole = of_module.get(origin.module, set())
        return next(iter(whole)) if len(whole) == 1 else None

    return [None if origin is None else stage_of(origin) for origin in origins], max(stages.values()) + 1


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
