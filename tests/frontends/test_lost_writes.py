"""Writes that tracing would lose are refused; lazy modules are split, or refused where a size is needed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.policies import SaveAll
from splitkit.testing import assert_same


def on_a_value(net, x, y):
    z = x * 1
    z.data = y
    return z + 1


def on_an_input(net, x, y):
    x.data = y
    return x + 1


def on_a_parameter(net, x, y):
    net.weight.data = y * 2
    return x * net.weight


def on_a_buffer(net, x, y):
    net.buffer.data = net.buffer.data + 1
    return x * net.buffer


def by_setattr(net, x, y):
    setattr(x, "data", y)  # noqa: B010
    return x + 1


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x, y):
        return self.body(self, x, y)


WAYS = {
    "export": lambda m, *given: sk.capture(m, *given),
    "dynamic": lambda m, *given: sk.capture(m, *given, dynamic=True),
    "symbolic_trace": lambda m, *given: sk.capture(m, *given, how="symbolic_trace"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", [on_a_value, on_an_input, on_a_parameter, on_a_buffer, by_setattr])
def test_an_assignment_to_data_is_refused_with_its_line(body, way):
    net = Net(body)
    with pytest.raises(
        sk.errors.CaptureError, match=r"(?s)SK410: the model assigns to \.data.*test_lost_writes\.py:\d+: .*copy_"
    ):
        WAYS[way](net, torch.ones(3), torch.zeros(3))
    assert net.weight.tolist() == net.buffer.tolist() == [1.0] * 3


@pytest.mark.parametrize("body", [on_a_value, on_an_input, on_a_parameter, on_a_buffer])
def test_a_joint_capture_refuses_an_assignment_to_data(body):
    with pytest.raises(sk.errors.CaptureError, match=r"(?s)SK401: .*the model assigns to \.data of a tensor.*copy_"):
        sk.capture_joint(Net(body), torch.ones(3), torch.zeros(3), loss=torch.sum)


@pytest.mark.parametrize("body", [on_a_value, on_a_parameter])
def test_apply_runs_a_model_that_assigns_to_data_or_refuses_it(body):
    expected = Net(body)(torch.ones(3), torch.zeros(3))
    try:
        applied = sk.apply(Net(body), SaveAll(), torch.ones(3), torch.zeros(3))
    except sk.SplitError:
        return
    assert torch.equal(applied(torch.ones(3), torch.zeros(3)), expected)


def test_symbolic_trace_refuses_a_write_through_a_view_of_what_was_there():
    def body(net, x, y):
        net.buffer.data.mul_(2)
        return x * net.buffer

    with pytest.raises(sk.errors.CaptureError, match="SK401: symbolic_trace loses"):
        sk.capture(Net(body), torch.ones(3), torch.zeros(3), how="symbolic_trace")


def test_symbolic_trace_still_takes_writes_to_what_it_made():
    def body(net, x, y):
        z = torch.zeros(3)
        z[1:].add_(1)
        return x * z

    gm = sk.capture(Net(body), torch.ones(3), torch.zeros(3), how="symbolic_trace")
    assert gm(torch.ones(3), torch.zeros(3)).tolist() == [0.0, 1.0, 1.0]


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.relu(self.n(self.a(x))))


@pytest.fixture
def lazy():
    return fx.symbolic_trace(Lazy())


def in_two(node):
    return 0 if node.name == "a" else 1


SPLITS = {
    "own": lambda gm: sk.split(gm, in_two).module,
    "hoist": lambda gm: sk.split(gm, in_two, parameters="hoist").module,
    "split_module": lambda gm: sk.split_module(gm, None, in_two),
    "inline": lambda gm: sk.inline(sk.split(gm, in_two)),
}


@pytest.mark.parametrize("how", SPLITS)
def test_a_lazy_module_is_split_and_made_at_the_first_call(lazy, how):
    x = torch.randn(3, 5)
    split = SPLITS[how](lazy)
    torch.manual_seed(0)
    found = split(x)
    torch.manual_seed(0)
    assert found.shape == (3, 4) and not any(map(torch.nn.parameter.is_lazy, split.parameters()))
    assert torch.equal(found, Lazy.forward(lazy, x))


NEED_SIZES = {
    "report": lambda gm, x: sk.report(gm, sk.plan(gm, in_two)),
    "compare": lambda gm, x: sk.compare(gm, sk.split(gm, in_two), x),
    "propagate": lambda gm, x: sk.extend.propagate(gm, x),
}


@pytest.mark.parametrize("what", NEED_SIZES)
def test_what_needs_the_sizes_of_a_lazy_module_says_so(lazy, what):
    with pytest.raises(sk.errors.GraphError, match=r"SK112: .* has no size yet(?s:.*)Call the model once"):
        NEED_SIZES[what](lazy, torch.randn(3, 5))


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_a_lazy_model_is_captured(how):
    torch.manual_seed(0)
    gm = sk.capture(Lazy().eval(), torch.randn(3, 5), how=how)
    assert gm(torch.randn(3, 5)).shape == (3, 4)
    assert sk.capture_joint(Lazy(), torch.randn(3, 5), loss=torch.sum).graph_module
    assert sk.apply(Lazy(), SaveAll(), torch.randn(3, 5))(torch.randn(3, 5)).shape == (3, 4)


def test_symbolic_trace_refuses_writes_to_buffers_and_leaves_them_alone():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.held = [torch.zeros(2)]

    class InPlace(Counts):
        def forward(self, x):
            self.seen.add_(1)
            return x + self.seen

    class Anew(Counts):
        def forward(self, x):
            self.seen = self.seen + 1
            return x + self.seen

    class InAList(Counts):
        def forward(self, x):
            torch.add(self.held[0], 1, out=self.held[0])
            return x + self.held[0]

    class OfItsOwn(Counts):
        def forward(self, x):
            mask = torch.zeros(2)
            mask[0] = 1
            mask.mul_(3)
            return x + mask + self.seen

    for kind in (InPlace, Anew, InAList):
        model = kind()
        with pytest.raises(sk.errors.CaptureError, match="SK401.*symbolic_trace loses what the model does"):
            sk.capture(model, torch.ones(2), how="symbolic_trace")
        assert not model.seen.any()
    model = OfItsOwn()
    assert_same(model, sk.capture(model, torch.ones(2), how="symbolic_trace"), torch.ones(2))


STATE = torch.get_rng_state()


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
@pytest.mark.parametrize("call", ["torch.manual_seed(3)", "torch.random.manual_seed(3)", "torch.set_rng_state(STATE)"])
def test_a_model_that_seeds_is_refused_with_its_line(how, call):
    class Seeding(nn.Module):
        def forward(self, x):
            eval(call)
            return x + torch.rand_like(x)

    with pytest.raises(sk.errors.CaptureError, match=r"SK410.*tracing loses") as error:
        sk.capture(Seeding(), torch.zeros(3), how=how)
    assert "test_lost_writes.py" in str(error.value)


def test_a_model_that_draws_is_captured_and_seeding_works_again_afterwards():
    before = torch.manual_seed
    gm = sk.capture(nn.Dropout(), torch.ones(8))
    assert torch.manual_seed is before
    assert torch.equal(torch.manual_seed(5) and gm(torch.ones(8)), torch.manual_seed(5) and nn.Dropout()(torch.ones(8)))


class Counts(nn.Module):
    """Writes to 0-dim buffers in all three ways that a graph of Dynamo holds: by a method, a view and ``out=``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name in ("calls", "total", "scale"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, x, step):
        self.calls.add_(1)
        self.total.view(1).add_(x.detach().sum())
        y = self.linear(x) * math.floor(step) + self.total.float()  # a number that torch cannot keep variable
        torch.add(self.scale, step, out=self.scale)
        return y


@pytest.mark.parametrize("door", ["backend", "apply"])
def test_compiled_writes_to_numbers_in_tensors_are_kept(door):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net, x = Counts(), torch.randn(3, 2)
    eager = copy.deepcopy(net)
    plan = SaveAll()
    compiled = sk.apply(net, plan, x, 1.5) if door == "apply" else torch.compile(net, backend=sk.backend(plan))
    for grad in (True, False):  # compiled anew
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(compiled(x, 1.5), eager(x, 1.5))
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))
    assert eager.calls == 2


def test_a_write_that_torch_itself_lost_is_kept():
    """Torch still knows what it fixed when the next backend compiles the function."""
    torch._dynamo.reset()
    total = torch.zeros((), dtype=torch.float64)

    def add(x):
        total.add_(1)
        return x + 1

    torch.compile(add, backend="aot_eager")(torch.ones(2))
    before = total.item()
    torch.compile(add, backend=sk.backend(SaveAll()))(torch.ones(2))
    assert total == before + 1


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 3))

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def plus_one(net):
    net.register_forward_hook(lambda module, args, output: output + 1)
    return net


def doubled(net):
    net.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return net


HOOKED = {
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: nn.utils.spectral_norm(Own()).eval(),
    "output": lambda: plus_one(Own()),
    "input": lambda: doubled(Own()),
    "inside": lambda: nn.Sequential(nn.utils.spectral_norm(Own())),
}


def assert_follows(gm, model, x):
    """The graph computes what the model does after its parameters have changed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    state = copy.deepcopy(model.state_dict())
    want = model(x)
    model.load_state_dict(state)
    torch.testing.assert_close(gm(x), want)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:forward hooks of")
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_that_symbolic_trace_does_not_call_are_refused(name):
    model, x = HOOKED[name](), torch.rand(2, 3)
    with pytest.raises(sk.SplitError, match=r'(?s)SK401.*the (hook of weight|spectral)_norm.*Use how="export"'):
        sk.capture(model, x, how="symbolic_trace")
    gm = sk.capture(model, x)  # the remedy
    assert_follows(gm, model, x)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_hooks_of_modules_inside_are_in_a_symbolic_trace():
    model, x = nn.Sequential(nn.utils.weight_norm(Own()), nn.utils.spectral_norm(nn.Linear(3, 3))), torch.rand(2, 3)
    gm = sk.capture(model, x, how="symbolic_trace")
    assert_follows(gm, model, x)
