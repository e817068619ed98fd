"""Ways to say which ops are meant."""

from __future__ import annotations

import operator
import sys

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
        (aten.relu, "torch.ops.aten.relu"),
        (torch.einsum, "torch.einsum"),
    ],
)
def test_names_of_ops(target, name):
    assert labels(graph(torch.cos, target, torch.cos), AroundOps([name])) == [0, 1, 2]


def test_called_modules_are_named_by_class():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.ReLU()))
    assert labels(gm, AroundOps(nn.Linear)) == labels(gm, AroundOps([nn.Linear])) == [0, 1, 2]
    assert labels(gm, AroundOps("torch.nn.Linear")) == [0, 1, 2], "by its name"
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
        labels(graph(torch.cos, torch.sinh, aten.sin_.default), AroundOps(["aten.sin", "torch.sin", "cov"])) == [0] * 3
    )


@pytest.mark.parametrize("policy", [AroundOps, AtMarkers, BySupport])
@pytest.mark.parametrize("ops", [3, None, [3], [None, "aten.mm"]])
def test_what_is_no_op(chain, policy, ops):
    with pytest.raises(PolicyError, match=rf"(?s)SK302: {policy.__name__} was given .*not ops"):
        labels(chain, policy(ops))


@pytest.mark.parametrize("policy", [AroundOps, AtMarkers, BySupport])
def test_a_rule_that_fails_and_a_function_that_was_meant_as_an_op(chain, policy):
    with pytest.raises(PolicyError, match=r"(?s)SK302: the rule .* fails on add: TypeError.*\[torch\.mm\]") as caught:
        labels(chain, policy(torch.sin))
    assert list(caught.value.nodes) == ["add"]


NO_OPS = ["aten.mmm", "aten::mmm", "atne.mm", "aten.sin.zzz", "torch.siin", "siin_", "torch.float32", "shape", "Linear"]


@pytest.mark.parametrize("name", [*NO_OPS, "", ".", "torch.", "aten..mm", "mylibrary.attention", "load_library.mm"])
def test_a_name_that_is_no_op_is_refused(chain, name):
    for policy in (AroundOps([name]), AtMarkers(name), BySupport(["aten.mm", name])):
        with pytest.raises(
            PolicyError, match=rf"SK304: {type(policy).__name__} was given .*, which is not an op\n"
        ) as caught:
            labels(chain, policy)
        assert caught.value.nodes == (name,)


@pytest.mark.parametrize(
    ("name", "near"),
    [("aten.mmm", "aten.mm"), ("torch.siin", "torch.sin"), ("siin_", "sin_"), ("mine.attn", "mine.attend")],
)
def test_the_nearest_ops_are_proposed(name, near):
    def attend(x):
        return x

    attend.__module__ = "mine"
    with pytest.raises(PolicyError, match=rf"Did you mean .*{near}\b"):
        labels(graph(torch.cos, attend), AroundOps(name))


@pytest.mark.parametrize(
    "name",
    [
        "aten.mm",
        "aten.mm.default",
        "relu_",
        "torch.relu",
        "operator.neg",
        "getitem",
        "real",
        "wrap_with_set_grad_enabled",
        "vllm::attention",  # of a library that is not loaded
    ],
)
def test_ops_that_the_graph_does_not_have_are_fine(name):
    assert labels(graph(torch.cos), AroundOps([name])) == [0]


def test_ops_that_a_library_has_not_defined_yet_are_fine():
    """vLLM defines its ops where a model needs them, and lists them for all models."""
    library = torch.library.Library("splitkit_matching", "DEF")
    library.define("here(Tensor x) -> Tensor")
    here = torch.ops.splitkit_matching.here
    ops = ["splitkit_matching.here", "splitkit_matching.later", "splitkit_matching::later"]
    assert labels(graph(torch.cos, here.default), AroundOps(ops)) == [0, 1]


def test_a_module_that_cannot_load_what_it_is_asked_for(monkeypatch):
    class Lazy:
        def __getattr__(self, name):
            raise RuntimeError("no such backend")

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy())
    with pytest.raises(PolicyError, match="SK304"):
        labels(graph(torch.cos), AroundOps("lazy_module.attention"))
