"""What torch's split_module loses on the way, beside what splitkit keeps."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torchgraphs import both, by_name, graph_of, label, named, traced

import splitkit as sk

X = torch.ones(2, 2)


def chain():
    """relu, add and mul in part 0, of which two values leave; sub in part 1."""

    def forward(self, x):
        a = x.relu() + 1
        b = a * 2
        return a - b, b

    return traced(forward)


CUT = by_name(sub=1)


class Nested(nn.Module):
    def forward(self, batch, *, flag):
        return [batch["a"] + batch["b"][0], {"more": flag["by"]}]


def test_the_pytrees_of_a_signature():
    inputs = {"a": X, "b": (X,)}
    gm = torch.export.export(Nested(), (inputs,), {"flag": {"by": X}}).module()
    torchs, ours = both(gm, by_name())
    with pytest.raises(TypeError):
        torchs(inputs, flag={"by": X})
    first, second = ours(inputs, flag={"by": X})
    assert torch.equal(first, 2 * X) and torch.equal(second["more"], X)


def test_a_code_generator_of_ones_own():
    class Shouting(fx.graph.CodeGen):
        def additional_globals(self):
            return [("LOUD", True)]

    gm = chain()
    gm.graph.set_codegen(Shouting())
    torchs, ours = both(gm, CUT)
    assert "LOUD" not in torchs.forward.__globals__
    assert ours.forward.__globals__["LOUD"] is True


def test_the_meta_of_the_module():
    gm = chain()
    gm.meta["tag"] = "mine"
    torchs, ours = both(gm, CUT)
    assert "tag" not in torchs.meta
    assert ours.meta["tag"] == "mine"


def test_the_evaluation_mode():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Dropout())).eval()
    torchs, ours = both(gm, by_name(_1=1))
    assert torchs.training and torchs.submod_0.training
    assert not any(module.training for module in ours.modules())


def with_meta():
    gm = chain()
    for node in gm.graph.nodes:
        node.meta.update(val=torch.empty(2), example_value=torch.empty(2), stack_trace=f"line of {node.name}")
    return gm


def test_the_meta_of_calls_and_their_values_in_the_parent():
    torchs, ours = both(with_meta(), CUT)
    for name in ("submod_0", "getitem", "getitem_1", "submod_1"):
        assert not named(torchs)[name].meta
    meta = {name: node.meta for name, node in named(ours).items()}
    for field in ("val", "example_value"):
        assert [v.shape for v in meta["submod_0"][field]] == [(2,), (2,)]
        assert all(meta[name][field].shape == (2,) for name in ("getitem", "getitem_1", "submod_1"))
    traces = [meta[name]["stack_trace"] for name in ("getitem", "getitem_1", "submod_1")]
    assert traces == ["line of add", "line of mul", "line of sub"]


def test_the_meta_of_outputs():
    torchs, ours = both(with_meta(), CUT)
    for split in (torchs.submod_0, torchs.submod_1, torchs):
        assert not split.graph.output_node().meta
    assert len(ours.submod_0.graph.output_node().meta["val"]) == 2
    assert ours.submod_1.graph.output_node().meta["val"].shape == (2,)
    assert ours.graph.output_node().meta["stack_trace"] == "line of output"


AUTOCAST = (torch.amp._enter_autocast, "cpu", torch.bfloat16, True, None)
GRAD_OFF = (torch._C._set_grad_enabled, False)


@pytest.mark.parametrize("prelude", [AUTOCAST, GRAD_OFF], ids=["autocast", "no_grad"])
def test_inputs_come_first_in_a_part_that_opens_a_region(prelude):
    def write(call, graph):
        x = graph.placeholder("x")
        enter = call("p0_enter", *prelude)
        y = call("p1", torch.mm, call("p0", torch.mm, x, x), x)
        if prelude is AUTOCAST:
            call("p1_exit", torch.amp._exit_autocast, enter)
        return y

    torchs, ours = both(graph_of(write), label)
    assert next(iter(torchs.submod_1.graph.nodes)).op == "call_function"
    ops = [node.op for node in ours.submod_1.graph.nodes]
    assert ops[:2] == ["placeholder"] * 2 and "placeholder" not in ops[2:]


def run_body(body, x):
    return body(x)


def test_no_copy_of_a_body_is_left_in_the_parent():
    def write(call, graph):
        return call("p0", run_body, graph.get_attr("body"), graph.placeholder("x"))

    torchs, ours = both(graph_of(write, body=fx.symbolic_trace(nn.ReLU())), label)
    assert "body" in named(torchs) and not named(torchs)["body"].users
    assert [name for name, _ in torchs.named_children()] == ["body", "submod_0"]
    assert "body" not in named(ours)
    assert [name for name, _ in ours.named_children()] == ["submod_0"]
    assert torch.equal(ours(-X), torchs(-X))


def test_no_marks_are_left_on_the_graph():
    gm = chain()

    def marks():
        return {name for node in gm.graph.nodes for name in vars(node)}

    sk.split_module(gm, None, CUT)
    before = marks()
    both(gm, CUT)
    assert marks() - before == {"_fx_partition"}, "torch's mark, and none of ours"
