from __future__ import annotations

from typing import Any

import pytest
import torch
from opnodes import FRESH, Layer, X, Y, call, method, module, names, seen
from torch import fx, nn

from splitkit.graph.ops import declare, declared, effects_of

aten = torch.ops.aten


def friend(x: Any, y: Any = None) -> Any:
    return y


def test_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", {})
    declare(friend, writes=("y",), aliases=(0,), random=True)
    assert seen(call(friend, X, Y)) == seen(call(friend, x=X, y=Y)) == ({"y"}, {"x"}, True, False)
    assert seen(call(friend, X)) == (set(), {"x"}, True, False)
    declare("frobnicate")
    assert seen(method("frobnicate", X)) == FRESH
    declare(aten.relu.default, impure=True)
    assert seen(call(aten.relu.default, X))[3]
    declare(Layer, aliases=(0,))
    node, root = module(Layer())
    e = effects_of(node, root)
    assert (names(e.aliases), e.known, len(e.writes_state)) == ({"x"}, True, 1)
    root.m.eval()  # a part may be put into training mode later
    assert len(effects_of(node, root).writes_state) == 1
    assert not effects_of(module(nn.Sequential(Layer()))[0], module(nn.Sequential(Layer()))[1]).known


def test_a_custom_operator_may_be_random_until_it_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", {})

    @torch.library.custom_op("splitkit_test_ops::draw", mutates_args=())
    def draw(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x)

    packet = torch.ops.splitkit_test_ops.draw
    functional = torch.ops.higher_order.auto_functionalized
    for target, args in ((packet, (X,)), (packet.default, (X,)), (functional, (packet.default, X))):
        assert seen(call(target, *args))[2]
    assert not seen(call(aten.relu.default, X))[2] and not seen(call(torch.ops.prims.sin.default, X))[2]
    declare(draw)
    for target, args in ((packet, (X,)), (packet.default, (X,)), (functional, (packet.default, X))):
        assert not seen(call(target, *args))[2]


def test_arguments_of_operators_are_declared_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", {})
    declare(aten.add.Tensor, writes=("other",), aliases=("self",))
    assert seen(call(aten.add.Tensor, X, Y)) == seen(call(aten.add.Tensor, X, other=Y)) == ({"y"}, {"x"}, False, False)


@pytest.mark.parametrize("change", ["hook", "forward", "hook of a child"])
def test_a_declaration_does_not_cover_what_is_added_to_a_module(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(declared, "_DECLARED", {})
    declare(Layer)
    root, graph = nn.Module(), fx.Graph()
    root.layer = Layer()
    root.layer.add_module("child", nn.Linear(2, 2))
    node = graph.call_module("layer", (graph.placeholder("x"),))
    assert effects_of(node, root).known
    if change == "forward":
        root.layer.forward = lambda x: x
    else:
        changed = root.layer if change == "hook" else root.layer.child
        changed.register_forward_pre_hook(lambda module, args: None)
    assert not effects_of(node, root).known


def test_a_declared_module_reads_the_tensors_in_its_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_DECLARED", {})
    declare(Layer)
    root, graph, held = nn.Module(), fx.Graph(), torch.ones(2)
    root.layer = Layer()
    root.layer.held = {"all": [held]}
    read = effects_of(graph.call_module("layer", (graph.placeholder("x"),)), root).reads_state
    assert any(tensor is held for tensor in read)
