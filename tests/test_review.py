"""Bugs that a hostile review found: one test each, failing until mended."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import splitkit as sk
from splitkit import _torch
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same


def graph_of(write, root=None):
    """A GraphModule around a function that writes a graph."""
    graph = fx.Graph()
    write(graph)
    return fx.GraphModule(root or nn.Module(), graph)


def test_a_called_module_did_not_wait_for_writes_to_its_weights():
    """`Linear` only reads state: `_only_aliases` dropped it from the nodes that effects concern."""

    def write(g):
        x = g.placeholder("x")
        weight = g.call_function(torch.ops.aten.detach.default, (g.get_attr("linear.weight"),))
        g.call_function(torch.ops.aten.add_.Scalar, (weight, 1.0))
        y = g.call_module("linear", (x,))
        g.call_function(torch.ops.aten.mul_.Scalar, (weight, 3.0))
        g.output(y)

    root = nn.Module()
    root.linear = nn.Linear(2, 2)
    gm = graph_of(write, root)
    parts = {"detach_default": 0, "add__scalar": 0, "linear": 1, "mul__scalar": 0}
    with pytest.raises(sk.CycleError):
        sk.split(gm, parts)


def test_splits_were_never_collected():
    """`gc.freeze` sets all counts back to zero and makes everything old: a loop of splits kept every one of them."""
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(10)]))
    gc.collect()
    made = [weakref.ref(sk.split(gm, RoundRobin(2)).module) for _ in range(400)]
    assert sum(ref() is not None for ref in made) < 300


def test_pow_of_tensors_as_a_function_was_a_value_error():
    gm = graph_of(lambda g: g.output(g.call_function(torch.Tensor.__pow__, (g.placeholder("x"), 2))))
    assert list(sk.split(gm, {"pow_1": 0}).parts) == [0]


def test_inputs_of_a_part_that_differ_in_case_were_mixed_up():
    """`graph.placeholder("A")` calls its node `a`; the code is `def forward(self, A, a): a = A; a_1 = a`."""

    def write(g):
        x = g.placeholder("x")
        upper = g.create_node("call_function", torch.sin, (x,), name="A")
        lower = g.create_node("call_function", torch.cos, (x,), name="a")
        g.output(g.create_node("call_function", torch.sub, (upper, lower), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"A": 0, "a": 0, "d": 1}), torch.ones(2))


def test_inputs_of_a_part_called_self_and_self_underscore_were_one():
    def write(g):
        x = g.placeholder("x")
        one = g.create_node("call_function", torch.sin, (x,), name="self_")
        other = g.create_node("call_function", torch.cos, (x,), name="self")
        g.output(g.create_node("call_function", torch.sub, (one, other), name="d"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, {"self_": 0, "self": 0, "d": 1}), torch.ones(2))


def in_runs(gm, cuts):
    """`split_module` in the original order, cut before the named nodes."""
    part = iter(range(99))
    label = {}
    now = next(part)
    for node in gm.graph.nodes:
        now = next(part) if node.name in cuts else now
        label[node.name] = now
    return sk.split_module(gm, None, lambda node: label[node.name], keep_original_order=True)


def interleaved():
    def write(g):
        x = g.placeholder("x")
        a = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.call_function(torch.mm, (x, x))
        b = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, False, None))
        g.call_function(_torch.EXIT_AUTOCAST, (a,))
        inside = g.call_function(torch.mm, (x, x))
        g.call_function(_torch.EXIT_AUTOCAST, (b,))
        last = g.call_function(torch.mm, (x, x))
        end = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
        g.output((inside, last))

    return graph_of(write)


@pytest.mark.parametrize("cuts", [["_exit_autocast_1"], ["mm_1"], ["mm_2"], ["mm_1", "mm_2"]])
def test_regions_that_interleave_ran_in_another_state_in_runs(cuts):
    """`begin` takes what `scopes` calls open for what the graph has not closed; they differ where regions interleave."""
    gm = interleaved()
    x = torch.randn(3, 3)
    try:
        wanted = gm(x)
        torch.set_autocast_enabled("cpu", False)
        made = in_runs(gm, cuts)(x)
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()
    assert [v.dtype for v in made] == [v.dtype for v in wanted]


def test_a_setting_was_asked_again_in_another_state_in_runs():
    """`recompute_locally` copies `get_autocast_dtype` into the run of its reader, which has closed the region."""

    def write(g):
        x = g.placeholder("x")
        handle = g.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.float16, True, None))
        dtype = g.call_function(torch.get_autocast_dtype, ("cpu",))
        dtype.meta["val"] = torch.float16
        y = g.call_function(torch.sin, (x,))
        g.call_function(_torch.EXIT_AUTOCAST, (handle,))
        g.output(g.call_method("to", (y, dtype)))

    gm = graph_of(write)
    assert_same(gm, in_runs(gm, ["_exit_autocast"]), torch.ones(2))


def test_a_wrapper_of_a_torch_function_was_taken_for_it():
    """`functools.wraps` copies `__name__` and `__module__`."""

    @functools.wraps(F.relu)
    def noisy(x):
        return F.relu(x) + torch.rand_like(x)

    gm = graph_of(lambda g: g.output(g.call_function(noisy, (g.placeholder("x"),))))
    assert sk.analyze(gm).once


def test_a_buffer_of_a_called_module_and_the_same_buffer_read_elsewhere_were_torn_apart_by_double():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(x) + self.norm.running_mean

    gm = fx.symbolic_trace(Model())
    made = sk.split(gm, {"norm": 0, "add": 1}).module
    x = torch.randn(4, 3, dtype=torch.double)
    assert torch.equal(copy.deepcopy(gm).double()(x), copy.deepcopy(made).double()(x))


def test_a_long_chain_of_numbers_was_a_recursion_error():
    def write(g):
        x = g.placeholder("x")
        y = g.call_function(torch.sin, (x,))
        y.meta["val"] = torch.ones(())
        number = g.call_method("item", (y,))
        number.meta["val"] = 1.0
        for _ in range(2000):
            number = g.call_function(operator.add, (number, 1.0))
            number.meta["val"] = 1.0
        g.output(g.create_node("call_function", torch.mul, (y, number), name="last"))

    gm = graph_of(write)
    assert_same(gm, sk.split(gm, lambda node: int(node.name == "last")), torch.ones(()))


def test_many_sizes_of_one_tensor_took_quadratic_time():
    def seconds(count):
        def write(g):
            x = g.placeholder("x")
            y = g.call_function(torch.sin, (x,))
            for _ in range(count):
                size = g.call_method("size", (y,))
                x = g.call_method("view", (x, size))
                y.meta["val"] = x.meta["val"] = torch.ones(2)
                size.meta["val"] = torch.Size([2])
            g.output(x)

        gm = graph_of(write)
        part = {n: 0 if n.target == "size" else i // 8 for i, n in enumerate(gm.graph.nodes)}
        begin = time.perf_counter()
        sk.plan(gm, part.__getitem__)
        return time.perf_counter() - begin

    assert seconds(3000) < 12 * max(seconds(500), seconds(500))


def test_two_threads_that_called_a_lazy_split_first_broke_its_code():
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(8)]))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed = []
    try:
        for _ in range(150):
            made = sk.split(gm, RoundRobin(3), lazy=True)
            gate = threading.Barrier(4)

            def call(made=made, gate=gate):
                gate.wait()
                try:
                    made(torch.ones(1))
                except Exception as error:
                    failed.append(error)

            threads = [threading.Thread(target=call) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_inline_of_an_empty_graph_was_a_runtime_error():
    gm = graph_of(lambda g: None)
    assert not list(sk.inline(sk.split(gm, lambda node: 0)).graph.nodes)


def test_the_forward_of_a_lazy_part_could_not_be_replaced():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    made = sk.split(gm, {"_0": 0, "_1": 1}, lazy=True)
    made.parts[0].forward = lambda x: x * 5
    assert made(torch.ones(())) == 5


def test_objects_behind_targets_were_kept_alive_for_ever():
    """`torch_name`, `signature_facts` and `is_ambient` are cached by target: bound methods, closures over tensors."""

    class Model(nn.Module):
        def double(self, x):
            return x * 2

    model = Model()
    gm = graph_of(lambda g: g.output(g.call_function(model.double, (g.placeholder("x"),))))
    sk.split(gm, RoundRobin(1))
    kept = weakref.ref(model)
    del model, gm
    gc.collect()
    assert kept() is None
