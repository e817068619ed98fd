"""`splitkit.CapabilityBasedPartitioner`: the fewest partitions, its limits, its errors, and how it treats the graph."""

from __future__ import annotations

import copy
import itertools
import operator
import random
import re
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.fx.passes.infra import partitioner as infra
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.operator_support import OperatorSupport, create_op_support

import splitkit as sk
from splitkit.errors import CycleError, GraphError, PlanError, PolicyError
from splitkit.graph.dependences import all_dependences
from splitkit.search.adjacent import has_cycle

PARTITIONERS = {"torch": infra.CapabilityBasedPartitioner, "splitkit": sk.CapabilityBasedPartitioner}


def layered(seed, nodes=7, width=3):
    """A random graph of additions, with a weight now and then."""
    dice, graph, root = random.Random(seed), fx.Graph(), nn.Module()
    root.w = nn.Parameter(torch.ones(1))
    root.v = nn.Parameter(torch.ones(3))
    values = [graph.placeholder("x")]
    for _ in range(nodes):
        one, other = dice.choice(values[-width:]), dice.choice(values[-width:])
        other = graph.get_attr(dice.choice("wv")) if dice.random() < 0.4 else other
        values.append(graph.call_function(operator.add, (one, other)))
    graph.output(tuple(values[-width:]))
    return fx.GraphModule(root, graph)


def supports(seed, share=0.7):
    return create_op_support(
        lambda _, node: node.op == "call_function" and random.Random(f"{seed}{node}").random() < share
    )


def parameter_bytes(nodes):
    return sum(
        {"w": 4, "v": 12}[name]
        for name in {n.target for node in nodes for n in node.all_input_nodes if n.op == "get_attr"}
    )


def divisions(items):
    """All divisions of a list into blocks."""
    if not items:
        yield []
        return
    for rest in divisions(items[1:]):
        yield [[items[0]], *rest]
        for i, block in enumerate(rest):
            yield [*rest[:i], [items[0], *block], *rest[i + 1 :]]


def least(gm, nodes, fits):
    """The least number of partitions, by trying every division."""
    before = all_dependences(sk.analyze(gm))
    found = (d for d in divisions(nodes) if all(map(fits, d)) and not has_cycle(d, before))
    return min(map(len, found))


@pytest.mark.parametrize("seed", range(20))
def test_no_division_has_fewer_partitions(seed):
    gm = layered(seed)
    partitioner = sk.CapabilityBasedPartitioner(gm, supports(seed), True)
    partitions = partitioner.propose_partitions()
    nodes = [node for p in partitions for node in p.nodes]
    assert len(partitions) == partitioner.fewest_partitions(partitions) == least(gm, nodes, lambda block: True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "options", [{"max_nodes": 2}, {"max_nodes": 3, "max_parameter_bytes": 12}, {"max_parameter_bytes": "12 B"}]
)
def test_partitions_keep_to_limits_and_the_bound_is_below_the_least_number(seed, options):
    gm = layered(seed)
    partitioner = sk.CapabilityBasedPartitioner(gm, supports(seed), True, **options)
    partitions = partitioner.propose_partitions()
    nodes = [node for p in partitions for node in p.nodes]

    def fits(block):
        few = len(block) <= options.get("max_nodes", len(block))
        return few and ("max_parameter_bytes" not in options or parameter_bytes(block) <= 12)

    assert all(fits(list(p.nodes)) for p in partitions)
    fewest = least(gm, nodes, fits)
    assert partitioner.fewest_partitions(partitions) <= fewest <= len(partitions) <= fewest + 1
    partitioner.fuse_partitions(partitions)


def test_how_near_the_partitions_under_limits_are_to_the_least_number():
    """Of 40 graphs, first fit finds the least number in most, and the bound is reached in most."""
    exact = tight = 0
    for seed in range(40):
        gm = layered(100 + seed, nodes=6)
        partitioner = sk.CapabilityBasedPartitioner(gm, supports(seed, 0.8), True, max_nodes=2)
        partitions = partitioner.propose_partitions()
        fewest = least(gm, [n for p in partitions for n in p.nodes], lambda block: len(block) <= 2)
        exact += len(partitions) == fewest
        tight += partitioner.fewest_partitions(partitions) == fewest
    assert exact >= 32 and tight >= 32


def test_a_node_that_exceeds_a_limit_alone_stays_outside():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("small", (x,)), graph.call_module("large", (x,))))
    gm = fx.GraphModule({"small": nn.Linear(2, 2), "large": nn.Linear(64, 64)}, graph)
    rule = create_op_support(lambda _, node: node.op == "call_module")
    partitions = sk.CapabilityBasedPartitioner(gm, rule, True, max_parameter_bytes="1 kB").propose_partitions()
    assert [[n.name for n in p.nodes] for p in partitions] == [["small"]]


def test_a_tied_weight_counts_once_per_partition():
    def forward(self, x):
        return (x @ self.w) @ self.w

    model = type("Tied", (nn.Module,), {"forward": forward})()
    model.w = nn.Parameter(torch.ones(4, 4))
    rule = create_op_support(lambda _, node: node.op == "call_function")
    partitioner = sk.CapabilityBasedPartitioner(fx.symbolic_trace(model), rule, True, max_parameter_bytes=64)
    assert [p.size() for p in partitioner.propose_partitions()] == [2]


def test_members_of_a_tuple_count_as_nodes():
    def forward(x):
        a, b, c = torch.chunk(torch.sin(x), 3)
        return a + b + c

    gm = fx.symbolic_trace(forward)
    rule = create_op_support(lambda _, node: node.op == "call_function" and node.target is not operator.getitem)
    for most, wanted in ((3, [2, 1]), (4, [2, 4, 1]), (5, [2, 5])):
        partitions = sk.CapabilityBasedPartitioner(gm, rule, True, max_nodes=most).propose_partitions()
        assert all(p.size() <= most for p in partitions)
        assert sorted(p.size() for p in partitions) == sorted(wanted), most


@pytest.mark.parametrize(
    "options", [{"max_nodes": 0}, {"max_nodes": True}, {"max_nodes": 2.5}, {"max_parameter_bytes": "much"}]
)
def test_wrong_limits(options):
    with pytest.raises(PolicyError, match=f"SK302.*{next(iter(options))}"):
        sk.CapabilityBasedPartitioner(layered(0), supports(0), **options)


@pytest.mark.parametrize("field", ["non_compute_ops", "allowed_single_node_partition_ops"])
def test_one_text_instead_of_a_list(field):
    with pytest.raises(PolicyError, match=f"SK302.*{field}='torch.sin'"):
        sk.CapabilityBasedPartitioner(layered(0), supports(0), **{field: "torch.sin"})


def test_a_function_as_a_rule():
    with pytest.raises(PolicyError, match=r"(?s)SK302.*create_op_support"):
        sk.CapabilityBasedPartitioner(layered(0), lambda node: True)


def test_a_graph_that_was_fused_is_fused_again():
    """Torch gives the second module the name of the first, which is then lost."""
    found = {}
    for name, kind in PARTITIONERS.items():
        gm, _ = chain_of(torch.sin, torch.cos, torch.tan)
        wanted = gm(torch.ones(2))
        for target in (torch.sin, torch.tan):
            rule = create_op_support(lambda _, node, target=target: node.target is target)
            kind(gm, rule, True).partition_and_fuse()
        found[name] = torch.equal(gm(torch.ones(2)), wanted)
    assert found == {"torch": False, "splitkit": True}
    assert [n.name for n in gm.graph.nodes] == ["x", "fused_0", "cos", "fused_0_1", "output"]


def test_no_graph():
    with pytest.raises(GraphError, match="SK101"):
        sk.CapabilityBasedPartitioner(nn.Linear(2, 2), supports(0))


def chain_of(*targets):
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        x = graph.call_function(target, (x,))
    graph.output(x)
    gm = fx.GraphModule({}, graph)
    return gm, {n.name: n for n in graph.nodes}


def test_a_partition_that_computes_one_thing_needs_an_op_that_is_worth_a_call():
    gm, _ = chain_of(torch.sin, torch.cos, torch.tan)
    rule = create_op_support(lambda _, node: node.target in (torch.sin, torch.tan))
    for options, wanted in (({}, []), ({"allowed_single_node_partition_ops": ["torch.sin"]}, [["sin"]])):
        partitions = sk.CapabilityBasedPartitioner(gm, rule, **options).propose_partitions()
        assert [[node.name for node in p.nodes] for p in partitions] == wanted


def test_a_cycle_is_named_and_nothing_is_changed():
    gm, node = chain_of(torch.sin, torch.cos, torch.tan)
    code = gm.code
    with pytest.raises(CycleError, match=r"SK311.*partition 1 -> cos -> partition 1|SK311.*cos -> partition 1 -> cos"):
        sk.CapabilityBasedPartitioner(gm, supports(0)).fuse_partitions(
            [Partition(0, []), Partition(7, [node["sin"], node["tan"]])]
        )
    gm.recompile()
    assert gm.code == code


def test_a_cycle_between_partitions_is_named():
    gm, node = chain_of(torch.sin, torch.cos, torch.tan, torch.tanh)
    with pytest.raises(CycleError, match="partition 0") as caught:
        sk.CapabilityBasedPartitioner(gm, supports(0)).fuse_partitions(
            [Partition(0, [node["sin"], node["tan"]]), Partition(1, [node["cos"], node["tanh"]])]
        )
    assert set(caught.value.nodes) == {"partition 0", "partition 1"}


def test_wrong_nodes_are_named():
    gm, node = chain_of(torch.sin, torch.cos)
    other, others = chain_of(torch.sin)
    partitioner = sk.CapabilityBasedPartitioner(gm, supports(0))
    with pytest.raises(PlanError, match="SK310: sin is in partitions 0 and 1"):
        partitioner.fuse_partitions([Partition(0, [node["sin"]]), Partition(1, [node["sin"]])])
    with pytest.raises(PlanError, match=r"SK310.*not a node of this graph"):
        partitioner.fuse_partitions([Partition(0, [others["sin"]])])
    assert other is not gm


def test_a_second_call_of_each_method():
    gm, _ = chain_of(torch.sin, torch.cos, torch.tan, torch.tanh)
    rule = create_op_support(lambda _, node: node.target in (torch.sin, torch.cos, torch.tanh))
    partitioner = sk.CapabilityBasedPartitioner(gm, rule, True)
    first, second = partitioner.propose_partitions(), partitioner.propose_partitions()
    assert [(p.id, p.nodes) for p in first] == [(p.id, p.nodes) for p in second]
    wanted = gm(torch.ones(2))
    assert partitioner.fuse_partitions(first) is gm
    for method in ("fuse_partitions", "fewest_partitions", "remove_bookend_non_compute_ops"):
        with pytest.raises(PlanError, match="SK310"):
            getattr(partitioner, method)(second)
    rest = partitioner.propose_partitions()
    assert rest == []  # nothing is left that the rule supports
    assert torch.equal(partitioner.fuse_partitions(rest)(torch.ones(2)), wanted)
    assert [n.name for n in gm.graph.nodes] == ["x", "fused_1", "tan", "fused_0", "output"]


def test_an_empty_graph_and_a_rule_that_supports_nothing():
    graph = fx.Graph()
    graph.output(())
    gm = fx.GraphModule({}, graph)
    assert sk.CapabilityBasedPartitioner(gm, supports(0)).partition_and_fuse()() == ()
    gm, _ = chain_of(torch.sin)
    partitioner = sk.CapabilityBasedPartitioner(gm, OperatorSupport({"nothing": None}), True)
    # this rule of torch's supports inputs and the output, which are never fused
    assert torch.equal(partitioner.partition_and_fuse()(torch.ones(2)), torch.sin(torch.ones(2)))
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_rule_of_a_subclass_is_asked():
    gm, _ = chain_of(torch.sin, torch.cos)

    class OnlyCos(sk.CapabilityBasedPartitioner):
        def _is_node_supported(self, node):
            return super()._is_node_supported(node) and node.name == "cos"

    rule = create_op_support(lambda _, node: node.op == "call_function")
    assert [[n.name for n in p.nodes] for p in OnlyCos(gm, rule, True).propose_partitions()] == [["cos"]]


def test_an_attribute_that_opaque_code_binds_anew_is_read_between_its_calls():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Module()
            self.child.register_buffer("state", torch.zeros(2))

    root = Holder()

    def rebind(module):
        module.state = module.state + 1
        return module.state

    graph = fx.Graph()
    x, child = graph.placeholder("x"), graph.get_attr("child")
    before = graph.call_function(torch.add, (graph.get_attr("child.state"), x))
    graph.call_function(rebind, (child,))
    after = graph.call_function(torch.add, (graph.get_attr("child.state"), x))
    graph.output((before, after))
    gm = fx.GraphModule(root, graph)
    wanted = copy.deepcopy(gm)(torch.ones(2))
    rule = create_op_support(lambda _, node: node.op == "get_attr" or node.target is torch.add)
    fused = sk.CapabilityBasedPartitioner(gm, rule, True).partition_and_fuse()
    assert all(map(torch.equal, fused(torch.ones(2)), wanted))


def test_an_attribute_is_read_after_opaque_code_that_waits_for_a_partition():
    """The partition is called where its last node was, and the opaque code after it; so must the attribute be read."""
    root = nn.Module()
    root.child = nn.Module()
    root.child.register_buffer("state", torch.zeros(2))

    def rebind(module, value):
        module.state = module.state + value

    graph = fx.Graph()
    x, child = graph.placeholder("x"), graph.get_attr("child")
    sine = graph.call_function(torch.sin, (x,))
    graph.call_function(rebind, (child, sine))
    after = graph.call_function(torch.add, (graph.get_attr("child.state"), x))
    graph.output((after, graph.call_function(torch.cos, (x,))))
    gm = fx.GraphModule(root, graph)
    wanted = copy.deepcopy(gm)(torch.ones(2))
    rule = create_op_support(lambda _, node: node.target in (torch.sin, torch.cos))
    fused = sk.CapabilityBasedPartitioner(gm, rule, True).partition_and_fuse()
    assert sum(n.op == "call_module" for n in gm.graph.nodes) == 1
    assert all(map(torch.equal, fused(torch.ones(2)), wanted))


def test_the_page_of_the_docs_runs():
    gm, _ = chain_of(torch.sin, torch.cos, torch.tan, torch.tanh)
    wanted = gm(torch.ones(2))
    scope = {"gm": gm, "support": create_op_support(lambda _, node: node.target in (torch.sin, torch.cos, torch.tanh))}
    page = (Path(__file__).parents[2] / "docs" / "partitioner.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 3
    theirs = infra.CapabilityBasedPartitioner
    try:
        for block in blocks:
            exec(block, scope)
    finally:
        infra.CapabilityBasedPartitioner = theirs
    assert torch.equal(scope["fused"](torch.ones(2)), wanted) and scope["fewest"] == len(scope["partitions"]) == 0
    named = re.findall(r"`((?:tests|benchmarks)/[\w./]+)`", page)
    assert len(named) > 3 and all((Path(__file__).parents[2] / name).exists() for name in named)
    tests = (Path(__file__).parents[1] / "against_torch" / "test_partitioner_wrong.py").read_text()
    rows = [re.findall(r"`(\w+)`", row.rsplit("|", 2)[1]) for row in page.splitlines() if row.startswith("|")]
    named = {name for row in rows for name in row if f"def {name}(" in tests}
    assert named == set(re.findall(r"def (test_\w+|\w+(?=\(call, graph\)))", tests)) - {
        "write", "a_computed_index", "test_the_result_is_another",
        "test_partitions_around_a_write_are_two_here_and_one_in_torch",
    }  # fmt: skip


def test_dict_outputs_and_keyword_inputs_of_an_exported_module_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = self.a

        def forward(self, x, *, y):
            return {"sum": self.b(torch.softmax(self.a(x), -1)) + y, "y": y.relu()}

    model, inputs = Model(), (torch.rand(2, 4), torch.rand(2, 4))
    gm = sk.capture(model, inputs[0], y=inputs[1])
    rule = create_op_support(lambda _, n: n.op == "call_function" and "softmax" not in str(n.target))
    fused = sk.CapabilityBasedPartitioner(gm, rule, True).partition_and_fuse()
    found, wanted = fused(inputs[0], y=inputs[1]), model(inputs[0], y=inputs[1])
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[key], wanted[key]) for key in wanted)
    assert sum(n.op == "call_module" for n in fused.graph.nodes) == 2


def test_the_work_is_linear_in_nodes():
    """Counted, not timed: `_Blocks` looks at few blocks per node, also where every value is read again at the end."""
    from splitkit.search import adjacent

    def looked_at(nodes):
        graph = fx.Graph()
        x, values = graph.placeholder("x"), []
        for _ in range(nodes):
            x = graph.call_function(torch.sin, (graph.call_function(torch.cos, (x,)),))
            values.append(x)
        for value in reversed(values):
            x = graph.call_function(torch.add, (graph.call_function(torch.cos, (x,)), value))
        graph.output(x)
        gm = fx.GraphModule({}, graph)
        count = itertools.count()

        class Counted(adjacent._Block):
            def __getattribute__(self, name):
                if name == "rank":
                    next(count)
                return super().__getattribute__(name)

        kept, adjacent._Block = adjacent._Block, Counted
        try:
            rule = create_op_support(lambda _, node: node.target in (torch.sin, torch.add))
            sk.CapabilityBasedPartitioner(gm, rule, True, skip_horizontal_fusion=True).propose_partitions()
        finally:
            adjacent._Block = kept
        return next(count) / nodes

    assert looked_at(200) < 1.5 * looked_at(50) + 5
