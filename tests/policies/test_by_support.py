"""Supported parts; see also tests/consumers/test_capability_partitioner.py."""

from __future__ import annotations

import operator

import pytest
import torch
from policygraphs import labels
from torch import fx, nn

import splitkit as sk
from splitkit.errors import PolicyError
from splitkit.plans.parts import PARENT
from splitkit.policies import BySupport
from splitkit.testing import assert_same


def lower(node):
    return node.name[0].islower()


def dag(text, given=""):
    """``"a Ba cBa"``: node a reads the input, B reads a, c reads B and a. Nodes that nobody reads are returned."""
    made = fx.Graph()
    values = {"": made.placeholder("x")}
    for name, *before in text.split():
        args = tuple(values[b] for b in before) or (values[""],)
        values[name] = made.create_node("call_function", torch.sin if len(args) == 1 else torch.add, args, name=name)
    made.output(tuple(v for n, v in values.items() if n and (n in given or not v.users)))
    return fx.GraphModule(nn.Module(), made)


def parts_of(text, given="", **options):
    """``{0: "ac", None: "B"}``"""
    gm = dag(text, given)
    made = sk.split(gm, BySupport(lower, **options))
    x = torch.randn(3)
    assert all(map(torch.equal, made(x), gm(x)))
    parts = {}
    for node in made.flow.nodes:
        (key,) = made.plan[node]
        parts[key] = parts.get(key, "") + node.name
    return parts


def test_the_fewest_parts():
    assert parts_of("a Ba cB d ed Ee fE") == {0: "ade", 1: "cf", PARENT: "BE"}
    assert parts_of("a ba cb") == {0: "abc"}
    assert parts_of("A bA CA dC") == {0: "bd", PARENT: "AC"}, "nodes of the parent need no level of their own"
    assert parts_of("A BA") == {PARENT: "AB"}
    assert parts_of("a Ba caB d edc") == {0: "a", 1: "cde", PARENT: "B"}, "a and c may not meet: B lies between"


def test_unsupported_parts_are_odd():
    assert parts_of("a Ba cB", unsupported="parts") == {0: "a", 1: "B", 2: "c"}
    assert parts_of("A bA CA dC", unsupported="parts") == {1: "AC", 2: "bd"}, "no part 0: unsupported nodes begin"
    assert parts_of("a B cB Da", unsupported="parts") in ({0: "a", 1: "BD", 2: "c"}, {1: "B", 2: "ac", 3: "D"})
    assert parts_of("a ba", unsupported="parts") == {0: "ab"}
    assert parts_of("a B cB", unsupported="parts") == {1: "B", 2: "ac"}, "the better of two beginnings"


def test_nodes_move_to_the_part_that_reads_them():
    assert parts_of("a Ba cB m nm pcn") == {0: "a", 1: "cmnp", PARENT: "B"}, "link by link"
    assert parts_of("a Ba cB ma nmc", unsupported="parts") == {0: "a", 1: "B", 2: "cmn"}
    assert parts_of("a Ba cB m nmc", given="m") == {0: "am", 1: "cn", PARENT: "B"}, "m is sent in any case"
    assert parts_of("a Ba cB Dc eD m nmc ome") == {0: "am", 1: "cn", 2: "eo", PARENT: "BD"}, "and here"
    assert parts_of("a Ba cB Dc eD M nM oeM", unsupported="parts") == {0: "a", 1: "BM", 2: "cn", 3: "D", 4: "eo"}
    assert parts_of("a Ba cB Dc eD M GeM", unsupported="parts") == {0: "a", 1: "B", 2: "c", 3: "D", 4: "e", 5: "MG"}
    assert parts_of("a Ba cB m nm Dn ecD") == {0: "amn", 1: "ce", PARENT: "BD"}


def test_nodes_stay_where_moving_them_sends_more():
    class Model(nn.Module):
        def forward(self, x):
            wide = x.cos()
            narrow = wide.sum(1)  # stays: it would bring `wide` along
            again = narrow.exp().repeat(8)  # goes: `narrow` is what crosses
            return wide.sin().tanh().sum() + again

    gm = sk.capture(Model(), torch.randn(4, 64))
    flow = sk.analyze(gm)
    for unsupported in ("parent", "parts"):
        plan = BySupport(lambda n: "sin" not in n.name, unsupported=unsupported).assign(flow, sk.costs.unit(gm))
        first, *_, last = sorted(plan.parts)
        homes = {n.name: plan.home(n) for n in flow.nodes}
        assert homes["cos"] == homes["sum_1"] == first
        assert homes["repeat"] == homes["tanh"] == homes["add"] == last
        assert_same(gm, sk.split(gm, plan), torch.randn(4, 64))


def test_what_crosses_already_is_no_price():
    class Model(nn.Module):
        def forward(self, x):
            wide = x.cos()
            narrow = wide.sum(1)
            return (wide.sin().tanh() + wide).mean(1) + narrow

    gm = sk.capture(Model(), torch.randn(4, 64))
    flow = sk.analyze(gm)
    plan = BySupport(lambda n: "sin" not in n.name).assign(flow, sk.costs.unit(gm))
    assert {n.name: plan.home(n) for n in flow.nodes if n.name in ("cos", "sum_1")} == {"cos": 0, "sum_1": 1}


def test_small_parts_are_not_worth_it():
    text = "a ba Cb dC Ed fE gf"
    assert parts_of(text) == {0: "ab", 1: "d", 2: "fg", PARENT: "CE"}
    assert parts_of(text, min_size=2) == {0: "ab", 1: "fg", PARENT: "CdE"}
    assert parts_of("a Ba cB dc m nmc", min_size=2) == {0: "am", 1: "cdn", PARENT: "B"}, "m may not leave a alone"
    assert parts_of("a Ba cB dc m nmc q rqc", min_size=2) == {0: "am", 1: "cdnqr", PARENT: "B"}, "but one of two may"
    assert parts_of(text, min_size=3) == {PARENT: "abCdEfg"}
    assert parts_of(text, min_size=2, unsupported="parts") == {0: "ab", 1: "CdE", 2: "fg"}


def test_effects_are_edges_too():
    class Model(nn.Module):
        def forward(self, x):
            y = x.clone()
            a = y.sin()
            y.add_(1)
            return a, y.cos()

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, BySupport(lambda n: n.target != "add_"))
    assert [made.plan.home(n) for n in made.flow.nodes] == [0, 0, PARENT, 1], "cos and sin do not touch; the write does"
    assert_same(gm, made, torch.randn(3))


def test_members_go_with_their_producer_whatever_the_rule_says_of_getitem():
    class Model(nn.Module):
        def forward(self, x):
            a, b = x.chunk(2)
            return a.sin() + b

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, BySupport(lambda n: n.target is not operator.getitem))
    assert list(made.parts) == [0] and all(n.op != "call_function" for n in made.module.graph.nodes)


def test_rules_are_the_objects_of_torch_too():
    from torch.fx.passes.operator_support import create_op_support

    gm = dag("a Ba cB")
    support = create_op_support(lambda modules, node: lower(node))
    assert labels(gm, BySupport(support)) == labels(gm, BySupport(lower)) == [0, PARENT, 1]
    assert labels(gm, BySupport([torch.sin])) == [0, 0, 0]


@pytest.mark.parametrize("options", [{"unsupported": "host"}, {"min_size": 0}, {"min_size": "2"}])
def test_options_that_make_no_sense(options):
    with pytest.raises(PolicyError, match=rf"SK302: BySupport\({next(iter(options))}="):
        BySupport(lower, **options)
