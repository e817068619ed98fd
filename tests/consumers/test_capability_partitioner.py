"""torch's CapabilityBasedPartitioner: `BySupport` never makes more parts, and the drop-in proposes the same ones."""

from __future__ import annotations

import copy
import operator
import random

import pytest
import torch
from campaigns import some_of_all, these_first
from torch import fx, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils._pytree import tree_leaves
from zoographs import specimens

import splitkit as sk
from splitkit.graph.scope import is_state_op
from splitkit.plans.parts import PARENT
from splitkit.policies import BySupport
from splitkit.testing import assert_same

ZOO = specimens()


class Support(OperatorSupportBase):
    """A rule as torch's partitioners take it; members of a tuple are with its producer."""

    def __init__(self, rule):
        self.rule = rule

    def is_node_supported(self, submodules, node):
        while (
            node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].op != "placeholder"
        ):
            node = node.args[0]
        return node.op.startswith("call_") and self.rule(node)


def some(seed, share=0.6):
    """A rule that supports ``share`` of the targets of a graph."""
    return lambda node: random.Random(f"{seed} {node.op} {node.target}").random() < share


def counts(gm, rule):
    """(parts of splitkit, parts of torch that hold a node which a policy places)"""
    flow = sk.analyze(gm)
    plan = BySupport(Support(rule)).assign(flow, sk.costs.unit(gm))
    partitioner = CapabilityBasedPartitioner(gm, Support(rule), allows_single_node_partition=True)
    theirs = [p for p in partitioner.propose_partitions() if any(flow.is_placeable(n) for n in p.nodes)]
    for node in flow.nodes:
        assert (plan.home(node) is not PARENT) == rule(node)
    return len(plan.parts), len(theirs)


def has_effects(flow):
    return any(flow.after.values())


@pytest.mark.parametrize(("name", "seed"), some_of_all(ZOO, range(4), always=()))
def test_never_more_parts_than_torch_on_the_zoo(name, seed):
    """Where effects order the graph, torch's count is not a measure: it moves nodes across writes."""
    gm = ZOO[name].graph
    ours, theirs = counts(gm, some(seed))
    assert ours <= theirs or has_effects(sk.analyze(gm))
    assert_same(gm, sk.split(gm, BySupport(Support(some(seed)))), *ZOO[name].inputs, tolerance=ZOO[name].tolerance)


@pytest.mark.parametrize("name", these_first(["llama"], ["gpt2", "bert", "t5"]))
def test_never_more_parts_than_torch_on_models(small, name):
    model, inputs = small(name)
    if name == "t5":
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    gm = sk.capture(model.eval(), **inputs)
    assert not has_effects(sk.analyze(gm)) or name == "t5"
    for unsupported in (
        ["aten.softmax"],
        ["aten.layer_norm", "aten.mean"],
        ["aten.linear"],
        ["aten.gelu", "aten.silu"],
    ):
        names = tuple(unsupported)
        ours, theirs = counts(gm, lambda node, names=names: not str(node.target).startswith(names))
        assert 1 <= ours <= theirs


def test_split_module_leaves_in_the_parent_what_has_no_part(small):
    """As `fuse_by_partitions` does: unsupported nodes stay, in the order and with the meta that they had."""
    model, inputs = small("bert")
    gm = sk.capture(model.eval(), **inputs)
    plan = BySupport(lambda n: "softmax" not in n.name and "layer_norm" not in n.name).assign(
        sk.analyze(gm), sk.costs.unit(gm)
    )
    split = sk.split_module(gm, None, plan.home, keep_original_order=True, keep_original_node_name=True)
    left = [n.name for n in gm.graph.nodes if ("softmax" in n.name or "layer_norm" in n.name) and n.op != "get_attr"]
    kept = [n for n in split.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [n.name for n in kept] == left and all("val" in n.meta for n in kept)
    assert len([n for n in split.graph.nodes if n.op == "call_module"]) == len(plan.parts)
    assert torch.equal(split(**inputs).logits, model(**inputs).logits)


def layered(seed, width=6, depth=12):
    """Several chains that read from each other."""
    dice = random.Random(seed)
    graph = fx.Graph()
    values = [graph.placeholder(f"x{i}") for i in range(width)]
    for _ in range(depth * width):
        op = dice.choice((torch.sin, torch.cos, torch.tanh, torch.add))
        args = dice.sample(values[-2 * width :], 2 if op is torch.add else 1)
        values.append(graph.call_function(op, tuple(args)))
    graph.output(tuple(values[-width:]))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_never_more_parts_than_torch_on_random_graphs(share):
    for seed in range(20):
        ours, theirs = counts(layered(seed), lambda n, seed=seed: random.Random(f"{seed} {n}").random() < share)
        assert ours <= theirs


@pytest.mark.parametrize("seed", range(5))
def test_no_plan_has_fewer_parts(seed):
    """The longest chain of supported nodes with an unsupported one between any two is a bound that is met."""
    gm = layered(seed)
    depth = {}
    for node in gm.graph.nodes:
        before = [depth.get(n, (0, 0)) for n in node.all_input_nodes]
        supported, crossed = max((s for s, _ in before), default=0), max((c for _, c in before), default=0)
        if node.op == "call_function":
            # (parts that a chain up to here needs; the same after an unsupported node)
            depth[node] = (
                (supported, supported + 1) if node.target is torch.sin else (max(supported, crossed, 1), crossed)
            )
    ours, _ = counts(gm, lambda n: n.target is not torch.sin)
    assert ours == max(s for s, _ in depth.values())


RULES = {
    "no softmax": lambda node: "softmax" not in str(node.target),
    "no norm": lambda node: not str(node.target).startswith(("aten.layer_norm", "aten.mean", "aten.rsqrt")),
    "no linear": lambda node: not str(node.target).startswith(("aten.linear", "aten.addmm")),
    "matmuls": lambda node: str(node.target).startswith(("aten.linear", "aten.matmul", "aten.addmm", "aten.view")),
    "half": some(1),
}


@pytest.mark.parametrize("name", these_first(["gpt2"], ["llama", "bert", "t5"]))
def test_the_drop_in_proposes_torchs_partitions_of_models(small, name):
    """The same ids, nodes and order under each rule, with and without horizontal fusion; the fused model computes the
    same.
    """
    model, inputs = small(name, layers=2)
    if name == "t5":
        inputs = {**inputs, "decoder_input_ids": inputs["input_ids"]}
    gm = sk.capture(model.eval(), **inputs)
    ordered = has_effects(sk.analyze(gm)) or any(map(is_state_op, gm.graph.nodes))
    for rule in RULES.values():
        for skip in (False, True):
            options = {"allows_single_node_partition": True, "skip_horizontal_fusion": skip}
            torchs, ours = (
                [(p.id, [*p.nodes.items()]) for p in kind(gm, Support(rule), **options).propose_partitions()]
                for kind in (CapabilityBasedPartitioner, sk.CapabilityBasedPartitioner)
            )
            assert ours == torchs or ordered
    fused = sk.CapabilityBasedPartitioner(copy.deepcopy(gm), Support(RULES["no softmax"])).partition_and_fuse()
    wanted, found = gm(**inputs), fused(**inputs)
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(wanted)))
