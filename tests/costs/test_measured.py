"""Every group is measured once, on valid arguments; nothing of the model, its inputs or the caller's state changes."""

import copy
import gc
import operator

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from handgraphs import captured
from torch import fx, nn

import splitkit as sk
from splitkit import costs
from splitkit.costs import measuring_run
from splitkit.costs.measuring_run import measured
from splitkit.costs.run_inputs import Private
from splitkit.errors import CostError, GraphError
from splitkit.frontends.joint_capture import capture
from splitkit.testing.compare import assert_same
from splitkit.testing.differences import bitwise, named_tensors

QUICK = {"min_run_time": 1e-4}
TINY = {"layers": 2, "width": 32, "heads": 2, "vocab": 100, "seq": 8}


def state_of(gm, inputs):
    leaves = torch.utils._pytree.tree_leaves(inputs)
    tensors = {**dict(named_tensors(gm)), **{f"input {i}": t for i, t in enumerate(leaves) if torch.is_tensor(t)}}
    held = {name: (t, t.detach().clone(), t.requires_grad, t._version) for name, t in tensors.items()}
    return held, torch.get_rng_state(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def untouched(before, gm, inputs):
    after = state_of(gm, inputs)
    assert after[0].keys() == before[0].keys()
    for name, (tensor, value, requires_grad, version) in before[0].items():
        now, _, _, now_version = after[0][name]
        assert now is tensor and bitwise(now, value) and now.requires_grad == requires_grad, name
        assert now_version == version, name
    assert torch.equal(after[1], before[1]) and after[2:] == before[2:]


def measure(gm, inputs, **options):
    """Measure, and see that nothing is touched and every node has its price."""
    before = state_of(gm, inputs)
    costs = measured(gm, inputs, **{**QUICK, **options})
    untouched(before, gm, inputs)
    assert all(costs.seconds(n) >= 0 and costs.workspace(n) >= 0 for n in gm.graph.nodes)
    return costs


def ops(gm, name):
    return [n for n in gm.graph.nodes if n.op.startswith("call_") and name in str(n.target)]


@pytest.mark.parametrize("name", these_first(["gpt2"], ["bert", "t5", "mixtral"]))
def test_transformers_in_training_mode(name):
    example, gm = captured_example(name, **TINY)
    costs = measure(gm, example.kwargs)
    by_flops = max(gm.graph.nodes, key=sk.costs.flops(gm).flops)
    assert costs.seconds(by_flops) > 0 and costs.flops(by_flops) == sk.costs.flops(gm).flops(by_flops)
    assert costs.note.startswith("measured on cpu")
    reader = by_flops.all_input_nodes[1]
    assert costs.nbytes(reader) == sk.costs.flops(gm).nbytes(reader) > 0
    assert costs.param_bytes(by_flops) == sk.costs.flops(gm).param_bytes(by_flops)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(torch.relu_(self.norm(self.conv(x)))).flatten(1).sum(1)


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_and_dropout(how, training):
    model, x = Convolutions().train(training), torch.randn(2, 3, 16, 16)
    gm = capture(model, x, how=how)
    costs = measure(gm, (x,))
    assert sum(map(costs.seconds, gm.graph.nodes)) > 0
    assert all(costs.seconds(n) > 0 for n in ops(gm, "conv") + ops(gm, "norm") + ops(gm, "relu_"))
    assert_same(model, gm, x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("alias", self.seen[:2])

    def forward(self, x, index):
        self.seen.add_(x.sum(0))
        self.alias.mul_(2)
        x[:, 0].add_(1)
        y = torch.zeros(6, 4).index_put_((index,), x, accumulate=True)
        return y.unsqueeze_(0) + self.seen, x.t_()


def test_what_is_written_is_a_copy():
    model, inputs = InPlace(), (torch.randn(3, 4), torch.tensor([1, 5, 5]))
    gm = capture(model, torch.randn(3, 4), inputs[1])
    costs = measure(gm, inputs)
    assert all(costs.seconds(n) > 0 for n in ops(gm, "add_") + ops(gm, "index_put"))


def test_a_run_sees_the_values_of_a_real_run():
    """Measuring before it draws no numbers from it and leaves no mark on what it writes."""
    seen = []

    @torch.library.custom_op("splitkit_test_measured::note", mutates_args=())
    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return x.clone()

    note.register_fake(torch.empty_like)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(1)
            y = torch.dropout(x, 0.5, True).mul_(self.count)
            return note(torch.dropout(y, 0.5, True) + torch.rand(3))

    model, x = Model(), torch.randn(4, 3)
    gm = capture(model, x)
    torch.manual_seed(3)
    seen.clear()
    costs = measured(gm, x, **QUICK)
    (node,) = ops(gm, "note")
    first = seen[0]
    assert costs.seconds(node) > 0 and len(seen) > 3 and all(torch.equal(first, value) for value in seen)
    torch.manual_seed(3)
    seen.clear()
    model(x)
    assert torch.equal(first, seen[0])


class Views(nn.Module):
    def forward(self, x):
        a, b = x.view(2, 8).t().chunk(2)
        same = torch.dropout(x.contiguous().float(), 0.5, False)
        return a.reshape(-1), b.expand(3, 4, 2).diagonal(), same[1:]


def test_views_cost_their_dispatch():
    gm = capture(Views(), torch.randn(4, 4))
    costs = measure(gm, torch.randn(4, 4))
    called = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [n for n in gm.graph.nodes if costs.seconds(n)] == called and len(called) > 8


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.small(y), lambda y: self.large(y), (x,)) * 2


def test_higher_order_ops_and_their_bodies():
    gm = capture(Choice(), torch.randn(3, 4))
    costs = measure(gm, torch.ones(3, 4))
    (node,) = ops(gm, "cond")
    assert costs.seconds(node) > 0


def test_what_acts_outside_runs_once():
    said = []

    def say(x):
        said.append(x)
        return x + 1

    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(say, (x,))
    graph.output(node)
    for n in graph.nodes:
        n.meta["val"] = torch.empty(2)
    gm = fx.GraphModule(nn.Module(), graph)
    assert measured(gm, torch.ones(2)).seconds(node) > 0
    assert len(said) == 1


def test_workspace_is_what_is_taken_beyond_the_results():
    @torch.library.custom_op("splitkit_test_measured::scratch", mutates_args=())
    def scratch(x: torch.Tensor) -> torch.Tensor:
        torch.empty(100, 1000)
        a = torch.empty(50, 1000)
        b = torch.empty(30, 1000)
        del a, b
        return torch.empty(10, 1000)

    scratch.register_fake(lambda x: torch.empty(10, 1000))

    class Model(nn.Module):
        def forward(self, x):
            return scratch(x), x + 1

    gm = capture(Model(), torch.ones(500))
    costs = measure(gm, torch.ones(500))
    (node,), (plain,) = ops(gm, "scratch"), ops(gm, "add")
    assert costs.workspace(node) == (100 - 10) * 1000 * 4
    assert costs.workspace(plain) <= 64  # the scalar


def test_keyword_inputs_and_default_values():
    class Model(nn.Module):
        def forward(self, x, *, scale, mask=None):
            return x * scale

    gm = capture(Model(), torch.ones(2), scale=torch.ones(2))
    costs = measure(gm, {"x": torch.ones(2), "scale": torch.ones(2)})
    assert sum(map(costs.seconds, gm.graph.nodes)) > 0


def test_nodes_that_were_added_later_are_named():
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    costs = measure(gm, torch.randn(2, 4))
    (node,) = ops(gm, "linear")
    with gm.graph.inserting_after(node):
        added = gm.graph.call_function(torch.relu, (node,))
    for ask in (costs.seconds, costs.workspace):
        with pytest.raises(CostError, match=r"SK325: relu was not measured.*\n.*again"):
            ask(added)


def test_inputs_that_do_not_fit_are_refused():
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    for inputs in ((), (torch.ones(2, 4), 1), {"y": torch.ones(2, 4)}):
        with pytest.raises(CostError, match="SK324"):
            measured(gm, inputs)
    with pytest.raises(CostError, match=r"SK324.*linear \(aten.linear.default\) fails") as caught:
        measured(gm, torch.ones(2, 5))
    assert caught.value.nodes == ("linear",)


@pytest.mark.parametrize(
    ("device", "why"), [("cuda:99", "this machine has"), ("mps", "only CPUs and CUDA"), ("warp", "Expected one of")]
)
def test_devices_that_are_not_there(device, why):
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(CostError, match=rf"SK321: the graph cannot be measured on '{device}': .*{why}"):
        measured(gm, torch.randn(2, 4), device)


def test_a_graph_without_values_is_refused():
    gm = fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(GraphError, match="SK102"):
        measured(gm, torch.randn(2, 4))


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_time_must_be_positive(seconds):
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(CostError, match=r"SK324: min_run_time is"):
        measured(gm, torch.randn(2, 4), min_run_time=seconds)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda gm: costs.measured(gm, None), "SK324.*NoneType"),
        (lambda gm: costs.measured(gm, torch.ones(3), None), "SK321.*None"),
        (lambda gm: costs.measured(gm, torch.ones(3, device="meta")), "SK324.*meta"),
    ],
)
def test_measuring_without_inputs_or_a_device_is_refused_with_the_reason(call, said):
    with pytest.raises(CostError, match=said):
        call(captured(lambda self, x: x.sin(), torch.ones(3)))


def test_a_graph_inside_a_node_makes_its_tensors_on_the_measuring_device():
    class Inside(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda x: x + torch.arange(4), lambda x: x - 1, (x,))

    gm = capture(Inside(), torch.ones(4))
    bodies = [m for m in gm.modules() if m is not gm and isinstance(m, fx.GraphModule)]
    made = [n for body in bodies for n in body.graph.nodes if n.target is torch.ops.aten.arange.default]
    assert made
    for node in made:  # as if the model had been captured where there is a GPU
        node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    for body in bodies:
        body.recompile()
    prices = measured(gm, torch.ones(4), **QUICK)
    assert sum(prices.seconds(node) for node in gm.graph.nodes) > 0


def test_a_terminal_is_shown_how_far_measuring_is(monkeypatch, capsys):
    gm = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    measured(gm, torch.ones(2, 4), **QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    measured(gm, torch.ones(2, 4), **QUICK)
    assert "measuring" in capsys.readouterr().err


@pytest.fixture
def runs(monkeypatch):
    """The runs that are timed, and before them the one that finds out what the ops are."""
    found = []

    def kept(kind):
        class Kept(kind):
            def __init__(self, *args):
                super().__init__(*args)
                found.append(self)

        return Kept

    for name in ("FirstRun", "MeasuringRun"):
        monkeypatch.setattr(measuring_run, name, kept(getattr(measuring_run, name)))
    return found


def test_layers_of_one_shape_have_one_price(runs):
    inner = [copy.deepcopy(nn.Linear(8, 8)) for _ in range(5)]
    gm = capture(nn.Sequential(*inner, nn.Linear(8, 3)), torch.randn(4, 8))
    costs = measure(gm, torch.randn(4, 8))
    linears = ops(gm, "linear")
    assert len({costs.seconds(n) for n in linears[:5]}) == 1 and costs.seconds(linears[0]) > 0
    first, *timed = runs
    assert len({first.groups[n] for n in linears}) == 2 and len(timed) >= 3
    means = [sum(run.seconds[n] for n in linears[:5]) / 5 for run in timed]
    assert costs.seconds(linears[0]) == pytest.approx(min(means))


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_what_the_time_of_an_op_depends_on(how, runs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x) + self.b(x)
            return torch.softmax(y, 0), torch.softmax(y, 0), torch.softmax(y, 1), y.t() + 1, (y + 1) + 1

    gm = capture(Net(), torch.randn(4, 4), how=how)
    measure(gm, torch.randn(4, 4))
    groups = runs[0].groups
    same = lambda *nodes: len({groups[n] for n in nodes}) == 1  # noqa: E731
    one, other, along = ops(gm, "softmax")
    assert same(one, other) and not same(one, along)
    modules = [n for n in groups if "linear" in str(n.target) or n.op == "call_module"]
    assert len(modules) == 2 and same(*modules)
    sums = [n for n in ops(gm, "add") if len(n.all_input_nodes) == 1]
    assert len(sums) == 3 and len({groups[n] for n in sums}) == 2  # a transposed argument is another


class Precise(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        x = self.a(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.b(x)
        with torch.no_grad():
            return self.a(x.float())


def test_regions_are_in_force(runs):
    gm = capture(Precise(), torch.randn(4, 32))
    assert ops(gm, "autocast")
    costs = measure(gm, torch.randn(4, 32))
    first, inside, last = ops(gm, "linear")
    assert runs[0].groups[first] == runs[0].groups[last] != runs[0].groups[inside]
    assert all(costs.seconds(n) == 0 for n in ops(gm, "autocast"))


def test_an_error_in_a_region_leaves_no_mode(monkeypatch):
    gm = capture(Precise(), torch.randn(4, 32))

    def stops(self, *args):
        if torch.is_autocast_enabled("cpu"):
            raise KeyboardInterrupt
        return args[-1]()

    monkeypatch.setattr(measuring_run.MeasuringRun, "_timed", stops)
    x = torch.randn(4, 32)
    before = state_of(gm, x)
    with pytest.raises(KeyboardInterrupt):
        measured(gm, x, **QUICK)
    untouched(before, gm, x)


def test_symbolic_sizes_are_those_of_the_inputs(runs):
    gm = capture(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.randn(5, 4), dynamic=True)
    measure(gm, torch.randn(9, 4))
    texts = str([*runs[0].groups.values()])
    assert "[9, 4]" in texts and "[5, 4]" not in texts
    gm(torch.randn(7, 4))  # no guard was added


def test_values_are_freed_after_their_last_use(monkeypatch):
    class Chain(nn.Module):
        def forward(self, x):
            for i in range(12):
                x = torch.add(x, i)
            return x

    gm, alive, real = capture(Chain(), torch.randn(777)), [], measuring_run.MeasuringRun._timed

    def record(self, *args):
        alive.append(sum(type(t) is torch.Tensor and t.shape == (777,) for t in gc.get_objects(0)))
        return real(self, *args)

    x = torch.randn(777)
    monkeypatch.setattr(measuring_run.MeasuringRun, "_timed", record)
    gc.disable()  # then what it makes is of the youngest generation
    try:
        measured(gm, x, **QUICK)
    finally:
        gc.enable()
    assert len(alive) >= 36 and max(alive) <= min(alive) + 1


def test_on_a_gpu_events_around_each_launch_are_read_after_the_run(monkeypatch):
    """Each op is launched behind a pause; the time of a view does not count."""
    gm = capture(nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Tanh()), torch.randn(2, 3, 4))
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append(self)

        def elapsed_time(self, end):
            assert log.index(None) > log.index(end) == log.index(self) + 1, "after the run, one behind the other"
            return 7.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append(None))
    monkeypatch.setattr(measuring_run._torch, "CUDA_SLEEP", lambda cycles: log.append(cycles))
    flow, cpu = sk.analyze(gm), torch.device("cpu")
    private = Private(flow, cpu)
    values = private.inputs(torch.randn(2, 3, 4))
    private.device = torch.device("cuda", 0)
    run = measuring_run.MeasuringRun(flow, private)
    with torch.no_grad():
        run.measure(values)
    _, relu, tanh = flow.nodes
    assert run.seconds == {relu: 7e-3, tanh: 7e-3} and log[::3] == [measuring_run.PAUSE] * 3 + [None]
