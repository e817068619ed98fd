"""Steps of training are measured on private copies: no gradient, buffer or state of the caller changes."""

import gc
import weakref

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from smallnets import loss_or_sum
from torch import fx, nn

import splitkit as sk
from splitkit.costs import measuring_run as door
from splitkit.costs.measuring_run import MeasuredSteps, measured
from splitkit.errors import CostError
from splitkit.frontends.joint_capture import capture
from splitkit.graph.ops import declare
from splitkit.graph.ops import declared as ops
from splitkit.pipeline.stage_prices import stage_costs
from tests.costs.test_measured import QUICK, TINY, state_of, untouched


def measure(gm, inputs, **options):
    """Measure steps, and see that nothing is touched."""
    before = state_of(gm, inputs)
    costs = measured(gm, inputs, backward=True, **{**QUICK, **options})
    untouched(before, gm, inputs)
    assert isinstance(costs, MeasuredSteps) and all(p.grad is None for p in gm.parameters())
    return costs


def of(gm, name):
    return [n for n in gm.graph.nodes if name in n.name]


@pytest.fixture
def stepped(monkeypatch):
    """One entry a step that was run."""
    steps = []

    class Counted(door.MeasuringRun):
        def __init__(self, *args):
            super().__init__(*args)
            steps.append(self)

    monkeypatch.setattr(door, "MeasuringRun", Counted)
    return steps


class Leaves(nn.Module):
    """A linear layer; and what a step writes for the next one."""

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes, self.linear, self.norm = writes, nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes == "input":
            x[0].mul_(2)
        y = self.linear(x)
        return (self.norm(y) if self.writes == "buffer" else y.relu_()).sum()


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
@pytest.mark.parametrize("writes", ["nothing", "input", "buffer"])
def test_steps_share_what_no_step_writes(writes, how, stepped):
    """As those of a training loop: a step in new memory was up to a tenth slower."""
    x = torch.randn(3, 4)
    gm = capture(Leaves(writes), x.clone(), how=how)
    gm.recompile()
    measure(gm, (x,))
    states = {id(step.private) for step in stepped}
    assert len(stepped) >= 3 and len(states) == (1 if writes == "nothing" else len(stepped))
    assert all(step.seconds and step.backward for step in stepped)


def test_a_step_is_freed_without_the_garbage_collector(monkeypatch):
    """Its gradients stood in the way of the next step's: nodes of autograd hold hooks, which held the step."""
    alive = []

    class Watched(door.MeasuringRun):
        def __init__(self, *args):
            assert sum(seen() is not None for seen in alive) <= 1, "but for the last one, all are gone"
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(door, "MeasuringRun", Watched)
    gc.collect()
    gc.disable()
    try:
        measure(capture(Leaves("nothing"), torch.randn(3, 4)), (torch.randn(3, 4),))
    finally:
        gc.enable()
    assert len(alive) >= 3 and all(seen() is None for seen in alive)


@pytest.fixture
def declared(monkeypatch):
    """Makes the graph ``sum(relu(op(x)))`` of an op of one's own, and gives the three nodes."""

    def made(op):
        def own(x):
            return op(x)

        monkeypatch.setattr(ops, "_DECLARED", dict(ops._DECLARED))
        declare(own)
        graph = fx.Graph()
        x = graph.placeholder("x")
        first = graph.call_function(own, (x,))
        relu = graph.call_function(torch.relu, (first,))
        total = graph.call_method("sum", (relu,))
        graph.output(total)
        for n in graph.nodes:
            n.meta["val"] = torch.empty(() if n is total else (64, 64))
        fx.GraphModule(nn.Module(), graph)
        return first, relu, total

    return made


@pytest.mark.parametrize("name", these_first(["gpt2"], ["mixtral"]))
def test_each_op_that_trains_has_a_backward(name, stepped):
    example, gm = captured_example(name, **TINY)
    costs = measure(gm, example.kwargs)
    trains = sk.costs.training(sk.costs.flops(gm), gm)
    for node in gm.graph.nodes:
        if trains.flops(node) > sk.costs.flops(gm).flops(node) > 0:  # a product of which a factor requires grad
            assert costs.backward(node) > 0, node.name
            assert costs.seconds(node) == pytest.approx(costs.both(node)[0] * (1 + costs.backward(node)))
        assert costs.flops(node) == trains.flops(node) and costs.nbytes(node) == trains.nbytes(node)
        assert costs.workspace(node) >= 0 and costs.param_bytes(node) >= 0
    assert costs.note.startswith("measured on cpu, forward and backward") and costs.gm is gm
    one = stepped[-1]
    assert set(one.backward) <= set(one.seconds)


def test_the_clock_goes_to_the_op_whose_backward_runs(stepped, declared):
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            for _ in range(200):
                grad @ torch.ones(64, 64)
            return grad

    slow, relu, total = nodes = declared(Slow.apply)
    costs = measure(slow.graph.owning_module, torch.randn(64, 64, requires_grad=True))
    assert all(costs.backward(n) > 0 for n in nodes)
    for step in stepped:  # whatever the machine does meanwhile: two hundred products took most of it
        assert step.backward[slow] > step.backward[relu] + step.backward[total] > 0


def test_ops_under_no_grad_have_no_backward():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.free = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            with torch.no_grad():
                x = self.frozen(x)
            return self.free(x).sum()

    gm = capture(Net(), torch.randn(4, 16))
    costs = measure(gm, torch.randn(4, 16))
    frozen, free = of(gm, "linear")
    assert costs.backward(frozen) == 0 < costs.backward(free)
    assert costs.seconds(frozen) > 0


def test_modules_and_buffers_stay_as_they_are(stepped):
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    gm = fx.symbolic_trace(net)
    x = torch.randn(4, 8)
    torch.fx.passes.shape_prop.ShapeProp(gm).propagate(x)
    gm.get_submodule("1").reset_running_stats()
    for n in gm.graph.nodes:
        n.meta["val"] = torch.empty(n.meta["tensor_meta"].shape)
    costs = measure(gm, x)
    assert all(costs.backward(n) > 0 for n in gm.graph.nodes if n.op == "call_module" and n.target in ("1", "3"))


def test_plans_take_them_as_prices_of_training():
    example, gm = captured_example("gpt2", **TINY)
    costs = measure(gm, example.kwargs)
    plan = sk.plan(gm, sk.policies.Stages(2, schedule="1f1b"), costs)
    found = stage_costs(sk.analyze(gm), plan, costs)
    assert sum(s.forward + s.backward for s in found) == pytest.approx(sum(map(costs.seconds, gm.graph.nodes)))
    with pytest.raises(CostError, match="SK323.*MeasuredSteps includes backward already"):
        sk.costs.training(costs, gm)


def test_what_cannot_be_measured_is_refused(stepped):
    def say(x):
        return x + 1

    graph = fx.Graph()
    graph.output(graph.call_function(say, (graph.placeholder("x"),)))
    for n in graph.nodes:
        n.meta["val"] = torch.empty(2)
    gm = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(CostError, match=r"(?s)SK324.*outside.*training\(measured"):
        measured(gm, torch.ones(2), backward=True)
    joint = sk.capture_joint(nn.Sequential(nn.Linear(4, 1)), torch.randn(2, 4), loss=loss_or_sum).graph_module
    with pytest.raises(CostError, match="SK324.*backward is in this graph already"):
        measured(joint, (), backward=True)
    with pytest.raises(CostError, match="SK324.*backward is 1"):
        measured(gm, torch.ones(2), backward=1)
    assert not stepped


def test_a_backward_that_fails_is_said(declared):
    class Never(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise NotImplementedError("no such gradient")

    node, *_ = declared(Never.apply)
    with pytest.raises(CostError, match="SK324.*no such gradient"):
        measure(node.graph.owning_module, torch.ones(64, 64, requires_grad=True))
