"""`compare(..., parts=True)`: which part, and which node of it, departs from the reference."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.errors import CheckError
from splitkit.testing.compare import _is_edited

PARTS = {"linear": 0, "linear_1": 2, "tanh": 2, "mul": 2, "add": 2, "add_1": 3, "linear_2": 3}


class Net(nn.Module):
    """Part 1 writes buffers; the values of part 0 and 1 cross part 2."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        y = self.a(x)
        z = torch.relu(self.norm(y))
        return self.c(torch.tanh(self.b(z)) * 2.0 + y + z)


class InBfloat16(nn.Module):
    """A quantised part: a copy with other weights, which takes and returns float32."""

    def __init__(self, part, cast_back=True):
        super().__init__()
        self.part, self.cast_back = copy.deepcopy(part).bfloat16(), cast_back

    def forward(self, *inputs):
        out = self.part(*(x.bfloat16() for x in inputs))
        return out.float() if self.cast_back else out


class Changed(nn.Module):
    def __init__(self, part, change):
        super().__init__()
        self.part, self.change = part, change

    def forward(self, *inputs):
        return self.change(self.part, *inputs)


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    model, x = Net(), torch.randn(5, 8)
    return model, sk.capture(model, x), x


def divided(gm, **options):
    return sk.split(gm, lambda n: PARTS.get(n.name, 1), **options)


def edit(part, name, **changes):
    node = next(n for n in part.graph.nodes if n.name == name)
    for field, value in changes.items():
        setattr(node, field, value)
    part.recompile()


def replaced_node(part, name, function):
    node = next(n for n in part.graph.nodes if n.name == name)
    with part.graph.inserting_before(node):
        other = part.graph.call_function(function, node.args)
    node.replace_all_uses_with(other)
    part.graph.erase_node(node)
    part.recompile()


def test_parts_as_planned_and_compiled_parts_are_the_same(captured):
    model, gm, x = captured
    state = copy.deepcopy(model.state_dict())
    split = divided(gm)
    split.replace(2, torch.compile(split.parts[2], backend="aot_eager"))
    found = sk.compare(model, split, x, parts=True)
    assert found.same and found.wrong_part is None
    assert [(p.part, p.ok, p.error, p.node) for p in found.parts] == [(k, True, 0.0, None) for k in range(4)]
    assert "(tolerance 0.0001): none" in repr(found) and "part 3: the same" in str(found)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_quantised_part_is_named_with_its_error(captured):
    model, gm, x = captured
    split = divided(gm)
    split.replace(2, InBfloat16(split.parts[2]))
    found = sk.compare(model, split, x, parts=True)
    assert [p.ok for p in found.parts] == [True, True, False, True]  # part 3 is not blamed for what it is given
    wrong = found.wrong_part
    assert (wrong.part, wrong.worst.name, wrong.node) == (2, "add", None)
    assert 1e-4 < wrong.worst.relative < 2**-6 and wrong.error == wrong.worst.largest
    with pytest.raises(CheckError, match="part 2: add differs by") as caught:
        found.raise_if_different()
    assert caught.value.code == "SK701" and "bug of splitkit" not in str(caught.value)
    allowed = sk.compare(model, split, x, parts=True, tolerance=0.02)
    assert allowed.wrong_part is None and not allowed.same and "part 2: rounding: add differs" in str(allowed)


def test_another_dtype_is_measured_all_the_same_and_another_shape_is_named(captured):
    model, gm, x = captured
    split = divided(gm)
    split.replace(3, InBfloat16(split.parts[3], cast_back=False))
    wrong = sk.compare(model, split, x, parts=True).wrong_part
    assert wrong.worst.name == "linear_2 (torch.bfloat16 instead of torch.float32)" and 0 < wrong.error < 0.1
    split.replace(3, Changed(divided(gm).parts[3], lambda part, *x: part(*x)[:2]))
    wrong = sk.compare(model, split, x, parts=True).wrong_part
    assert wrong.worst.name == "linear_2 ((2, 3) instead of (5, 3))" and wrong.error == float("inf")


@pytest.mark.parametrize(
    ("part", "change", "worst"),
    [
        (2, lambda part, *x: part(*x) + 0.01, "add"),
        (0, lambda part, x: part(x.detach()) + 0 * x, "gradient of input [0][0]"),
        (1, lambda part, x: (part.norm.running_mean.add_(1), part(x))[1], "value of norm.running_mean"),
        (3, lambda part, *x: (torch.rand(1), part(*x))[1], "random state afterwards"),
    ],
    ids=["output", "gradient", "buffer", "random"],
)
def test_a_replaced_part_with_a_bug_is_named(captured, part, change, worst):
    model, gm, x = captured
    split = divided(gm)
    split.replace(part, Changed(split.parts[part], change))
    found = sk.compare(model, split, x.clone().requires_grad_(), parts=True)
    assert [p.part for p in found.parts if not p.ok] == [part]
    assert found.wrong_part.worst.name == worst and found.wrong_part.node is None


@pytest.mark.parametrize("call", ["plain", "checkpoint"])
def test_the_node_of_an_edited_graph_is_named(captured, call):
    model, gm, x = captured
    plan = sk.plan(gm, lambda n: PARTS.get(n.name, 1))
    parts = {key: replace(part, call="plain" if key == 1 else call) for key, part in plan.parts.items()}
    split = sk.split(gm, replace(plan, parts=parts))
    edit(split.parts[1], "relu", target=torch.ops.aten.sigmoid.default)
    edit(split.parts[2], "mul", args=(next(n for n in split.parts[2].graph.nodes if n.name == "tanh"), 2.01))
    found = sk.compare(model, split, x, parts=True)
    assert [p.node and p.node.name for p in found.parts] == [None, "relu", "mul", None]
    assert found.parts[2].node.relative == pytest.approx(0.005, rel=1e-3)
    assert "first at node relu" in str(found).partition("departs from")[2].splitlines()[0]


def test_a_graph_with_other_nodes(captured):
    model, gm, x = captured
    split = divided(gm)
    replaced_node(split.parts[2], "tanh", torch.sigmoid)
    assert sk.compare(model, split, x, parts=True).wrong_part.node.name == "sigmoid"
    split = divided(gm)
    edit(split.parts[3], "add_1", target=torch.ops.aten.sub.Tensor)
    split.replace(3, torch.fx.symbolic_trace(split.parts[3]))  # here `linear` is what was `linear_2`
    wrong = sk.compare(model, split, x, parts=True).wrong_part
    assert wrong.part == 3 and wrong.node is None


@pytest.mark.parametrize(("part", "after"), [(2, "add"), (3, "linear_2"), (1, "relu"), (2, "tanh")])
def test_an_inserted_node_is_named(captured, part, after):
    model, gm, x = captured
    split = divided(gm)
    inner = split.parts[part]
    node = next(n for n in inner.graph.nodes if n.name == after)
    with inner.graph.inserting_after(node):
        same = inner.graph.call_function(torch.mul, (node, 1.0), name="same")
        node.replace_all_uses_with(same, delete_user_cb=lambda reader: reader is not same)
    with inner.graph.inserting_after(same):
        scaled = inner.graph.call_function(torch.mul, (same, 1.03), name="scaled")
        same.replace_all_uses_with(scaled, delete_user_cb=lambda reader: reader is not scaled)
    inner.recompile()
    wrong = sk.compare(model, split, x, parts=True).wrong_part
    assert (wrong.part, wrong.node.name) == (part, "scaled")
    assert wrong.node.relative == pytest.approx(0.03, rel=1e-3)


def test_a_view_of_memory_that_is_written_later_and_memory_without_values():
    class Written(nn.Module):
        def forward(self, x):
            buffer = torch.empty(4, 4)
            top = buffer[:2]
            top.copy_(x[:2])
            buffer[2:].copy_(x[2:])
            return buffer.mul_(2.0) + 1, top

    model, x = Written(), torch.randn(4, 4)
    gm = sk.capture(model, x)
    split = sk.split(gm, lambda n: 0 if n.name != "add" else 1)
    edit(split.parts[0], "mul_", target=torch.ops.aten.add_.Tensor)
    wrong = sk.compare(model, split, x, parts=True).wrong_part
    assert (wrong.part, wrong.node.name) == (0, "mul_")


def test_only_a_split_has_parts(captured):
    model, gm, x = captured
    with pytest.raises(TypeError, match="parts=True takes a Split, which knows its parts, not GraphModule"):
        sk.compare(model, divided(gm).module, x, parts=True)


def test_names_stand_for_the_same_nodes_where_nodes_were_added_erased_or_replaced():
    def graph(*names, order=()):
        found = fx.Graph()
        x = found.placeholder("x")
        for name in names:
            x = found.call_function(torch.sin, (x,), name=name)
        found.output(x)
        return found

    reference = graph("a", "b", "c")
    same = [graph("a", "b", "c"), graph("a", "new", "b", "c"), graph("a", "c"), graph("a", "other", "c")]
    anew = [graph("b", "a", "c"), graph("a", "c", "d", "b"), graph("other", "a", "c")]
    assert all(_is_edited(reference, one) and _is_edited(one, reference) for one in same)
    assert not any(_is_edited(reference, one) or _is_edited(one, reference) for one in anew)
