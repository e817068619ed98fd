"""Memory of unusual graphs and values is simulated as it is measured, or refused with a code."""

from __future__ import annotations

import pytest
import torch
from opaquecode import Hidden
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import splitkit as sk
from splitkit.errors import GraphError, SplitError

X = torch.randn(8, 16)


class Plain(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.call = forward

    def forward(self, x):
        return self.call(x)


def traced(forward, *inputs):
    gm = fx.symbolic_trace(Plain(forward))
    sk.extend.propagate(gm, *inputs)
    return gm


def same(gm, *inputs):
    with torch.no_grad():
        assert sk.simulate_memory(gm).peak == sk.measure_memory(gm, *inputs).peak


def test_subclasses_count_every_tensor_that_they_wrap():
    pair = TwoTensor(X.clone(), X.clone())
    gm = traced(lambda x: x * 2 + 1, pair)
    same(gm, pair)


def test_sparse_values_are_refused():
    gm = traced(lambda x: torch.sparse.mm(x.to_sparse(), x.T).sum(), X)
    with pytest.raises(GraphError, match="SK108: to_sparse is sparse"):
        sk.simulate_memory(gm)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_are_refused(layout):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("b", torch.eye(16).to_sparse(layout=layout))

        def forward(self, x):
            return self.b @ x.T

    with pytest.raises(GraphError, match="SK108: b is sparse"):
        sk.simulate_memory(sk.capture(Net(), X))


@torch.library.custom_op("reviewed::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).view(-1)[((x + 1).view(-1) > 0).nonzero()[:, 0]],
        lambda x: torch.ops.reviewed.twice(x.view(-1)),
    ],
    ids=["the data decides", "no fake"],
)
def test_a_recorded_run_that_fakes_cannot_repeat_is_refused(function):
    with pytest.raises(GraphError, match="SK109: .*do not show which of them share memory"):
        sk.simulate_memory(make_fx(function)(X))


def test_a_view_may_be_called_by_keywords():
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.view.default, (), {"self": x, "size": [-1]})
    graph.output(graph.call_function(torch.ops.aten.neg.default, (view,)))
    gm = fx.GraphModule(nn.Module(), graph)
    sk.extend.propagate(gm, X)
    same(gm, X)


def test_conjugate_and_negative_views_keep_their_bit():
    gm = traced(lambda x: (torch.complex(x, x).conj().imag + 1) * 2, X)
    same(gm, X)


@pytest.mark.parametrize("bit", [lambda x: x.conj().imag, torch.conj], ids=["negative", "conjugate"])
def test_what_an_op_makes_of_a_lazy_view_before_it_reads_it_is_counted(bit):
    """The op itself has no other op inside, and takes nothing where it reads the plain tensor."""
    x = torch.randn(8, 16, dtype=torch.complex64)
    for lazy in (bit, lambda x: x.real):
        same(sk.capture(Plain(lambda x, lazy=lazy: lazy(x).exp()), x), x)


def dynamic():
    return sk.capture(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), X, dynamic=True)


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": {"no_such_symbol": 4}}, {"sizes": {"s77": -4}}, {"sizes": {"s77": 4.5}}, {"sizes": {"s77": "4"}},
        {"user_outputs": 1}, {"workspace": 7},
        {"workspace": lambda node: None}, {"workspace": lambda node: -(10**6)},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(SplitError):
        sk.simulate_memory(dynamic(), **options)


@pytest.mark.parametrize("user_outputs", [-1, 2, 99, 0.5, "1"])
def test_numbers_of_user_outputs_that_make_no_sense_are_refused(user_outputs):
    gm = sk.capture(nn.ReLU(), X)
    with pytest.raises(SplitError):
        sk.simulate_memory(gm, gm, user_outputs=user_outputs)


def test_a_split_is_no_forward_of_a_pair():
    gm = sk.capture(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), X)
    with pytest.raises(SplitError):
        sk.simulate_memory(sk.split(gm, sk.policies.Stages(2)), gm)


@pytest.mark.parametrize("inputs", [(), (torch.randn(3, 3),), (X, X), ("a",)])
def test_propagate_refuses_unfit_inputs(inputs):
    with pytest.raises(SplitError):
        sk.extend.propagate(fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16))), *inputs)


def test_propagate_refuses_what_is_no_graph():
    with pytest.raises(SplitError, match="SK101"):
        sk.extend.propagate(nn.Linear(16, 16), X)


def test_propagate_takes_starred_inputs_one_by_one():
    class Net(nn.Module):
        def forward(self, *xs):
            return xs[0] + 1

    gm = fx.symbolic_trace(Net())
    sk.extend.propagate(gm, X)
    same(gm, X)


def test_the_autocast_of_the_caller_changes_nothing():
    gm = sk.capture(nn.Linear(16, 16), X)
    alone = sk.simulate_memory(gm).peak
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sk.simulate_memory(gm).peak == alone


def test_calls_that_do_not_exist_are_refused():
    with pytest.raises(SplitError):
        sk.simulate_memory(sk.capture(nn.ReLU(), X)).peak_of("nope")


def test_a_node_without_a_value_is_refused_though_nobody_reads_it():
    gm = traced(lambda x: (x.exp(), x + 1)[1], X)
    del next(n for n in gm.graph.nodes if n.name == "exp").meta["val"]
    with pytest.raises(GraphError, match="SK102: exp"):
        sk.simulate_memory(gm)


class Reaching(nn.Module):
    """Opaque code that writes and reads a tensor which nobody gave it."""

    def __init__(self, held):
        super().__init__()
        self.held = [held]

    def forward(self, x):
        self.held[0].view(-1).add_(x.mean())
        return x * self.held[0].t()


@pytest.mark.parametrize("made", [Reaching, lambda held: Hidden([held], "write"), lambda held: Hidden([held], "read")])
def test_memory_that_opaque_code_writes_in_place_counts_once(made):
    """Inside the fake mode, what ``add_`` gives back may be a new fake of the real tensor."""
    root = nn.Module()
    root.register_buffer("state", torch.zeros(8, 8))
    root.opaque = made(root.state)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("opaque", (x,)), graph.get_attr("state")))
    gm = fx.GraphModule(root, graph)
    sk.extend.propagate(gm, torch.ones(8, 8))
    before = gm.state.clone()
    sk.simulate_memory(gm)
    assert before.equal(gm.state), "nothing real is written"
    same(gm, torch.ones(8, 8))
