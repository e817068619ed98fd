"""Ways to say which ops are meant."""

from __future__ import annotations

import operator

import pytest
import torch
from policygraphs import graph, labels
from torch import fx, nn

from splitkit.errors import PolicyError
from splitkit.policies import AroundOps, AtMarkers, BySupport

aten = torch.ops.aten


@pytest.mark.parametrize(
    "ops",
    [
        [torch.sin],
        (aten.sin.default,),
        {aten.sin},
        "aten.sin",
        ["aten::sin"],
        "aten.sin.default",
        aten.sin,
        ["torch.sin", aten.sin],
        lambda n: "sin" in n.name,
        lambda n: n.name if "sin" in n.name else None,
    ],
    ids=str,
)
def test_ways_to_name_an_op(ops):
    named_torch = not (isinstance(ops, str | fx.node.Node) or "aten" in str(ops))
    sin = torch.sin if named_torch or "torch.sin" in str(ops) else aten.sin.default
    assert labels(graph(torch.cos, sin, torch.cos), AroundOps(ops)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("relu", "relu"),
        (torch.relu, "torch.relu"),
        (torch.relu, "relu"),
        (operator.neg, "operator.neg"),
        (nn.functional.silu, "torch.nn.functional.silu"),
        (aten.relu, "aten.relu"),
        (aten.relu, "aten::relu"),
    ],
)
def test_names_of_ops(target, name):
    assert labels(graph(torch.cos, target, torch.cos), AroundOps([name])) == [0, 1, 2]


def test_called_modules_are_named_by_class():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.ReLU()))
    assert labels(gm, AroundOps(nn.Linear)) == labels(gm, AroundOps([nn.Linear])) == [0, 1, 2]
    assert labels(gm, AroundOps(nn.Module)) == [1, 1, 1], "or of a class around it"


def test_higher_order_ops_are_named_too():
    class Model(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                y = x.sin()
            return (x.cos() + y).exp()

    gm = torch.export.export(Model(), (torch.ones(2),)).module()
    hop = torch.ops.higher_order.wrap_with_set_grad_enabled
    expected = labels(gm, AroundOps([hop]))
    assert 1 in expected and expected == labels(gm, AroundOps(hop))
    assert expected == labels(gm, AroundOps("higher_order::wrap_with_set_grad_enabled"))


def test_one_op_is_not_another(chain):
    assert (
        labels(graph(torch.cos, torch.sinh, aten.sin_.default), AroundOps(["aten.sin", "torch.sin", "co"])) == [0] * 3
    )


@pytest.mark.parametrize("policy", [AroundOps, AtMarkers, BySupport])
@pytest.mark.parametrize("ops", [3, None, [3], [None, "aten.mm"]])
def test_what_is_no_op(chain, policy, ops):
    with pytest.raises(PolicyError, match=rf"(?s)SK302: {policy.__name__} was given .*no ops"):
        labels(chain, policy(ops))


@pytest.mark.parametrize("policy", [AroundOps, AtMarkers, BySupport])
def test_a_rule_that_fails_and_a_function_that_was_meant_as_an_op(chain, policy):
    with pytest.raises(PolicyError, match=r"(?s)SK302: the rule .* fails on add: TypeError.*\[torch\.mm\]") as caught:
        labels(chain, policy(torch.sin))
    assert list(caught.value.nodes) == ["add"]
