"""A plan file finds its nodes in the same model that was captured in another order, and knows the sizes it is for."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import setorder
import torch

import splitkit as sk
from splitkit.errors import FileError, PlanWarning
from splitkit.plans import plan_file
from splitkit.plans.parts import Claim
from splitkit.plans.plan_file import size_differences


def captured(order, rows=4, op=torch.relu):
    model = setorder.model(order, op)
    return model, sk.capture(model, setorder.inputs(rows))


@pytest.fixture(scope="module")
def graphs():
    return captured(0), captured(1)


def planned(gm):
    """The tables of each kind in a part of their own, what reads the input in a third, and the rest nowhere."""
    below = {}
    for node in gm.graph.nodes:
        own = {str(node.target)} if node.op in ("get_attr", "placeholder") else set()
        below[node] = own.union(*(below[n] for n in node.all_input_nodes))
    return sk.plan(gm, {n: kind for n in sk.analyze(gm).nodes if (kind := kind_of(below[n]))})


def kind_of(read):
    return "rest" if "x" in read else next((kind for kind in ("full", "sliding") if kind in read), None)


def reads(split):
    """Part -> what it reads of the model."""
    return {
        key: {str(n.target) for node in sub.nodes for n in node.all_input_nodes if n.op == "get_attr"}
        for key, sub in split.subgraphs.items()
    }


def test_the_captures_differ(graphs):
    (_, one), (_, other) = graphs
    assert plan_file.fingerprint(one.graph) != plan_file.fingerprint(other.graph)


def test_a_plan_finds_the_right_nodes_in_another_order(graphs, tmp_path):
    (_, one), (model, other) = graphs
    plan = planned(one)
    plan.save(tmp_path / "plan.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = sk.Plan.load(tmp_path / "plan.json", other.graph)
    assert again.claim == plan.claim and again.note == plan.note and len(again) == len(plan)
    split = sk.split(other, again)
    assert reads(split)["full"] == {"full"} and reads(split)["sliding"] == {"sliding"}
    sk.compare(model, split, setorder.inputs()).raise_if_different()


def test_by_names_alone_it_would_find_others(graphs):
    """The names of both graphs are the same, and mean other nodes."""
    (_, one), (_, other) = graphs
    places = {n.name: keys[0] for n, keys in planned(one).items()}
    assert places.keys() <= {n.name for n in sk.analyze(other).nodes}
    assert reads(sk.split(other, places, on_cycle="merge")) != reads(sk.split(one, planned(one)))


def test_where_another_graph_differs_is_said(graphs):
    data = planned(graphs[0][1]).to_dict()
    _, other = captured(1, op=torch.tanh)
    with pytest.raises(FileError, match=r"SK502.*first differ at 'relu' of the plan and 'tanh' of this graph"):
        sk.Plan.from_dict(other.graph, data)


def test_a_node_that_is_placed_and_described_nowhere_is_refused(graphs):
    data = planned(graphs[0][1]).to_dict()
    name = next(iter(data["places"]))
    data["nodes"] = [text for text in data["nodes"] if not text.startswith(f"{name} ")]
    with pytest.raises(FileError, match="SK502"):
        sk.Plan.from_dict(graphs[1][1].graph, data)


@pytest.mark.parametrize("order", [0, 1])
def test_a_plan_at_other_sizes_has_no_claim(graphs, order):
    data = json.loads(json.dumps(planned(graphs[0][1]).to_dict()))
    data["claim"] = vars(Claim("slowest stage", 2.0, 1.0, "test", limiting="full"))
    _, other = captured(order, rows=2)
    with pytest.warns(
        PlanWarning, match=r"SK509: .* x was float32\[4, 8\] and is float32\[2, 8\], and so for \d+ more"
    ):
        plan = sk.Plan.from_dict(other.graph, data)
    assert plan.claim is None and "for other sizes: x was float32[4, 8]" in plan.note
    sk.compare(setorder.model(order), sk.split(other, plan), setorder.inputs(2)).raise_if_different()


def test_files_that_describe_no_nodes_say_nothing_of_sizes(graphs):
    data = planned(graphs[0][1]).to_dict()
    del data["nodes"]
    _, other = captured(0, rows=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sk.Plan.from_dict(other.graph, data)


def test_the_sizes_that_differ_are_counted_beyond_the_first(graphs):
    def told(*names):
        known = [SimpleNamespace(name=name, value="float32[9]") for name in names]
        return size_differences(known, {name: node for name in names if (node := by_name.get(name)) is not None})

    by_name = {node.name: node for node in graphs[0][1].graph.nodes}
    (given,) = graphs[0][1].graph.find_nodes(op="placeholder", sort=False)[-1:]
    computed = [
        node.name
        for node in graphs[0][1].graph.nodes
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    ][:2]
    assert told() == "" and told("no such node") == ""
    assert "and so for" not in told(given.name)
    first = told(*computed, given.name)  # an input before what is computed of it
    assert first.startswith(f"{given.target} was float32[9] and is") and first.endswith(", and so for 2 more")
    assert told(*computed).endswith(", and so for 1 more")
