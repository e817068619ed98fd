"""What torch's split_module has no notion of: what it makes instead, beside what splitkit does."""

from __future__ import annotations

import operator
import sys

import pytest
import torch
from torch import fx, nn
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module as torch_split_module
from torchgraphs import both, by_name, called, dynamo, graph_of, inputs_of, label, traced

import splitkit as sk

X = torch.ones(2, 2)

# ---- regions -----------------------------------------------------------------------------------------------------

INFERENCE = (_enter_inference_mode, (True,), _exit_inference_mode)
RECORD = (
    torch.ops.profiler._record_function_enter_new,
    ("block", None),
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def over_two_parts(enter, args, leave):
    def write(call, graph):
        x = graph.placeholder("x")
        handle = call("p0_enter", enter, *args)
        values = call("p0", torch.sin, x), call("p1", torch.cos, x)
        call("p1_exit", leave, handle)
        return values

    return graph_of(write)


@pytest.mark.parametrize("region", [INFERENCE, RECORD], ids=["inference_mode", "record_function"])
def test_each_part_opens_a_region_itself(region):
    torchs, ours = both(over_two_parts(*region), label)
    assert inputs_of(torchs.submod_1) == ["x", "p0_enter"]
    for part in (ours.submod_0, ours.submod_1):
        assert inputs_of(part) == ["x"]
        [enter] = [node for node in part.graph.nodes if node.target is region[0]]
        [leave] = enter.users
        assert "exit" in leave.name


def test_a_part_run_alone_is_in_inference_mode():
    torchs, ours = both(over_two_parts(*INFERENCE), label)
    with pytest.raises(TypeError, match="p0_enter"):
        torchs.submod_1(X)
    assert ours.submod_1(X).is_inference()
    assert not torch.is_inference_mode_enabled()


def test_a_part_run_alone_is_recorded():
    _, ours = both(over_two_parts(*RECORD), label)
    with torch.profiler.profile() as profile:
        ours.submod_1(X)
    assert "block" in {event.key for event in profile.key_averages()}


# ---- what crosses ------------------------------------------------------------------------------------------------


def crossing(split):
    """The example values of what enters the parts."""
    parts = map(split.get_submodule, called(split))
    return [n.meta.get("example_value") for part in parts for n in part.graph.find_nodes(op="placeholder")]


def test_no_size_of_a_dynamo_graph_crosses():
    def model(x, y):
        size = x.size()
        return y.view(size) + torch.sigmoid(x)

    gm, inputs = dynamo(model, torch.rand(4, 8), torch.rand(32), dynamic=True)
    torchs, ours = both(gm, lambda n: 0 if n.target == "size" else 1)
    assert any(isinstance(value, torch.Size) for value in crossing(torchs))
    assert not any(isinstance(value, torch.Size) for value in crossing(ours))
    assert torch.equal(ours(*inputs)[0], gm(*inputs)[0])


@pytest.mark.parametrize("read", ["positional", "keyword", "item"])
def test_no_size_crosses_however_it_is_read(read):
    def write(call, graph):
        x, y = graph.placeholder("x"), graph.placeholder("y")
        size = call("p0", "size", x)
        x.meta["example_value"], size.meta["example_value"] = torch.empty(2, 3), torch.Size((2, 3))
        if read == "item":
            return call("p1", "view", y, -1, call("p1_item", operator.getitem, size, 1))
        return call("p1", "view", y, size) if read == "positional" else call("p1", "view", y, size=size)

    gm = graph_of(write)
    torchs, ours = both(gm, label)
    assert any(isinstance(value, torch.Size) for value in crossing(torchs))
    assert not any(isinstance(value, torch.Size) for value in crossing(ours))
    inputs = torch.rand(2, 3), torch.rand(6)
    assert torch.equal(ours(*inputs), gm(*inputs))


def test_no_float_crosses():
    def model(x):
        return x.sin() * x.size(0) ** 0.5

    gm, inputs = dynamo(model, torch.rand(4, 8), dynamic=True)
    torchs, ours = both(gm, lambda n: 1 if n.op == "call_function" and n.target is operator.mul else 0)
    floats = (float, torch.SymFloat)
    assert any(isinstance(value, floats) for value in crossing(torchs))
    assert not any(isinstance(value, floats) for value in crossing(ours))
    assert torch.equal(ours(*inputs)[0], gm(*inputs)[0])


def test_a_float_of_a_tensor_that_is_written_is_the_old_one():
    """Whoever computes a float again, in the part that reads it, must do so before the write."""

    def write(call, graph):
        x = graph.placeholder("x")
        number = call("p0", "item", x)
        number.meta["example_value"] = 1.0
        call("p1_write", "mul_", x, 2)
        return call("p1", torch.mul, x, number)

    torchs, ours = both(graph_of(write), label)
    assert torchs(torch.tensor(3.0)) == ours(torch.tensor(3.0)) == 18.0


def test_a_tuple_is_taken_apart_where_it_is_made():
    def forward(self, x):
        left, right = (lambda pair: (pair[0], pair[1]))(torch.split(x, 1))
        return left.relu() + right

    torchs, ours = both(traced(forward), lambda n: 0 if n.target is torch.split else 1)
    assert inputs_of(torchs.submod_1) == ["split"]
    assert inputs_of(ours.submod_1) == ["getitem", "getitem_1"]


def test_a_symbol_of_meta_val_enters_with_the_shapes_that_hold_it():
    def model(x):
        return ((x + 1) * x.shape[0]).cos()

    gm = make_fx(model, tracing_mode="symbolic")(torch.rand(5, 3))
    torchs, ours = both(gm, by_name(cos=1))
    assert inputs_of(torchs.submod_1) == ["mul"]
    assert inputs_of(ours.submod_1) == ["mul", "sym_size_int"]
    assert torch.equal(ours(torch.ones(2, 3)), gm(torch.ones(2, 3)))


# ---- cost --------------------------------------------------------------------------------------------------------


def test_each_part_is_code_generated_once(monkeypatch):
    gm, made = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid())), []
    compiled = fx.graph_module._forward_from_src

    def counted(source, *args, **kwargs):
        made.append(source)
        return compiled(source, *args, **kwargs)

    sk.split_module(gm, None, by_name(_1=1, _2=2))  # what is made once a process
    monkeypatch.setattr(fx.graph_module, "_forward_from_src", counted)
    torch_split_module(gm, None, by_name(_1=1, _2=2))
    assert len(made) == 7
    made.clear()
    sk.split_module(gm, None, by_name(_1=1, _2=2))(X)
    assert len(made) == len(set(made)) == 4, "three parts and the parent"


class Name(str):
    """A name that counts with what it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Name.compared += 1
        return str.__eq__(self, other)


def wide(inputs):
    """A sum of many inputs."""
    graph = fx.Graph()
    first, *rest = [graph.placeholder(f"w{i}") for i in range(inputs)]
    for value in rest:
        first = graph.call_function(torch.add, (first, value))
    graph.output(first)
    for node in graph.nodes:
        node.name = Name(node.name)
    return fx.GraphModule({}, graph)


def compared_names(split_module, gm):
    Name.compared = 0
    split_module(gm, None, by_name(), keep_original_order=True)
    return Name.compared


def calls(split_module, gm):
    """How many functions are called."""
    counts = {"call": 0, "c_call": 0}
    sys.setprofile(lambda frame, event, arg: counts.update({event: counts.get(event, 0) + 1}))
    try:
        split_module(gm, None, by_name(), keep_original_order=True)
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def test_the_original_order_takes_linear_time():
    few, many = 100, 400
    assert compared_names(torch_split_module, wide(many)) > many**2 / 2
    assert compared_names(sk.split_module, wide(many)) < 10 * many
    assert calls(sk.split_module, wide(many)) < 5 * calls(sk.split_module, wide(few))


# ---- choice ------------------------------------------------------------------------------------------------------


def test_none_leaves_a_node_in_the_parent():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()))
    torchs, ours = both(gm, by_name(_1=None, _2=2))
    assert called(torchs) == ["submod_0", "submod_None", "submod_2"]
    assert called(ours) == ["submod_0", "1", "submod_2"]
    assert torch.equal(ours(X), gm(X))
