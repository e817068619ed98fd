"""Prices from traces of torch's profiler: of a real run, and of traces written by hand, whose times are known."""

from __future__ import annotations

import json
import re

import pytest
import torch
from capturedmodels import captured_example
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import splitkit as sk
from splitkit.costs.timing.profiler_trace import load_steps
from splitkit.costs.timing.traced import _like_others
from splitkit.errors import CostError, FileError
from splitkit.testing import models

SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 96, "seq": 12}


def record(example, path, *, train=True, shapes=True):
    """Three steps, as the docstring of `traced` says."""
    run = schedule(wait=0, warmup=1, active=3, repeat=1)
    write = lambda p: p.export_chrome_trace(str(path))  # noqa: E731
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes, schedule=run, on_trace_ready=write) as prof:
        for _ in range(4):
            loss = example.model(*example.args, **example.kwargs).loss
            if train:
                loss.backward()
            prof.step()
    return path


def covered(costs):
    """The share of the trace's time that nodes have, in percent."""
    return int(re.search(r"(\d+)% of the time", costs.note)[1])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    example, gm = captured_example("llama", **SMALL)
    return example, gm, record(example, tmp_path_factory.mktemp("trace") / "trace.json")


def test_a_real_trace_prices_what_the_model_computes(llama):
    _, gm, path = llama
    costs = sk.costs.traced(gm, path)
    assert isinstance(costs, sk.costs.MeasuredSteps) and covered(costs) > 97
    linear = [node for node in gm.graph.nodes if "linear" in str(node.target)]
    assert len(linear) == 7 + 1
    assert all(costs.seconds(node) > 0 and costs.backward(node) > 0 for node in linear)
    assert "trace.json, 3 steps" in costs.note and "forward and backward" in costs.note
    plan = sk.plan(gm, sk.policies.Stages(2, "1f1b", 4), costs)
    assert plan.claim.value > 0 and sk.Plan.from_dict(gm.graph, plan.to_dict()).claim == plan.claim


def test_a_trace_without_backward_or_sizes(llama, tmp_path):
    example, gm, _ = llama
    forward = sk.costs.traced(gm, record(example, tmp_path / "f.json", train=False, shapes=False))
    assert isinstance(forward, sk.costs.Measured) and not hasattr(forward, "backward") and covered(forward) > 97


def test_a_trace_of_other_sizes_or_another_model_is_refused(llama, tmp_path):
    _, gm, path = llama
    longer = models.build("llama", **{**SMALL, "seq": 14})
    for other in (longer, models.build("llama", **{**SMALL, "layers": 2}), models.build("gpt2", **SMALL)):
        with pytest.raises(CostError, match="SK326") as error:
            sk.costs.traced(sk.capture(other.model, **other.kwargs), path)
        assert error.value.nodes and "% of the FLOPs" in error.value.reason
    joint = sk.capture_joint(nn.Linear(2, 2), torch.ones(1, 2), loss=torch.sum)
    with pytest.raises(CostError, match="SK326: backward is in this graph"):
        sk.costs.traced(joint.graph_module, path)
    with pytest.raises(CostError, match="SK325"):
        sk.costs.traced(gm, path).seconds(next(iter(joint.graph_module.graph.nodes)))


def test_the_command_line_plans_with_a_trace(llama, tmp_path, capsys):
    from splitkit import cli

    words = ["plan", "llama", "--size", "layers=1,width=32,heads=2", "--size", "vocab=96,seq=12", "--stages", "2"]
    assert cli.main([*words, "--costs", f"trace:{llama[2]}", "--json"]) == 0
    assert "traced in trace.json" in json.dumps(json.loads(capsys.readouterr().out))
    assert cli.main([*words, "--costs", "trace"]) == 2
    assert cli.main([*words, "--costs", "trace:nowhere.json"]) == 1
    assert "SK504" in capsys.readouterr().err


# ---- traces by hand


def op(name, start, length, number=None, **more):
    args = {"External id": more.pop("id", 0), **({} if number is None else {"Sequence number": number}), **more}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}


def back(start, length, number=None, tid=1, **more):
    return {**op("autograd::engine::evaluate_function: Some", start, length, number, **more), "tid": tid}


def step(number, start, length):
    mark = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "args": {}}
    return {**mark, "pid": 1, "tid": 1, "ts": start, "dur": length}


def kernel(start, length, of):
    found = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": start, "dur": length}
    return {**found, "args": {"External id": of}}


def written(tmp_path, events):
    path = tmp_path / "hand.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_backward_belongs_to_the_outermost_op_that_made_its_node(tmp_path):
    """A view without gradient has the number of linear's first node, which the last event that begins with it owns."""
    forward = [
        op("aten::view", 0, 1, 7),
        op("aten::linear", 2, 10, 7),
        op("aten::t", 3, 1, 7),
        op("aten::addmm", 5, 4, 8),
    ]
    forward += [op("Custom", 13, 8, 9), op("aten::relu", 14, 2, 9), op("aten::sum", 17, 3, 10)]
    backward = [back(30, 5, 10), back(36, 6, 9), back(43, 20, 8), op("aten::mm", 44, 9), back(64, 3), back(68, 2, 7)]
    (found,) = load_steps(written(tmp_path, [*reversed(backward), *forward, op("aten::add_", 80, 1)]))
    names = [each.name for each in found.ops]
    assert names == ["aten::view", "aten::linear", "aten::relu", "aten::sum"], (
        "what a function of the user calls counts"
    )
    micro = [(round(each.forward * 1e6), round(each.backward * 1e6)) for each in found.ops]
    assert micro == [(1, 0), (10, 25), (2, 6), (3, 5)] and found.trains and not found.on_gpu


def test_of_ops_that_begin_together_the_longer_one_is_outside(tmp_path):
    (found,) = load_steps(written(tmp_path, [op("aten::addmm", 2, 4, 8), op("aten::linear", 2, 10, 7)]))
    assert [each.name for each in found.ops] == ["aten::linear"]


def test_what_the_trace_lacks_is_priced_like_others_of_its_op():
    gm = sk.capture(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.ReLU(), nn.Tanh()), torch.ones(2, 3))
    relu, sigmoid, other, tanh = (node for node in gm.graph.nodes if node.op == "call_function")
    known = {relu: (5.0, 7.0), sigmoid: (2.0, 3.0)}
    assert _like_others([other, tanh], known) == {other: (5.0, 0.0), tanh: (2.0, 0.0)}


def test_a_trace_without_any_op_of_the_graph_is_refused_also_where_no_op_has_flops(tmp_path):
    gm = sk.capture(nn.Flatten(), torch.ones(2, 3, 4))
    with pytest.raises(CostError, match="SK326.*does not show 1 of 1 ops"):
        sk.costs.traced(gm, written(tmp_path, [op("aten::sin", 0, 1), op("aten::cos", 2, 1)]))


def test_on_a_gpu_the_kernels_count_wherever_they_run(tmp_path):
    forward = [op("aten::linear", 2, 10, 7, id=1), op("aten::addmm", 5, 4, 7, id=2), op("aten::relu", 13, 2, 8, id=3)]
    backward = [back(30, 5, 8, tid=2, id=4), back(36, 6, 7, tid=2, id=5), {**op("aten::mm", 37, 3, id=6), "tid": 2}]
    kernels = [kernel(100, 50, 2), kernel(150, 4, 3), kernel(200, 9, 4), kernel(300, 70, 6), kernel(400, 30, 6)]
    (found,) = load_steps(written(tmp_path, [step(0, 0, 60), *forward, *backward, *kernels]))
    assert [(round(e.forward * 1e6), round(e.backward * 1e6)) for e in found.ops] == [(50, 100), (4, 9)]
    assert found.on_gpu


def test_a_price_is_the_median_over_steps(tmp_path):
    gm = sk.capture(nn.Sequential(nn.ReLU(), nn.Sigmoid()), torch.ones(2, 3))
    events = []
    for number, (relu, sigmoid) in enumerate([(1, 9), (5, 2), (2, 4)]):
        start = 100 * number
        events += [step(number, start, 90), op("aten::relu", start + 1, relu), op("aten::sigmoid", start + 20, sigmoid)]
    costs = sk.costs.traced(gm, written(tmp_path, events))
    assert [round(costs.seconds(node) * 1e6) for node in gm.graph.nodes if node.op == "call_function"] == [2, 4]
    assert covered(costs) == 100


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "no list of events"),
        ('{"traceEvents": []}', "no op of torch"),
        ('{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": "now", "dur": 1}]}', "event 0"),
        (
            '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1, "dur": 1, "args": 3}]}',
            "event 0",
        ),
        (
            '{"traceEvents": [3, null, {"ph": "X", "cat": "cpu_op", "name": "main", "ts": 1, "dur": 1}]}',
            "no op of torch",
        ),
    ],
)
def test_files_that_are_no_trace_are_refused(text, reason, tmp_path):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(FileError, match="SK510") as error:
        load_steps(tmp_path / "bad.json")
    assert reason in error.value.reason and "torch.profiler" in error.value.remedy
