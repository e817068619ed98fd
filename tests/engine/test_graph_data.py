"""Graphs as data: every kind of argument, region, form and body comes back as it was, through JSON text."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.engine import function_names, graph_data
from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError

Pair = namedtuple("Pair", ["a", "b"])


def through_text(data):
    return JsonField("a.json", "", json.loads(json.dumps(data)))


def again(gm):
    held: list[torch.Tensor] = []

    def number_of(tensor):
        held.append(tensor)
        return len(held) - 1

    data = through_text(graph_data.encode_graph(gm, number_of))
    made = graph_data.decode_graph(data, lambda number: held[number.whole()])
    graph_data.form_outputs(made, data)
    return made


VALUES = [
    None, True, 3, -(2**40), 1.5, float("inf"), float("-inf"), 1 + 2j, "text", "a\"b'\n", ..., [1, [2]], (1, (2, ())),
    {"k": (1,), 2: None}, slice(None, 3, -1), torch.bfloat16, torch.device("cuda:1"), torch.strided,
    torch.channels_last,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_an_argument_comes_back(value):
    found = graph_data.decode_argument(through_text(graph_data.encode_argument(value, "here")), {})
    assert found == value and type(found) is type(value)


def test_not_a_number_comes_back():
    found = graph_data.decode_argument(through_text(graph_data.encode_argument(float("nan"), "here")), {})
    assert found != found


@pytest.mark.parametrize("value", [object(), Pair(1, 2), torch.ones(1), {1, 2}, len], ids=lambda v: type(v).__name__)
def test_what_is_no_data_is_refused(value):
    with pytest.raises(FileError, match="SK506: node x has an argument of type"):
        graph_data.encode_argument(value, "node x")


FORMS = [
    {"x": (1, [2, None])}, OrderedDict(b=1, a=[2]), Pair(1, {"k": 2}), torch.return_types.max((1, 2)), (), 1,
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=repr)
def test_a_form_of_outputs_comes_back(form):
    from splitkit._torch import pytree

    leaves, spec = pytree.tree_flatten(form)
    found = graph_data.decode_tree_spec(through_text(graph_data.encode_tree_spec(spec)))
    made = pytree.tree_unflatten(leaves, found)
    assert found == spec and made == form and type(made) is type(form)


class Regions(nn.Module):
    """Autocast, no_grad, inference mode, a branch with bodies, a constant, numbers that are computed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, k):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
        with torch.no_grad():
            z = y.float() * torch.tensor([1.0, 2, 3, 4])
        y = torch.cond(z.sum() > 0, lambda t: t.sin(), lambda t: t.cos() + 1, (y.float(),))
        return {"y": y[: x.shape[0] // 2] * k, "z": (z, None)}


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_captured_graph_comes_back(dynamic):
    model, x = Regions(), torch.randn(4, 4)
    gm = sk.capture(model, x, k=0.5, dynamic=dynamic)
    made = again(gm)
    assert isinstance(made, fx.GraphModule) and [n.name for n in made.graph.nodes] == [n.name for n in gm.graph.nodes]
    for sign in (1, -1):
        found, wants = made(sign * x, k=0.5), gm(sign * x, k=0.5)
        assert torch.equal(found["y"], wants["y"]) and torch.equal(found["z"][0], wants["z"][0])
    assert dict(made.named_parameters()).keys() == {"linear.weight", "linear.bias"}


def test_functions_are_found_by_the_names_that_they_have():
    import operator

    for function in (torch.ops.aten.add.Tensor, operator.getitem, torch.sym_max, torch.ops.higher_order.cond):
        assert function_names.function_of(function_names.name_of_function(function)) is function
    assert function_names.name_of_function(torch.ops.aten.from_file.default) is None
    for name in (
        "op.transformers.no_such_op.default",
        "op.aten.add",
        "op.aten.add.Tensor.x",
        "op.nowhere.add.Tensor",
        "os.system",
        "math.__doc__",
        "",
        "op.",
    ):
        assert function_names.function_of(name) is None


def test_ops_of_transformers_are_registered_where_a_graph_calls_them(monkeypatch):
    """The experts of Mixtral call one, and a rank that reads its stage has imported nothing of transformers."""
    imported = []
    monkeypatch.setattr(function_names, "import_module", imported.append)
    function_names.function_of("op.aten.add.Tensor")
    function_names.function_of("op.os.system.default")
    assert not imported
    function_names.function_of("op.transformers.grouped_mm_fallback.default")
    assert imported == ["transformers.integrations.moe"]
    monkeypatch.undo()
    pytest.importorskip("transformers")
    assert function_names.function_of("op.transformers.grouped_mm_fallback.default") is not None
