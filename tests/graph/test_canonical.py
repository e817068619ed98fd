"""The canonical form: the same for one graph in any order and under any names, another one for any other graph."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from randomgraphs import random_graph
from torch import fx, nn
from zoographs import specimens

import splitkit as sk
from splitkit import _torch
from splitkit.graph.canonical import canonical_form, is_numbered
from splitkit.graph.scope import is_state_op


def shuffled(gm: fx.GraphModule, seed: int) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy with other names and another legal order, and node -> its copy. State ops and inputs stay in place."""
    made = fx.GraphModule(gm, copy.deepcopy(gm.graph))  # of the same buffers, which other tests may have run
    twins = dict(zip(gm.graph.nodes, made.graph.nodes, strict=True))
    after, dice = sk.analyze(made).after, random.Random(seed)
    waits = {n: {*n.all_input_nodes, *after.get(n, ())} for n in made.graph.nodes}
    order, segment = [], []
    for node in made.graph.nodes:
        if is_state_op(node) or node.op in ("placeholder", "output"):
            order += [*_any_order(segment, waits, dice), node]
            segment = []
        else:
            segment.append(node)
    for node in order[:-1]:
        order[-1].prepend(node)
    names = [f"n_{i}" for i in range(len(order))]
    dice.shuffle(names)
    _torch.rename({n: name for n, name in zip(order, names, strict=True) if n.op != "placeholder"})
    made.graph.lint()
    made.recompile()
    return made, twins


def _any_order(nodes: list[fx.Node], waits: dict[fx.Node, set[fx.Node]], dice: random.Random) -> list[fx.Node]:
    left, order = list(nodes), []
    while left:
        node = dice.choice([n for n in left if waits[n].isdisjoint(left)])
        left.remove(node)
        order.append(node)
    return order


@pytest.mark.parametrize("name", specimens())
@pytest.mark.parametrize("seed", range(3))
def test_the_form_does_not_depend_on_order_and_names(name, seed):
    gm = specimens()[name].graph
    other, twins = shuffled(gm, seed)
    mine, theirs = canonical_form(gm), canonical_form(other)
    assert mine.lines == theirs.lines
    assert [twins[node] for node in mine.nodes] == list(theirs.nodes)


def test_random_graphs_are_found_again_in_another_order():
    moved = 0
    for seed in range(40):
        gm = random_graph(random.Random(seed).randrange, seed=seed)
        other, twins = shuffled(gm, seed)
        mine, theirs = canonical_form(gm), canonical_form(other)
        assert mine.digest == theirs.digest and mine.first_difference(theirs.digests) is None
        assert [twins[node] for node in mine.nodes if node.users] == [n for n in theirs.nodes if n.users]
        moved += [twins[node] for node in gm.graph.nodes] != list(other.graph.nodes)
    assert moved > 30


class Net(nn.Module):
    """Does what ``does`` says with a buffer, two inputs and dropout."""

    def __init__(self, does):
        super().__init__()
        self.does = does
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))

    def forward(self, x, y):
        return self.does(self, x, y)


def form(does):
    return canonical_form(sk.capture(Net(does), torch.ones(3), torch.ones(3)))


def dropped(p):
    return lambda t: nn.functional.dropout(t, p)


def one_after_another(first, second):
    def does(net, x, y):
        first(net, x, y)
        second(net, x, y)
        return x + y

    return does


def no_grad_sum(net, x, y):
    with torch.no_grad():
        return x + y


SAME = {
    "independent ops": (lambda n, x, y: (x.sin(), y.cos()), lambda n, x, y: (y.cos(), x.sin())[::-1]),
    "equal ops of other readers": (
        lambda n, x, y: ((a := x.sin()) + y, (b := x.sin()) * y, a, b)[:2],
        lambda n, x, y: ((b := x.sin()), (a := x.sin()), a + y, b * y)[2:],
    ),
    "writes to two buffers": (
        one_after_another(lambda n, x, y: n.seen.add_(x), lambda n, x, y: n.other.mul_(y)),
        one_after_another(lambda n, x, y: n.other.mul_(y), lambda n, x, y: n.seen.add_(x)),
    ),
    "constants": (lambda n, x, y: x * 2 + y, lambda n, x, y: x * 3 + y),
}
OTHER = {
    "arguments": (lambda n, x, y: x.sin() - y, lambda n, x, y: y - x.sin()),
    "ops": (lambda n, x, y: x.sin() - y, lambda n, x, y: x.cos() - y),
    "outputs": (lambda n, x, y: (x.sin(), y.cos()), lambda n, x, y: (y.cos(), x.sin())),
    "members of a tuple": (lambda n, x, y: x.split(1)[0] + y, lambda n, x, y: x.split(1)[1] + y),
    "writes to one buffer": (
        one_after_another(lambda n, x, y: n.seen.add_(x), lambda n, x, y: n.seen.mul_(y)),
        one_after_another(lambda n, x, y: n.seen.mul_(y), lambda n, x, y: n.seen.add_(x)),
    ),
    "draws of random numbers": (
        lambda n, x, y: (dropped(0.5)(x.sin()), dropped(0.5)(y.cos())),
        lambda n, x, y: (dropped(0.5)(y.cos()), dropped(0.5)(x.sin()))[::-1],
    ),
    "the state that it runs under": (no_grad_sum, lambda n, x, y: x + y),
    "a write": (one_after_another(lambda n, x, y: n.seen.add_(x), lambda n, x, y: None), lambda n, x, y: x + y),
}


@pytest.mark.parametrize("name", SAME)
def test_the_form_is_the_same_for(name):
    one, other = map(form, SAME[name])
    assert one.lines == other.lines


@pytest.mark.parametrize("name", OTHER)
def test_the_form_is_another_for_other(name):
    one, other = map(form, OTHER[name])
    assert one.first_difference(other.digests) is not None


def test_constants_that_a_tracer_numbers_go_by_what_they_are():
    assert all(map(is_numbered, ("_tensor_constant0", "lifted_tensor_3", "true_graph_0", "_param_constant12")))
    assert not any(map(is_numbered, ("weight", "layers.0.weight", "w1", "scale_2", "tensor", "conv1")))

    def constants(order):
        def does(net, x, y):
            made = {i: torch.tensor([1.0, 2.0, float(i)]) for i in order}
            return x * made[0] + y / made[1]

        return does

    one, other = form(constants((0, 1))), form(constants((1, 0)))
    assert {str(n.target) for n in one.nodes if n.op == "get_attr"} and one.lines == other.lines


def test_bodies_of_control_flow_are_part_of_the_form():
    def chosen(op):
        return lambda n, x, y: torch.cond(x.sum() > 0, lambda a: a.sin(), op, (x,)) + y

    assert form(chosen(torch.cos)).lines == form(chosen(torch.cos)).lines != form(chosen(torch.tan)).lines
