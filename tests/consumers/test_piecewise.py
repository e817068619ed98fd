"""vLLM's piecewise compilation, which is not installed here: its calls and its rule, on a graph of Dynamo.

Mirrored from vllm/compilation/backends.py (`split_graph`, `PiecewiseCompileInterpreter`); TensorRT-LLM's
piecewise_optimizer and lmdeploy do the same.
"""

from __future__ import annotations

import operator
import time

import pytest
import torch
from attention import OPS, captured
from torch import fx

import splitkit as sk
from splitkit.policies import AroundOps


@pytest.fixture(scope="module")
def decoder():
    return captured(depth=4)


def split_graph(gm, policy=None):
    """The list that vLLM works with: (name, id, is it a part of split ops, module), by id."""
    split = sk.split_module(gm, None, policy or AroundOps(OPS), keep_original_order=True, tuple_return=True)
    items = []
    for name, module in split.named_children():
        number = int(name.replace("submod_", ""))
        items.append((name, number, AroundOps.is_listed(number), module))
    return split, sorted(items, key=lambda item: item[1])


def test_parts_alternate_and_run_like_the_whole(decoder):
    gm, example, model, x = decoder
    split, items = split_graph(gm)
    assert [number for _, number, _, _ in items] == list(range(9)), "4 layers: 4 runs of split ops, 5 pieces"
    called = [n.target for n in split.graph.nodes if n.op == "call_module"]
    assert called == [name for name, *_ in items], "in the order of their numbers"
    for _, _, is_split_op, module in items:
        ops = [str(n.target).partition(".default")[0].replace(".", "::") for n in module.graph.nodes]
        assert (not set(ops).isdisjoint(OPS)) == is_split_op
        assert not is_split_op or ops.count(OPS[0]) == ops.count(OPS[1]) == 1, "the cache is written right before"
    with torch.no_grad():
        caches = {name: b.clone() for name, b in model.named_buffers()}
        expected = model(x)
        after = {name: b.clone() for name, b in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(caches[name])
        (got,) = split(*example)
    assert torch.equal(got, expected)
    assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())


def test_only_tensors_and_ints_cross_and_parts_return_tuples(decoder):
    gm, *_ = decoder
    assert any(n.op == "call_method" and n.target == "size" for n in gm.graph.nodes), "the graph asks for sizes"
    _, items = split_graph(gm)
    for _, _, _, module in items:
        (output,) = module.graph.find_nodes(op="output")
        assert isinstance(output.args[0], tuple)
        for node in (*module.graph.find_nodes(op="placeholder"), *output.all_input_nodes):
            assert isinstance(node.meta["example_value"], torch.Tensor | torch.SymInt | int), node


def test_each_part_takes_the_symbols_of_the_shapes_that_it_sees(decoder):
    gm, *_ = decoder
    _, items = split_graph(gm)
    for name, _, _, module in items:
        values = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        given = {str(v) for v in values if isinstance(v, torch.SymInt)}
        needed = {str(d) for v in values if isinstance(v, torch.Tensor) for d in v.shape if isinstance(d, torch.SymInt)}
        assert needed and needed <= given, name


def test_pieces_can_be_compiled_one_by_one(decoder):
    """As `PiecewiseCompileInterpreter` does: run the stitching graph, replace each piece when it is reached."""
    gm, example, model, x = decoder
    split, items = split_graph(gm)
    compiled = {name for name, _, is_split_op, _ in items if not is_split_op}
    seen = []

    class Pieces(fx.Interpreter):
        def call_module(self, target, args, kwargs):
            result = super().call_module(target, args, kwargs)
            assert isinstance(result, tuple) and not kwargs
            if target in compiled:
                seen.append(target)
                piece = self.fetch_attr(target)
                self.module.__dict__[target] = torch.compile(piece, backend="aot_eager", dynamic=True, fullgraph=True)
            return result

    with torch.no_grad():
        Pieces(split).run(*example)
        assert seen == sorted(compiled)
        for buffer in model.buffers():
            buffer.zero_()
        (got,) = split(*example)
    for buffer in model.buffers():
        buffer.zero_()
    with torch.no_grad():
        torch.testing.assert_close(got, model(x))


def vllm_ids(gm):
    """Which piece vLLM puts each node in: its loop over the nodes, in our words."""

    def is_split(node):
        return node.op == "call_function" and str(node.target).partition(".default")[0].replace(".", "::") in OPS

    number, ids = 0, {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0].op != "placeholder":
            ids[node] = ids[node.args[0]]
        elif is_split(node):
            ids[node] = number = number + 1
            number += -1 if is_split(node.next) else 1
        else:
            ids[node] = number
    return ids


def test_the_policy_has_the_rule_of_vllm(decoder):
    gm, *_ = decoder
    flow = sk.analyze(gm)
    plan = AroundOps(OPS).assign(flow, sk.costs.unit(gm))
    expected = vllm_ids(gm)
    rest = [n for n in flow.nodes if n.target != "size"]  # vLLM takes them apart beforehand
    assert {n.name: plan.home(n) for n in rest} == {n.name: expected[n] for n in rest}


def test_the_rule_of_vllm_as_a_callback(decoder):
    gm, example, model, x = decoder
    ids = vllm_ids(gm)
    split, items = split_graph(gm, lambda node: ids[node])
    assert len(items) == 9
    for buffer in model.buffers():
        buffer.zero_()
    with torch.no_grad():
        assert torch.equal(split(*example)[0], model(x))


def test_many_pieces():
    gm, example, model, x = captured(depth=20)
    start = time.perf_counter()
    split, items = split_graph(gm)
    seconds = time.perf_counter() - start
    assert len(items) == 41 and seconds < 5
    for buffer in model.buffers():
        buffer.zero_()
    with torch.no_grad():
        assert torch.equal(split(*example)[0], model(x))
