"""Seconds under a compiler that fuses: bytes at the borders of kernels, one launch each."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from jointmodels import step_of, wide
from torch import nn

from splitkit import capture, costs
from splitkit.costs import Device
from splitkit.costs.fused import Fusion, Loop
from splitkit.errors import CostError, GraphError
from splitkit.frontends.joint_capture import capture_joint
from splitkit.policies import MinCut, SaveAll
from splitkit.testing import models
from splitkit.training.flow import FORWARD, save_all_plan

aten = torch.ops.aten
SLOW_MEMORY = Device("slow memory", {"float32": 1e30}, 1.0, 1)  # seconds are bytes
LAUNCH = Device("launch", {"float32": 1e30}, 1e30, 1, launch=1.0)  # seconds are kernels
X = torch.randn(32, 64)
NBYTES = 32 * 64 * 4


class Fn(nn.Module):
    def __init__(self, call, *weights):
        super().__init__()
        self.call, self.weights = call, nn.ParameterList(weights)

    def forward(self, *xs):
        return self.call(*xs, *self.weights)


def graph(call, *inputs, weights=()):
    return capture(Fn(call, *weights), *inputs)


def generated_by(fusion):
    """The kernels that a compiler would generate, second ones last; all others are library calls."""
    return [*(kernel for kernel in fusion.kernels if kernel.loop is not None), *fusion.second.values()]


def kernels(call, *inputs, weights=()):
    """What runs together, in words."""
    prices = costs.fused(graph(call, *inputs, weights=weights))
    return [" ".join(n.name for n in kernel.nodes) for kernel in prices.fusion.kernels]


def totals(call, *inputs, weights=()):
    """Bytes, and launches, of all nodes together."""
    gm = graph(call, *inputs, weights=weights)
    moved, started = (costs.fused(gm, device) for device in (SLOW_MEMORY, LAUNCH))
    return sum(map(moved.seconds, gm.graph.nodes)), pytest.approx(sum(map(started.seconds, gm.graph.nodes)))


def test_a_chain_of_pointwise_ops_costs_one_read_and_one_write():
    assert totals(lambda x: x.sin().cos().exp(), X) == (2 * NBYTES, 1)
    gm = graph(lambda x: x.sin().cos().exp(), X)
    prices, plain = costs.fused(gm, SLOW_MEMORY), costs.roofline(gm, SLOW_MEMORY)
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    assert [prices.seconds(n) for n in nodes] == [NBYTES, 0, NBYTES]
    assert [plain.seconds(n) for n in nodes] == [2 * NBYTES] * 3
    assert [prices.flops(n) for n in nodes] == [plain.flops(n) for n in nodes]
    assert [prices.nbytes(n) for n in nodes] == [NBYTES] * 3


def test_what_is_read_twice_is_read_once():
    assert totals(lambda x, y: (x + y) * (x - y) * x, X, X.clone()) == (3 * NBYTES, 1)


def test_what_leaves_on_the_way_is_written_once():
    assert totals(lambda x: (x.sin(), x.sin().cos()), X) == (3 * NBYTES, 1)


def test_views_are_looked_through():
    assert kernels(lambda x: x.sin().t().cos().view(64, 4, 8).exp(), X) == ["sin cos exp"]
    assert kernels(lambda x: x.sin().t().reshape(-1).exp(), X) == ["sin reshape exp"]  # it copies
    assert totals(lambda x: x.sin().t().cos(), X) == (2 * NBYTES, 1)


def test_products_cut_chains():
    w = nn.Parameter(torch.randn(64, 64))
    found = kernels(lambda x, w: ((x.sin() @ w).relu() + 1) @ w, X, weights=[w])
    assert found == ["sin", "matmul", "relu add", "matmul_1"]
    gm = graph(lambda x, w: (x.sin() @ w).relu(), X, weights=[w])
    prices = costs.fused(gm, SLOW_MEMORY)
    assert [prices.seconds(n) for n in gm.graph.nodes if n.op == "call_function"] == [
        2 * NBYTES,
        2 * NBYTES + 64 * 64 * 4,  # as the roofline has it
        2 * NBYTES,
    ]


def test_a_residual_waits_for_the_product():
    """x.sin() and the sum cannot be one kernel: the product lies between."""
    w = nn.Parameter(torch.randn(64, 64))

    def block(x, w):
        y = x.sin()
        return y + y @ w

    assert kernels(block, X, weights=[w]) == ["sin", "matmul", "add"]
    assert totals(block, X, weights=[w])[0] == 2 * NBYTES + (2 * NBYTES + 64 * 64 * 4) + 3 * NBYTES


def test_rows_that_are_reduced_are_at_hand():
    assert kernels(lambda x: x / x.exp().sum(1, keepdim=True), X) == ["exp sum_1 div"]
    assert totals(lambda x: x / x.exp().sum(1, keepdim=True), X) == (2 * NBYTES, 1)
    assert kernels(lambda x: torch.softmax(x.sin(), -1) * 2, X) == ["sin softmax mul"]
    assert kernels(lambda x: nn.functional.layer_norm(x + 1, (64,)).relu(), X) == ["add layer_norm relu"]


def test_rows_and_columns_are_two_kernels():
    assert kernels(lambda x: x.sum(1).sin() * x.sum(0).sin().sum(), X) == ["sum_1 sin mul", "sum_2 sin_1", "sum_3"]
    assert len(kernels(lambda x: x / x.sum(1, keepdim=True) / x.sum(0), X)) == 2


def test_what_reads_the_same_runs_beside():
    assert kernels(lambda x: (x.sin(), x.cos()), X) == ["sin cos"]
    assert totals(lambda x: (x.sin(), x.cos()), X) == (3 * NBYTES, 1)
    assert kernels(lambda x, y: (x.sin(), y.cos()), X, X.clone()) == ["sin", "cos"]


def test_what_is_made_of_nothing_is_made_again_by_each_reader():
    assert kernels(lambda x: x + torch.arange(64), X) == ["add"]
    assert totals(lambda x: x + torch.arange(64) * 2.0, X) == (2 * NBYTES, 1)


def test_a_kernel_that_could_run_later_runs_with_its_only_reader():
    w = nn.Parameter(torch.randn(64, 64))
    assert kernels(lambda x, w: x.sin() + (x @ w), X, weights=[w]) == ["sin add", "matmul"]
    assert totals(lambda x, w: x.sin() + (x @ w), X, weights=[w])[0] == 5 * NBYTES + 64 * 64 * 4


def test_what_a_product_and_columns_read_is_written_once():
    """The gradient of a bias: rows of a chain go to the product, columns of it are summed up by another kernel."""
    w = nn.Parameter(torch.randn(64, 64))
    assert kernels(lambda x, w: (x.sin() @ w, x.sin().sum(0)), X, weights=[w]) == ["sin", "matmul", "sum_1"]
    assert kernels(lambda x, w: ((y := x.sin()) @ w, y.sum(0)), X, weights=[w]) == ["sin", "matmul", "sum_1"]
    assert totals(lambda x: x.sin().sum(0), X) == (NBYTES + 64 * 4, 1)  # the sum computes it itself


def test_columns_that_share_what_they_read_are_summed_up_together():
    """The gradients of weight and bias of a layer norm."""
    assert kernels(lambda x, y: ((x * y).sum(0), x.sum(0), y.exp().sum(1)), X, X.clone()) == [
        "sum_1 sum_2",
        "exp sum_3",
    ]


def test_parts_of_one_tensor_are_not_the_same():
    """Inductor has no reason to copy the three of an attention's projection in one kernel."""
    x = torch.randn(32, 3 * 64)
    assert kernels(lambda x: [part.sin() for part in x.split(64, 1)], x) == ["sin", "sin_1", "sin_2"]


def test_elementwise_ops_of_another_size_run_where_they_are_read():
    """As those of rotary embeddings."""
    rotated = kernels(lambda x: torch.cat([-x[:, 32:], x[:, :32]], 1).exp(), X)
    assert rotated == ["neg cat exp"]


def test_little_that_several_kernels_read_is_computed_in_each():
    """As a mask that each layer adds to its scores."""
    y, w = torch.randn(64), nn.Parameter(torch.randn(64, 64))

    def layers(x, y, w):
        mask = torch.where(y > 0, 0.0, -1.0)
        return torch.softmax((torch.softmax(x + mask, 1) @ w) + mask, 1)

    prices = costs.fused(graph(layers, X, y, weights=[w]), SLOW_MEMORY)
    nodes = {node.name: node for node in prices.gm.graph.nodes}
    assert [" ".join(n.name for n in k.nodes) for k in prices.fusion.kernels] == [
        "add softmax",
        "matmul",
        "add_1 softmax_1",
    ]
    assert [n.name for k in prices.fusion.repeated for n in k.nodes] == ["gt", "where"]
    assert [prices.seconds(nodes[n]) for n in ("gt", "where", "add_1")] == [0, 0, NBYTES + 64 * 4]


def test_what_is_returned_is_not_computed_again():
    y, w = torch.randn(32, 64), nn.Parameter(torch.randn(64, 64))
    fusion = costs.fused(graph(lambda x, y, w: ((m := y.sin()), (x + m) @ w + m), X, y, weights=[w])).fusion
    assert not fusion.repeated and len(generated_by(fusion)) == 2


def test_the_backward_of_a_layer_norm_is_two_kernels():
    joint = capture_joint(nn.Sequential(nn.LayerNorm(64), nn.Tanh()), X, loss=lambda y: y.sum())
    fusion = costs.fused(joint.split(SaveAll()).backward).fusion
    assert [kernel.loop for kernel in generated_by(fusion)] == [Loop(2048, 64), Loop(2048, 32, across=True)]
    prices = costs.fused(joint.split(SaveAll()).backward, LAUNCH)
    assert sum(map(prices.seconds, prices.gm.graph.nodes)) == pytest.approx(2)


def test_loops():
    flat, rows, others, columns = Loop(2048), Loop(2048, 64), Loop(2048, 32), Loop(2048, 32, across=True)
    assert flat.joined(rows) == rows.joined(flat) == rows
    assert Loop(32).joined(rows) == rows  # once a row
    assert rows.joined(others) is None and Loop(64).joined(rows) is None
    assert flat.joined(flat) == flat and flat.joined(Loop(1)) is None
    assert flat.joined(columns) is columns.joined(flat) is columns.joined(others) is None
    assert Loop(64).joined(columns) == columns  # once a column


class _Scheduled(Exception):
    """What stops Inductor before it writes code."""


def inductor_kernels(gm, monkeypatch):
    """How many kernels Inductor generates as it would for a GPU: what Triton's scheduler fuses, on the CPU."""
    from torch._inductor import scheduler  # 2.11, 2.13, 2.15, as all of it here; a second that few tests need
    from torch._inductor.compile_fx import compile_fx

    found = []

    def codegen(self, *args):
        is_code = lambda n: not n.is_extern() and not isinstance(n, scheduler.NopKernelSchedulerNode)  # noqa: E731
        found.append(sum(map(is_code, self.nodes)))
        raise _Scheduled

    values = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    inputs = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).zero_() for v in values]
    monkeypatch.setattr(scheduler.Scheduler, "codegen", codegen)
    with torch.no_grad(), pytest.raises(Exception, match="_Scheduled"):
        compile_fx(gm, inputs, config_patches={"cpu_backend": "triton", "force_disable_caches": True})(*inputs)
    return found[0]


@pytest.mark.parametrize("name", these_first(["gpt2"], ["llama", "bert", "vit"]))
def test_as_many_kernels_as_inductor_generates(name, monkeypatch):
    """Within 25 %; forward of Llama and ViT less so on the CPU, where Inductor copies what ``cat`` joins."""
    sizes = {"image": 64, "classes": 10} if name == "vit" else {"seq": 64, "vocab": 1000}
    made = models.build(name, layers=2 if name == "vit" else 1, width=128, heads=4, batch=2, **sizes)
    pair = capture_joint(made.model, *made.args, **made.kwargs).split(SaveAll())
    for half, least in ((pair.forward, 0.6 if name in ("llama", "vit") else 0.75), (pair.backward, 0.75)):
        ours = len(generated_by(costs.fused(half).fusion))
        assert least <= ours / inductor_kernels(half, monkeypatch) <= 1.25


@pytest.mark.parametrize("name", these_first(["gpt2"], ["mixtral"]))
def test_no_kernels_wait_for_each_other_in_a_cycle(name):
    joint, _ = step_of(2) if name == "gpt2" else wide(name)
    fusion = costs.fused(joint.graph_module).fusion
    needs = {k: {fusion.kernel.get(r) for n in k.nodes for r in fusion.reads[n]} - {k, None} for k in fusion.kernels}
    while needs:
        ready = [k for k, before in needs.items() if not before & needs.keys()]
        assert ready
        for kernel in ready:
            del needs[kernel]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(256, 64))

    def forward(self, x):
        return ((x @ self.up).sin().cos() @ self.down).sum()


def priced(model, *inputs):
    """Op of forward -> bytes, by a joint graph."""
    joint = capture_joint(model, *inputs)
    prices, home = costs.fused(joint.graph_module, SLOW_MEMORY), save_all_plan(joint.flow)
    return {n.target: prices.seconds(n) for n in joint.flow.nodes if home.home(n) == FORWARD}


def test_to_compute_again_what_a_kernel_of_backward_reads_costs_almost_nothing():
    """Backward needs x up for sin, the result of sin for cos, and that of cos for the gradient of ``down``."""
    found = priced(Layer(), X)
    wide = 32 * 256 * 4
    assert found[aten.sin.default] == 0  # x up is read instead of it, by a kernel that is there anyway
    assert found[aten.cos.default] == wide  # a product reads it: it is written
    assert found[aten.mm.default] >= wide


def test_a_joint_graph_is_cheaper_to_compute_again_than_unfused():
    joint, _ = step_of(2)
    gm, home = joint.graph_module, save_all_plan(joint.flow)
    fused, plain = costs.fused(gm), costs.roofline(gm)
    forward = [n for n in joint.flow.nodes if home.home(n) == FORWARD]
    generated = [n for n in forward if (k := fused.fusion.kernel.get(n)) is not None and k.loop is not None]
    products = [n for n in forward if n.target in (aten.mm.default, aten.addmm.default, aten.bmm.default)]
    assert sum(map(fused.seconds, generated)) < 0.3 * sum(map(plain.seconds, generated))
    assert products and all(fused.seconds(n) == plain.seconds(n) for n in products)
    assert all(fused.seconds(n) >= 0 for n in gm.graph.nodes)


def test_policies_compute_more_again_where_it_is_cheap():
    joint, _ = step_of(1)
    saved = []
    for prices in (costs.fused(joint.graph_module), costs.roofline(joint.graph_module)):
        plan = joint.split(MinCut(), prices).plan
        saved.append(sum(len(keys) == 1 for n, keys in plan.items() if n.op == "call_function"))
    assert saved[0] <= saved[1]


def test_its_name_and_its_errors():
    gm = graph(lambda x: x.sin(), X)
    assert costs.fused(gm).note == f"{costs.roofline(gm).note}, fused"
    with pytest.raises(CostError, match="SK321"):
        costs.fused(gm, "abacus")
    with pytest.raises(GraphError, match="SK101"):
        costs.fused(gm.graph)
    for node in gm.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(GraphError, match="SK102"):
        costs.fused(gm)


def test_kernels_of_a_graph_without_prices():
    gm = graph(lambda x: x.sin() + 1, X)
    fusion = Fusion(gm.graph, lambda node: False)
    assert [kernel.loop for kernel in generated_by(fusion)] == [Loop(32 * 64)]


def test_what_two_kernels_of_backward_read_costs_no_more_again_than_to_make_it():
    """Each could read its three inputs instead: no more than what one kernel, which writes it for both, reads."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, a, b, c):
            z = torch.addcmul(a, b, c)
            return ((((z.sin() @ self.w) * z) @ self.w) * z).sum()

    assert priced(Sums(), X.clone().requires_grad_(), X, X.clone())[aten.addcmul.default] == 3 * NBYTES
