"""Bugs of the memory simulation, of `propagate` and of joint capture that a review found: one test a bug."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import splitkit as sk
from splitkit.errors import GraphError, SplitError
from splitkit.memory import estimator
from splitkit.testing.nets import loss_or_sum
from splitkit.testing.visible import Hidden

X = torch.randn(8, 16)


class Plain(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.call = forward

    def forward(self, x):
        return self.call(x)


def traced(forward, *inputs):
    gm = fx.symbolic_trace(Plain(forward))
    sk.propagate(gm, *inputs)
    return gm


def same(gm, *inputs):
    with torch.no_grad():
        assert sk.simulate_memory(gm).peak == sk.measure_memory(gm, *inputs).peak


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x).exp())


def test_capture_joint_left_stand_ins_in_a_module_that_goes_by_two_names():
    model = Shared()
    weight = model.a.weight
    sk.capture_joint(model, X, loss=loss_or_sum)
    assert model.a.weight is weight and isinstance(model.a.weight, nn.Parameter)
    model(X)


def test_gradients_of_a_module_that_goes_by_two_names():
    model = Shared()
    model(X).sum().backward()
    parameters = dict(model.a.named_parameters())
    joint = sk.capture_joint(model, X, loss=loss_or_sum)
    for name, parameter in parameters.items():
        model.a._parameters[name] = parameter  # repair by hand
    gradient = joint.run(X).gradients["a.weight"]
    torch.testing.assert_close(gradient, parameters["weight"].grad)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8)

    def forward(self, x):
        return self.lstm(x)[0]


def test_the_joint_graph_of_an_lstm_on_plain_inputs_did_not_run():
    joint = sk.capture_joint(Recurrent(), torch.randn(3, 4, 16), loss=loss_or_sum)
    joint.run(torch.randn(3, 4, 16))


def test_subclasses_that_wrap_tensors_counted_once():
    pair = TwoTensor(X.clone(), X.clone())
    gm = traced(lambda x: x * 2 + 1, pair)
    same(gm, pair)


def test_sparse_values_counted_as_if_they_were_dense():
    gm = traced(lambda x: torch.sparse.mm(x.to_sparse(), x.T).sum(), X)
    with pytest.raises(GraphError, match="SK108: to_sparse is sparse"):
        sk.simulate_memory(gm)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_were_raw_errors(layout):
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
def test_a_recorded_run_that_fakes_cannot_repeat_was_a_raw_error(function):
    with pytest.raises(GraphError, match="SK109: .*do not show who shares memory"):
        sk.simulate_memory(make_fx(function)(X))


def test_a_view_by_keywords_was_an_index_error():
    graph = fx.Graph()
    x = graph.placeholder("x")
    view = graph.call_function(torch.ops.aten.view.default, (), {"self": x, "size": [-1]})
    graph.output(graph.call_function(torch.ops.aten.neg.default, (view,)))
    gm = fx.GraphModule(nn.Module(), graph)
    sk.propagate(gm, X)
    same(gm, X)


def test_conjugate_and_negative_views_lost_their_bit():
    gm = traced(lambda x: (torch.complex(x, x).conj().imag + 1) * 2, X)
    same(gm, X)


def dynamic():
    return sk.capture(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), X, dynamic=True)


@pytest.mark.parametrize(
    "options",
    [
        {"sizes": {"no_such_symbol": 4}}, {"sizes": {"s77": -4}}, {"sizes": {"s77": 4.5}}, {"sizes": {"s77": "4"}},
        {"block": 0}, {"block": -512}, {"block": 1.5}, {"user_outputs": 1}, {"workspace": 7},
        {"workspace": lambda node: None}, {"workspace": lambda node: -(10**6)},
    ],
)  # fmt: skip
def test_options_that_make_no_sense_were_taken(options):
    with pytest.raises(SplitError):
        sk.simulate_memory(dynamic(), **options)


@pytest.mark.parametrize("user_outputs", [-1, 99])
def test_numbers_of_user_outputs_that_make_no_sense_were_taken(user_outputs):
    gm = sk.capture(nn.ReLU(), X)
    with pytest.raises(SplitError):
        sk.simulate_memory(gm, gm, user_outputs=user_outputs)


def test_a_split_was_taken_for_the_forward_of_a_pair():
    gm = sk.capture(nn.Sequential(nn.Linear(16, 16), nn.ReLU()), X)
    with pytest.raises(SplitError):
        sk.simulate_memory(sk.split(gm, sk.policies.Stages(2)), gm)


@pytest.mark.parametrize("inputs", [(), (torch.randn(3, 3),), (X, X), ("a",)])
def test_propagate_on_unfit_inputs_was_a_raw_error(inputs):
    with pytest.raises(SplitError):
        sk.propagate(fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16))), *inputs)


def test_propagate_of_what_is_no_graph_was_a_raw_error():
    with pytest.raises(SplitError, match="SK101"):
        sk.propagate(nn.Linear(16, 16), X)


def test_propagate_took_starred_inputs_for_one():
    class Net(nn.Module):
        def forward(self, *xs):
            return xs[0] + 1

    gm = fx.symbolic_trace(Net())
    sk.propagate(gm, X)
    same(gm, X)


def test_the_autocast_of_the_caller_was_counted():
    gm = sk.capture(nn.Linear(16, 16), X)
    alone = sk.simulate_memory(gm).peak
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sk.simulate_memory(gm).peak == alone


def test_calls_and_devices_that_do_not_exist_were_raw_errors():
    profile = sk.simulate_memory(sk.capture(nn.ReLU(), X))
    for wrong in (lambda: profile.peak_of("nope"), lambda: profile.on("foo")):
        with pytest.raises(SplitError):
            wrong()


def test_what_nobody_reads_and_has_no_value_counted_nothing():
    gm = traced(lambda x: (x.exp(), x + 1)[1], X)
    del next(n for n in gm.graph.nodes if n.name == "exp").meta["val"]
    with pytest.raises(GraphError, match="SK102: exp"):
        sk.simulate_memory(gm)


def test_the_estimate_of_sparse_values_was_a_raw_error():
    gm = traced(lambda x: torch.sparse.mm(x.to_sparse(), x.T).sum(), X)
    with pytest.raises(GraphError, match="SK108: to_sparse is sparse"):
        estimator.build_memory_profile(gm.graph, lambda node: True)


def test_prices_of_a_module_that_was_deleted_were_a_raw_error():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(16, 16)))
    sk.propagate(gm, X)
    del gm._modules["0"]
    with pytest.raises(GraphError, match="SK104"):
        sum(sk.costs.flops(gm).flops(node) for node in gm.graph.nodes)


class Reaching(nn.Module):
    """Opaque code that writes and reads a tensor which nobody gave it."""

    def __init__(self, held):
        super().__init__()
        self.held = [held]

    def forward(self, x):
        self.held[0].view(-1).add_(x.mean())
        return x * self.held[0].t()


@pytest.mark.parametrize("made", [Reaching, lambda held: Hidden([held], "write"), lambda held: Hidden([held], "read")])
def test_memory_that_opaque_code_writes_in_place_counted_a_second_time(made):
    """Random graph 204: inside the fake mode what ``add_`` gave back was a new fake of the real tensor."""
    root = nn.Module()
    root.register_buffer("state", torch.zeros(8, 8))
    root.opaque = made(root.state)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_module("opaque", (x,)), graph.get_attr("state")))
    gm = fx.GraphModule(root, graph)
    sk.propagate(gm, torch.ones(8, 8))
    before = gm.state.clone()
    sk.simulate_memory(gm)
    assert before.equal(gm.state), "nothing real is written"
    same(gm, torch.ones(8, 8))
