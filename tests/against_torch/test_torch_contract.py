"""The drop-in contract: where torch's split_module is right, splitkit's makes the same modules, name for name.

The known differences, all deliberate, stay out of these cases:

* parts run in the order of their first node as far as data and effects allow; torch's default runs independent parts
  last in, first out. Both agree with ``keep_original_order=True``, and where only one order is possible;
* a ``getitem`` follows the node whose tuple it takes apart, whatever the callback says of it;
* inputs of the parent keep the names that callers use; torch's ``keep_original_node_name`` renames them as well;
* attributes in the parent keep the names of their nodes under that flag; torch names them after their targets;
* the code generator of the graph (pytrees) is kept, and meta is added to what torch leaves bare;
* regions are opened behind the placeholders, and only in parts that need them;
* what stands in no part is computed in the parent: the grad mode that a graph leaves, nodes of the part ``None``;
* symbols are also read from ``meta["val"]``; sizes and floats do not cross.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.passes.split_module import split_module as torch_split_module
from torch.testing import assert_close
from torchgraphs import TUPLE_RETURN, Label, both, by_name, called, graph_of, inputs_of, label, named, written
from torchmodels import CUTS, DEALT, GRAPHS, in_turn, three_runs

import splitkit as sk
from splitkit.engine.codegen.writer import LeanGraph

FLAGS: dict[str, dict[str, Any]] = {
    "": {},
    "names": {"keep_original_node_name": True},
    "arg_0": {"keep_original_input_name": False},
    "affix": {"partition_affix": "pp"},
    "tuple": {"tuple_return": True},
    "all": {
        "keep_original_node_name": True,
        "keep_original_input_name": False,
        "partition_affix": "pp",
        "tuple_return": True,
    },
}
if not TUPLE_RETURN:
    del FLAGS["tuple"], FLAGS["all"]["tuple_return"]

X = torch.ones(2, 2)
each_graph = pytest.mark.parametrize("graph", GRAPHS)
each_cut = pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
each_flag = pytest.mark.parametrize("flags", FLAGS)


@functools.cache
def made(graph: str) -> tuple[fx.GraphModule, tuple[Any, ...]]:
    """A graph and its inputs; splitting leaves both as they are."""
    return GRAPHS[graph]()


def split_both(graph: str, cut: Callable[[fx.GraphModule], Label], flags: str, **more: Any) -> Any:
    """(what torch makes of a graph, what splitkit makes of it)"""
    gm, _ = made(graph)
    return both(gm, cut(gm), **FLAGS[flags], **more)


@each_graph
@each_cut
@each_flag
def test_every_part_has_torchs_code(graph, cut, flags):
    """Its inputs in the order of first use, its nodes, its outputs as they are first needed; all their names."""
    torchs, ours = split_both(graph, cut, flags)
    assert set(called(ours)) == set(called(torchs))
    for part in called(torchs):
        assert ours.get_submodule(part).code == torchs.get_submodule(part).code


@each_graph
@each_cut
@each_flag
def test_the_parent_is_torchs_in_the_original_order(graph, cut, flags):
    torchs, ours = split_both(graph, cut, flags, keep_original_order=True)
    assert written(ours) == written(torchs)


@each_graph
@each_flag
def test_the_parent_is_torchs_where_one_order_is_possible(graph, flags):
    torchs, ours = split_both(graph, three_runs, flags)
    assert called(torchs) == sorted(called(torchs)), "not a chain"
    assert written(ours) == written(torchs)


@each_graph
@each_cut
def test_modules_and_state_have_torchs_names_in_its_order(graph, cut):
    torchs, ours = split_both(graph, cut, "affix", keep_original_order=True)
    for members in (nn.Module.named_modules, nn.Module.named_parameters, nn.Module.named_buffers):
        assert [n for n, _ in members(ours)] == [n for n, _ in members(torchs)]
    assert list(ours.state_dict()) == list(torchs.state_dict())
    assert ours.meta["partition_names"] == set(called(torchs))


@each_graph
@each_cut
@pytest.mark.parametrize("flags", ["", "affix"])
def test_the_map_of_names_is_torchs(graph, cut, flags):
    gm, _ = made(graph)
    torchs: dict[str, str] = {}
    ours: dict[str, str] = {}
    torch_split_module(gm, None, cut(gm), torchs, **FLAGS[flags])
    sk.split_module(gm, None, cut(gm), ours, **FLAGS[flags])
    assert ours == torchs


@each_graph
@each_cut
def test_nodes_have_torchs_meta_and_type(graph, cut):
    torchs, ours = split_both(graph, cut, "names")
    for part in called(torchs):
        pairs = zip(torchs.get_submodule(part).graph.nodes, ours.get_submodule(part).graph.nodes, strict=True)
        for theirs, node in pairs:
            assert node.type == theirs.type
            assert node.op == "output" or node.meta == theirs.meta


@each_graph
@each_cut
@pytest.mark.parametrize("keep_original_order", [False, True])
def test_the_results_are_torchs(graph, cut, keep_original_order):
    gm, inputs = made(graph)
    torchs, ours = both(gm, cut(gm), keep_original_order=keep_original_order)
    for run in (torchs, ours):
        assert_close(run(*inputs), gm(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("graph", DEALT)
@each_flag
def test_nodes_dealt_out_in_turn(graph, flags):
    torchs, ours = split_both(graph, in_turn, flags)
    for part in called(torchs):
        assert ours.get_submodule(part).code == torchs.get_submodule(part).code


def test_what_print_shows():
    torchs, ours = split_both("documented", in_turn, "")
    assert str(ours) == str(torchs)


def run_body(body, x, y):
    return body(x) + y


def test_the_body_of_a_higher_order_op_is_in_its_part():
    def write(call, graph):
        body, x = graph.get_attr("body"), graph.placeholder("x")
        return call("p1", run_body, body, call("p0", torch.sin, x), x)

    torchs, ours = both(graph_of(write, body=fx.symbolic_trace(nn.ReLU())), label)
    assert named(ours.submod_1)["body"].op == "get_attr"
    assert inputs_of(ours.submod_1) == inputs_of(torchs.submod_1) == ["p0", "x"]
    assert torch.equal(ours.submod_1.body(-X), torchs.submod_1.body(-X))
    assert torch.equal(ours(-X), torchs(-X))


def test_attributes_that_are_read_late_change_no_order():
    def write(call, graph):
        x = graph.placeholder("x")
        a, b = call("p0", torch.sin, x), call("p1", torch.cos, x)
        return b, call("p0_late", torch.add, a, graph.get_attr("late"))

    torchs, ours = both(graph_of(write, late=nn.Parameter(X)), label, keep_original_order=True)
    assert called(ours) == called(torchs) == ["submod_0", "submod_1"]


@pytest.mark.parametrize("ids", ["ab", [7, 3], [True, False]], ids=str)
def test_ids_of_other_kinds_name_the_parts_as_in_torch(ids):
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    torchs, ours = both(gm, by_name(_0=ids[0], _1=ids[1]))
    assert called(ours) == called(torchs) == [f"submod_{i}" for i in ids]


def test_all_but_the_callback_is_as_in_torchs_signature():
    torchs, ours = (inspect.signature(f).parameters for f in (torch_split_module, sk.split_module))
    for name, parameter in torchs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)
    assert list(ours)[:7] == list(torchs)[:7]


AUTOCAST = (torch.amp._enter_autocast, "cpu", torch.bfloat16, True, None)
GRAD_OFF = (torch._C._set_grad_enabled, False)


@pytest.mark.parametrize("enter", [AUTOCAST, GRAD_OFF], ids=["autocast", "no_grad"])
def test_a_region_changes_nothing_else_of_the_parts(enter):
    def write(call, graph):
        x = graph.placeholder("x")
        opened = call("p0_region", *enter)
        y = call("p1", torch.mm, call("p0", torch.mm, x, x), x)
        leave = (torch.amp._exit_autocast, opened) if enter is AUTOCAST else (torch._C._set_grad_enabled, True)
        call("p1_region", *leave)
        return call("p2", torch.sin, y)

    torchs, ours = both(graph_of(write), label, keep_original_node_name=True)
    for split in (torchs, ours):
        parts = [[n for n in named(split.get_submodule(p)) if n in ("x", "p0", "p1", "p2")] for p in called(split)]
        assert parts == [["x", "p0"], ["p0", "x", "p1"], ["p1", "p2"]]
    assert torch.equal(ours(X), torchs(X))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda gm: pickle.loads(pickle.dumps(gm))], ids=["copied", "pickled"])
def test_the_module_can_be(again):
    gm, inputs = made("nested")
    for split in both(gm, three_runs(gm)):
        assert_close(again(split)(*inputs), gm(*inputs))


def test_torchs_switch_for_lazy_code(monkeypatch):
    """Inside torch's ``_use_lazy_graph_module`` code is made when a module is first called."""
    gm, inputs = made("nested")
    sk.split_module(gm, None, three_runs(gm))(*inputs)  # checks of how torch makes code, once a process
    codes, python_code = [], LeanGraph.python_code
    monkeypatch.setattr(
        LeanGraph, "python_code", lambda self, *a, **k: codes.append(self) or python_code(self, *a, **k)
    )
    with _use_lazy_graph_module(True):
        split = sk.split_module(gm, None, three_runs(gm))
        assert not codes
        split(*inputs)
        assert len(codes) == 4, "three parts and the parent"
