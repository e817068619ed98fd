"""FLOPs of backward by formula are those of real backward passes; of a joint graph they lose nothing."""

from __future__ import annotations

import math
from functools import cache
from itertools import product
from operator import getitem

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

import splitkit
from splitkit import capture, costs
from splitkit.costs import training
from splitkit.costs.flop_formulas import FORMULAS
from splitkit.costs.training import FromOps, _graded_leaves
from splitkit.errors import CostError, GraphError
from splitkit.graph.joint_marks import backward_nodes, forward_owners, is_joint
from splitkit.testing import models

aten = torch.ops.aten
TINY = {"layers": 1, "width": 64, "heads": 4, "vocab": 100, "batch": 2, "seq": 16}
IMAGE = {"layers": 2, "width": 64, "heads": 4, "image": 32, "patch": 8, "classes": 10, "batch": 2}


def counting():
    return FlopCounterMode(display=False, custom_mapping=FORMULAS)


def really(model, *args, **kwargs):
    """FLOPs of a real backward pass."""
    out = model(*args, **kwargs)
    loss = out if isinstance(out, torch.Tensor) else out.loss if hasattr(out, "loss") else out[0]
    with counting() as counter:
        loss.sum().backward()
    return counter.get_total_flops()


def op_by_op(model, *args, how="export", **kwargs):
    gm = capture(model, *args, how=how, **kwargs)
    prices = costs.flops(gm)
    trained = training(prices)
    assert isinstance(trained, FromOps) and trained.source == "op by op"
    return sum(counted_in_backward(trained, n) for n in gm.graph.nodes)


def counted_in_backward(trained, node):
    """FLOPs by formula of a node's backward."""
    known = trained.kernels
    if node not in known.gradients.needed or node.op in ("placeholder", "get_attr") or node.target is getitem:
        return 0
    body = known.of(node, fused=False).backward
    return sum(map(trained.counter.on(body).counted, body.graph.nodes))


@pytest.mark.parametrize(  # with dropout, in training mode, attention is not fused
    ("name", "mode"),
    these_first(
        [("gpt2", True), ("bert", False), ("mixtral", True)],
        [
            *[("gpt2", False), ("bert", True), ("mixtral", False)],
            *product(["llama", "vit", "t5"], [True, False]),
        ],
    ),
)
def test_real_models(name, mode):
    example = models.build(name, **(IMAGE if name == "vit" else TINY))
    example.model.train(mode)
    assert op_by_op(example.model, **example.kwargs) == really(example.model, **example.kwargs) > 0


def test_fused_attention_and_a_first_layer_that_needs_no_gradient_are_why_it_is_not_twice_the_forward():
    gm = captured_example("vit", **IMAGE).graph
    prices = costs.flops(gm)
    trained = training(prices)
    ratios = {}
    for node in gm.graph.nodes:
        if prices.counted(node):
            ratio = counted_in_backward(trained, node) / prices.counted(node)
            ratios.setdefault(str(node.target).split(".")[1], set()).add(ratio)
    assert ratios == {"conv2d": {1.0}, "linear": {2.0}, "scaled_dot_product_attention": {2.5}}


class Nets:
    """Small nets of each kind, with their inputs."""

    @staticmethod
    def conv():
        block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)]
        return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), block, *head), torch.randn(2, 3, 17, 17)

    @staticmethod
    def up():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 5, 2, stride=2), nn.Conv2d(5, 1, 1)
        ), torch.randn(2, 3, 8, 8)

    @staticmethod
    def recurrent():
        return nn.GRU(8, 4), torch.randn(5, 2, 8)

    @staticmethod
    def frozen():
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        model[0].requires_grad_(False)  # nothing to do
        model[2].weight.requires_grad_(False)  # the data's gradient only
        return model, torch.randn(2, 8)


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
@pytest.mark.parametrize("make", [Nets.conv, Nets.up, Nets.frozen])
def test_small_nets(make, how):
    model, x = make()
    assert op_by_op(model, x, how=how) == really(model, x) > 0


def test_a_recurrent_op_counts_as_one_product_of_all_its_data_and_weights():
    model, x = Nets.recurrent()
    steps, ahead = 2 * 5 * 2 * 12 * 4, 2 * 5 * 2 * 12 * 8  # products with hidden states, and with the data
    # hidden states require grad where the data does not, all but the first
    assert op_by_op(model, x) == really(model, x) == 2 * steps - steps // 5 + ahead
    both = nn.Sequential(nn.Linear(8, 8), model)
    first = 2 * 10 * 8 * 8
    assert op_by_op(both, x) == really(both, x) == 2 * (steps + ahead) + first - steps // 5


class Fn(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.register_buffer("table", torch.randn(4, 4))
        self.call = call

    def forward(self, x):
        return self.call(self, x)


def no_grad(m, x):
    with torch.no_grad():
        y = x @ m.weight
    return y @ m.other


def written(m, x):
    buffer = torch.zeros(4, 4)
    buffer[:2] = (x @ m.weight)[:2]
    return buffer @ m.table


def chosen(m, x):
    return m.table[(x @ m.weight).argmax(1)] @ m.other


SQUARE = 2 * 4 * 4 * 4


@pytest.mark.parametrize(
    "call, products",
    [
        (lambda m, x: x @ m.weight, 1),
        (lambda m, x: x @ m.weight @ m.other, 3),
        (lambda m, x: m.weight @ m.weight, 2),
        (lambda m, x: (x @ m.weight).detach() @ m.other, 1),
        (lambda m, x: torch.zeros_like(x @ m.weight) @ m.other, 1),
        (lambda m, x: (x @ m.weight).new_ones(4, 4) @ m.other, 1),
        (lambda m, x: torch.addmm(m.bias, x, m.table) @ m.other, 2),
        (lambda m, x: nn.functional.linear(x, m.table, m.bias), 0),
        (lambda m, x: torch.einsum("ij,jk->ik", x @ m.weight, m.other), 3),
        (lambda m, x: (x @ m.weight).view(2, 8).relu().view(4, 4) @ m.table, 2),
        (lambda m, x: (x @ m.weight).chunk(2)[0].repeat(2, 1) @ m.table, 2),
        (no_grad, 1),
        (written, 2),
        (chosen, 1),
    ],
    ids=lambda x: "" if callable(x) else str(x),
)
def test_one_product_for_each_factor_that_requires_grad(call, products):
    model, x = Fn(call), torch.randn(4, 4)
    assert op_by_op(model, x) == products * SQUARE
    assert products * SQUARE == really(model, x)


@pytest.mark.parametrize("needs", ["q", "k", "v", "qk", "qv", "qkv"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_of_which_a_part_requires_grad(needs, dropout):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.ones = nn.ParameterList(nn.Parameter(torch.ones(8), requires_grad=name in needs) for name in "qkv")

        def forward(self, x):
            q, k, v = (x * one for one in self.ones)
            return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    x = torch.randn(1, 2, 16, 8)
    assert op_by_op(Attention(), x) == really(Attention(), x)


def test_seconds_and_everything_else_of_the_costs_that_are_wrapped():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Flatten(0), nn.Dropout(0.5))
    gm = capture(model, torch.randn(3, 4))
    for prices in (costs.flops(gm), costs.unit(gm), costs.roofline(gm, "h100")):
        trained = training(prices)
        ratio = {
            str(n.target).split(".")[1]: trained.seconds(n) / prices.seconds(n)
            for n in gm.graph.nodes
            if prices.seconds(n)
        }
        flatten = {"flatten": 1} if isinstance(prices, costs.Unit) else {}  # a view: nothing in backward
        # the weight and the bias have a kernel each; dropout draws a mask, scales it, and applies it
        linear = 2 if isinstance(prices, costs.Flops) else 3
        dropout = 4 / 3 if isinstance(prices, costs.Unit) else 2
        assert ratio == pytest.approx({"linear": linear, "relu": 2, "dropout": dropout} | flatten, rel=1e-3)
        assert all(trained.nbytes(n) == prices.nbytes(n) for n in gm.graph.nodes)
        assert all(trained.param_bytes(n) == prices.param_bytes(n) for n in gm.graph.nodes)
        assert trained.note.endswith("backward op by op")


def test_frozen_models_and_inputs_that_require_grad():
    model = nn.Linear(4, 4).requires_grad_(False)
    gm = capture(model, torch.randn(3, 4))
    prices = costs.flops(gm)
    assert all(training(prices).flops(n) == prices.flops(n) for n in gm.graph.nodes)
    next(n for n in gm.graph.nodes if n.op == "placeholder").meta["val"].requires_grad_()
    assert sum(map(training(prices).flops, gm.graph.nodes)) == 2 * sum(map(prices.flops, gm.graph.nodes))


class Priced:
    """Costs of a user's own, which know no graph."""

    def seconds(self, node):
        return 0.25

    flops = nbytes = param_bytes = seconds


def test_costs_that_do_not_say_which_graph_they_are_of():
    gm = capture(nn.Linear(4, 4), torch.randn(3, 4))
    with pytest.raises(CostError, match=r"SK323: Priced does not say which graph"):
        training(Priced())
    node = next(n for n in gm.graph.nodes if n.target is aten.linear.default)
    assert training(Priced(), gm).seconds(node) == pytest.approx(0.75, rel=1e-3)  # one kernel, then two
    with pytest.raises(GraphError, match="SK102"):
        training(Priced(), fx.symbolic_trace(nn.Linear(4, 4)))


def joint_of(model, **kwargs):
    """The joint graph that torch.compile gives to a partitioner."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import default_partition

    seen = []

    def partition(gm, inputs, *, num_fwd_outputs, **options):
        seen.append(gm)
        return default_partition(gm, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition)
    torch.compile(model, backend=backend)(**kwargs).loss.backward()
    (joint,) = seen
    return joint


@cache
def compiled(name):
    """A model, and its joint graph; nobody may change them."""
    example = models.build(name, layers=2, width=64, heads=2, vocab=100, seq=16)
    return example, joint_of(example.model, **example.kwargs)


def test_both_ways_agree_on_a_real_model():
    example, joint = compiled("gpt2")
    products = sum(map(costs.flops(joint).counted, joint.graph.nodes))
    gm = capture(example.model, **example.kwargs)
    prices = costs.flops(gm)
    trained = training(prices)
    assert products == sum(prices.counted(n) + counted_in_backward(trained, n) for n in gm.graph.nodes)


def drawn(*nodes):
    """A graph of (name, inputs, number): names that begin with b are tagged backward."""
    graph = fx.Graph()
    made = {"x": graph.placeholder("primals_1"), "t": graph.placeholder("tangents_1")}
    for name, inputs, number in nodes:
        node = graph.call_function(torch.add, tuple(made[i] for i in inputs))
        node.name = name
        node.meta.update({} if number is None else {"seq_nr": number})
        node.meta["partitioner_tag"] = "is_backward" if name.startswith("b") else "is_forward"
        made[name] = node
    graph.output(made[nodes[-1][0]])
    return graph


def test_the_first_forward_node_of_a_number_made_it():
    graph = drawn(
        ("f1", "xx", 1), ("f2", ["f1", "f1"], 2), ("index", "xx", 2), ("f3", ["f2", "index"], 3),
        ("b3", ["t", "f2"], 3), ("b2", ["b3", "index"], 2), ("bsaved", ["f1", "f1"], 1), ("b1", ["b2", "bsaved"], 1),
        ("bsum", ["b2", "b1"], 99), ("bother", ["bsum", "x"], None),
    )  # fmt: skip
    assert is_joint(graph)
    found = {node.name: owner.name for node, owner in forward_owners(graph).items()}
    assert found == {"b3": "f3", "b2": "f2", "bsaved": "f1", "b1": "f1", "bsum": "f1", "bother": "f1"}


def test_what_needs_a_tangent_is_backward_without_a_tag():
    graph = drawn(("f1", "xx", 1), ("c", ["t", "f1"], 1), ("d", ["c", "c"], None))
    for node in graph.nodes:
        node.meta.pop("partitioner_tag", None)
    assert is_joint(graph) and [n.name for n in backward_nodes(graph)] == ["c", "d"]
    assert {o.name for o in forward_owners(graph).values()} == {"f1"}


def test_a_graph_that_only_runs_backward_has_no_forward_nodes_to_pay():
    graph = drawn(("b1", "tt", 1))
    assert forward_owners(graph) == {}


def test_a_layer_that_is_called_as_a_module_has_one_product_for_its_weight_if_that_is_trained():
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    net[1].weight.requires_grad_(False)
    net[2].requires_grad_(False)
    gm = capture(net, torch.randn(2, 4), how="symbolic_trace")
    prices = training(costs.flops(gm))
    called = {n.target: prices.backward(n) for n in gm.graph.nodes if n.op == "call_module"}
    assert called == {"0": 1, "1": 1, "2": 1, "3": 2}  # the weight alone; the input alone, twice; both


def total_seconds(prices, gm):
    return math.fsum(map(prices.seconds, gm.graph.nodes))


class Residual(nn.Module):
    """Convolutions whose values have two readers."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x, labels):
        x = self.stem(x).relu()
        x = x + self.norm(self.conv(x)).relu()
        return {"loss": nn.functional.cross_entropy(self.head(x.mean((2, 3))), labels)}


@pytest.mark.parametrize("name", these_first(["gpt2", "conv"], ["vit", "llama", "t5", "bert", "mixtral"]))
def test_a_step_takes_as_long_by_the_forward_graph_as_by_the_joint_graph(name):
    if name == "conv":
        model, kwargs = Residual(), {"x": torch.randn(2, 3, 32, 32), "labels": torch.tensor([1, 2])}
    else:
        sizes = {"image": 64} if name == "vit" else {"vocab": 2000}
        example = models.build(name, layers=2, **sizes)
        model, kwargs = example.model, example.kwargs
    forward, joint = capture(model, **kwargs), splitkit.capture_joint(model, **kwargs).graph_module
    for device in ("h100", "cpu"):
        step = total_seconds(training(costs.roofline(forward, device)), forward)
        assert step == pytest.approx(total_seconds(costs.roofline(joint, device), joint), rel=0.05)


def test_gradients_of_several_readers_are_added_up():
    class Readers(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.weight, self.count = nn.Parameter(torch.ones(8, 8)), count

        def forward(self, x):
            y = x @ self.weight
            return sum(y.sin() for _ in range(self.count))

    sums = []
    for count in (1, 3):
        gm = capture(Readers(count), torch.ones(8, 8))
        product = next(n for n in gm.graph.nodes if n.target is aten.matmul.default)
        sums.append(len(training(costs.flops(gm)).kernels.sums(product)))
    assert sums == [0, 2]


def test_attention_that_a_cpu_decomposes_is_one_kernel_of_a_gpu():
    _, joint = compiled("gpt2")
    priced = costs.roofline(joint, "h100")
    backward = backward_nodes(joint.graph)
    scores = [n for n in joint.graph.nodes if n.target is aten.bmm.default]
    assert scores and all(priced.seconds(n) < priced.alone(n) for n in scores)
    shared = [n for n in joint.graph.nodes if priced.seconds(n) < priced.alone(n)]
    for late in (False, True):  # each of the two layers launches at least one kernel
        seconds = sum(priced.seconds(n) for n in shared if (n in backward) == late)
        assert 2 * priced.device.launch < seconds < 4 * priced.device.launch
    on_cpu = costs.roofline(joint, "cpu")
    assert all(on_cpu.seconds(n) == on_cpu.alone(n) for n in scores)


def test_a_leaf_that_backward_reaches_on_several_ways_is_found_once():
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    shared = a * b
    found = _graded_leaves([shared.sin() + shared.cos() * a, shared + a])
    assert {id(leaf) for leaf in found} == {id(a), id(b)} and len(found) == 2 and c.grad is None
