"""Stages in an ONNX model: of the same op, of the module where torch decomposed it, or of what a node reads."""

from __future__ import annotations

import json

import pytest

from splitkit.errors import FileError
from splitkit.exports.onnx_stages import annotate_onnx


class Node:
    """What `annotate_onnx` asks of a node of ``onnx_ir``, and its own value."""

    def __init__(self, origin, *inputs):
        self.metadata_props, self.inputs, self.stage = {}, inputs, None
        if origin is not None:
            name, module, op = origin
            fx_node = f"%{name} : [num_users=1] = call_function[target=torch.ops.{op}](args = (%x,), kwargs = {{}})"
            scopes = json.dumps(["", *([module] if module else []), name])
            self.metadata_props = {"pkg.torch.onnx.fx_node": fx_node, "pkg.torch.onnx.name_scopes": scopes}

    def producer(self):
        return self

    def set_pipeline_stage(self, configuration, stage):
        self.stage = configuration, stage


class Input:
    def producer(self):
        return None


class Model:
    def __init__(self, *nodes, ir_version=10):
        self.graph, self.ir_version = nodes, ir_version

    def add_device_configuration(self, name, num_devices):
        return name, num_devices


LINEAR, RELU, ADD, GELU = "aten.linear.default", "aten.relu.default", "aten.add.Tensor", "aten.gelu.default"
NODES = [
    ("up", "low", LINEAR, 0),
    ("act", "low", RELU, 0),
    ("first", "both", LINEAR, 0),
    ("second", "both", LINEAR, 1),
    ("sum", "top", ADD, 2),
    ("out", "top", GELU, 2),
]
TEXT = json.dumps(
    {
        "pipeline_stage": {name: stage for name, _, _, stage in NODES},
        "module": {name: module for name, module, _, _ in NODES},
        "op": {name: op for name, _, op, _ in NODES},
    }
)


def placed(*nodes, **options):
    model = Model(*nodes)
    assert annotate_onnx(model, TEXT, **options) == len(nodes)
    assert model.ir_version == 11
    return [node.stage for node in nodes]


def test_the_same_op_of_the_same_module_in_order():
    nodes = [Node(("a", "both", LINEAR), Input(), None), Node(("b", "both", LINEAR)), Node(("c", "low", RELU))]
    assert placed(*nodes) == [(("splitkit", 3), 0), (("splitkit", 3), 1), (("splitkit", 3), 0)]
    assert placed(Node(("a", "top", GELU)), configuration="mine") == [(("mine", 3), 2)]


def test_several_nodes_of_one_op_have_its_stage():
    first, second = ("a", "both", LINEAR), ("b", "both", LINEAR)
    assert [stage for _, stage in placed(Node(first), Node(second), Node(first), Node(second))] == [0, 1, 0, 1]


def test_a_decomposed_op_has_the_stage_of_its_module_and_else_of_what_it_reads():
    early, late = Node(("c", "top", "aten.mul.Tensor")), Node(("u", "low", "aten.mm.default"))
    reads_both = Node(("d", "both", "aten.mm.default"), Input(), late, early)
    three_for_two = [Node((name, "both", LINEAR), late) for name in "xyz"]
    nodes = [early, late, reads_both, Node(("e", "both", "aten.mm.default")), *three_for_two, Node(None, early)]
    assert [stage for _, stage in placed(*nodes)] == [2, 0, 2, 0, 0, 0, 0, 2]


def test_stages_never_decrease_along_an_edge():
    last = Node(("c", "top", ADD))
    again = Node(("a", "low", RELU), last)
    assert [stage for _, stage in placed(last, again, Node(("b", "low", LINEAR), again))] == [2, 2, 2]


def test_a_newer_format_stays():
    model = Model(Node(("c", "top", ADD)), ir_version=13)
    annotate_onnx(model, TEXT)
    assert model.ir_version == 13


@pytest.mark.parametrize("field", ["module", "op"])
def test_a_text_without_modules_or_ops_is_refused(field):
    with pytest.raises(FileError, match="SK524: .*it has no module and op for each node"):
        annotate_onnx(Model(), json.dumps(json.loads(TEXT) | {field: [name for name, *_ in NODES]}))


def test_a_model_of_other_modules_is_refused():
    with pytest.raises(FileError, match="SK525: no node of the ONNX model comes from a module of the plan's graph"):
        annotate_onnx(Model(Node(("a", "elsewhere", LINEAR)), Node(None)), TEXT)
