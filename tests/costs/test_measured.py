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
from splitkit.costs.timing import call_timing as timing
from splitkit.costs.timing import measuring_run as door
from splitkit.costs.timing.cache import read_cost_file
from splitkit.costs.timing.measured import measured
from splitkit.errors import CostError, GraphError
from splitkit.frontends.capture.capture import capture
from splitkit.testing.oracle import assert_same
from splitkit.testing.trial import bitwise, named_tensors

QUICK = {"min_run_time": 1e-4}
TINY = {"layers": 2, "width": 32, "heads": 2, "vocab": 100, "seq": 8}


@pytest.fixture
def counted(monkeypatch):
    """The keys of what is measured, one entry a measurement."""
    calls = []

    def record(prepare, *args):
        run = prepare()
        calls.append(run.func)
        return timing.time_call(prepare, *args)

    monkeypatch.setattr(door, "time_call", record)
    return calls


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
    costs = measured(gm, inputs, cache=options.pop("cache", False), **{**QUICK, **options})
    untouched(before, gm, inputs)
    assert all(costs.seconds(n) >= 0 and costs.workspace(n) >= 0 for n in gm.graph.nodes)
    return costs


def ops(gm, name):
    return [n for n in gm.graph.nodes if n.op.startswith("call_") and name in str(n.target)]


@pytest.mark.parametrize("name", these_first(["gpt2"], ["bert", "t5", "mixtral"]))
def test_transformers_in_training_mode(name, counted):
    example, gm = captured_example(name, **TINY)
    costs = measure(gm, example.kwargs)
    assert 10 < len(counted) < len(gm.graph.nodes) / 2
    by_flops = max(gm.graph.nodes, key=sk.costs.flops(gm).flops)
    assert costs.seconds(by_flops) > 0 and costs.flops(by_flops) == sk.costs.flops(gm).flops(by_flops)
    assert costs.note.startswith("measured on cpu")
    reader = by_flops.all_input_nodes[1]
    assert costs.nbytes(reader) == sk.costs.flops(gm).nbytes(reader) > 0
    assert costs.param_bytes(by_flops) == sk.costs.flops(gm).param_bytes(by_flops)


def test_layers_of_one_shape_are_measured_once(counted):
    inner = [copy.deepcopy(nn.Linear(8, 8)) for _ in range(5)]
    gm = capture(nn.Sequential(*inner, nn.Linear(8, 3)), torch.randn(4, 8))
    costs = measure(gm, torch.randn(4, 8))
    assert counted == [torch.ops.aten.linear.default] * 2
    linears = ops(gm, "linear")
    assert len({costs.seconds(n) for n in linears[:5]}) == 1 and costs.seconds(linears[0]) > 0


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
    costs = measured(gm, x, cache=False, **QUICK)
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


def test_views_cost_their_dispatch_and_are_not_looped_over(counted):
    gm = capture(Views(), torch.randn(4, 4))
    costs = measure(gm, torch.randn(4, 4))
    called = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    assert [n for n in gm.graph.nodes if costs.seconds(n)] == called and len(called) > 8
    assert counted == [torch.ops.aten.reshape.default]  # it copies


def test_prices_are_those_of_ops_among_the_others(monkeypatch):
    """Dispatch, new memory and cold caches count: the times of a run, not those of an op alone in a loop."""
    loops = []

    def slow(prepare, *args):
        loops.append(timing.time_call(prepare, *args))
        return timing.Record(1e3, 7)

    monkeypatch.setattr(door, "time_call", slow)
    gm = capture(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8))
    costs = measure(gm, torch.randn(4, 8))
    priced = [n for n in gm.graph.nodes if costs.seconds(n)]
    assert len(loops) == 2 and len(priced) == 3 and all(costs.seconds(n) < 1 for n in priced)  # by the run, not alone
    assert {costs.workspace(n) for n in priced} == {7}
    first, last = (n for n in priced if "linear" in n.name)
    assert costs.seconds(first) == costs.seconds(last)  # one group


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


def test_regions_are_in_force(tmp_path, counted):
    gm = capture(Precise(), torch.randn(4, 32))
    assert ops(gm, "autocast")
    path = tmp_path / "costs.json"
    costs = measure(gm, torch.randn(4, 32), cache=path)
    (entries,) = read_cost_file(path).values()
    (inside,) = [key for key in entries if "linear" in key and "autocast" in key]
    (outside,) = [key for key in entries if "linear" in key and "autocast" not in key]
    assert inside == f"{outside} under autocast cpu bfloat16"
    assert counted.count(torch.ops.aten.linear.default) == 2  # the third is like the first
    assert all(costs.seconds(n) == 0 for n in ops(gm, "autocast"))


class Choice(nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.large = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.small(y), lambda y: self.large(y), (x,)) * 2


def test_higher_order_ops_and_their_bodies(tmp_path):
    gm = capture(Choice(), torch.randn(3, 4))
    path = tmp_path / "costs.json"
    costs = measure(gm, torch.ones(3, 4), cache=path)
    (node,) = ops(gm, "cond")
    assert costs.seconds(node) > 0
    (entries,) = read_cost_file(path).values()
    assert any(key.startswith("cond") or "cond" in key.split("(")[0] for key in entries)


def test_symbolic_sizes_are_those_of_the_inputs(tmp_path):
    gm = capture(nn.Sequential(nn.Linear(4, 6), nn.ReLU()), torch.randn(5, 4), dynamic=True)
    path = tmp_path / "costs.json"
    measure(gm, torch.randn(9, 4), cache=path)
    (entries,) = read_cost_file(path).values()
    assert any("float32[9,4]" in key for key in entries) and not any("[5,4]" in key for key in entries)
    gm(torch.randn(7, 4))  # no guard was added


def test_a_second_call_only_reads(tmp_path, counted):
    x = torch.randn(4, 8)
    gm = capture(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)), x)
    first = measure(gm, x, cache=tmp_path / "costs.json")
    written = (tmp_path / "costs.json").read_bytes()
    assert counted
    counted.clear()
    second = measure(gm, x, cache=tmp_path / "costs.json")
    assert not counted and (tmp_path / "costs.json").read_bytes() == written
    assert [first.seconds(n) for n in gm.graph.nodes] == [second.seconds(n) for n in gm.graph.nodes]
    assert [first.workspace(n) for n in gm.graph.nodes] == [second.workspace(n) for n in gm.graph.nodes]
    torch.set_num_threads(2)
    measure(gm, x, cache=tmp_path / "costs.json")
    assert counted  # another number of threads is another machine


def test_the_cache_of_the_user(tmp_path, monkeypatch, counted):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    measured(gm, torch.randn(2, 4), **QUICK)
    measured(gm, torch.randn(2, 4), **QUICK)
    assert len(counted) == 1 and (tmp_path / "splitkit" / "costs.json").is_file()


def test_ctrl_c_keeps_what_is_measured(tmp_path, monkeypatch, counted):
    gm = capture(Precise(), torch.randn(4, 32))
    x, real = torch.randn(4, 32), door.time_call

    def stops(*args):
        if len(counted) == 1:
            assert torch.is_autocast_enabled("cpu")
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(door, "time_call", stops)
    before = state_of(gm, x)
    with pytest.raises(KeyboardInterrupt):
        measured(gm, x, cache=tmp_path / "costs.json", **QUICK)
    untouched(before, gm, x)
    (entries,) = read_cost_file(tmp_path / "costs.json").values()
    assert len(entries) == len(counted) == 1
    monkeypatch.setattr(door, "time_call", real)
    counted.clear()
    measure(gm, x, cache=tmp_path / "costs.json")
    (entries,) = read_cost_file(tmp_path / "costs.json").values()
    assert counted.count(torch.ops.aten.linear.default) == 1  # the one that is not kept yet
    assert len(entries) > 1


def test_what_acts_outside_runs_once(counted):
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
    assert measured(gm, torch.ones(2), cache=False).seconds(node) > 0
    assert len(said) == 1 and not counted


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


def test_inputs_that_do_not_fit_are_refused_before_anything_is_measured(counted):
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    for inputs in ((), (torch.ones(2, 4), 1), {"y": torch.ones(2, 4)}):
        with pytest.raises(CostError, match="SK324"):
            measured(gm, inputs, cache=False)
    with pytest.raises(CostError, match=r"SK324.*linear \(aten.linear.default\) fails") as caught:
        measured(gm, torch.ones(2, 5), cache=False)
    assert caught.value.nodes == ("linear",) and not counted


@pytest.mark.parametrize(
    ("device", "why"), [("cuda:99", "this machine has"), ("mps", "only CPUs and CUDA"), ("warp", "Expected one of")]
)
def test_devices_that_are_not_there(device, why):
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(CostError, match=rf"SK321: the graph cannot be measured on '{device}': .*{why}"):
        measured(gm, torch.randn(2, 4), device, cache=False)


def test_a_graph_without_values_is_refused():
    gm = fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(GraphError, match="SK102"):
        measured(gm, torch.randn(2, 4), cache=False)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_time_must_be_positive(seconds):
    gm = capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(CostError, match=r"SK324: min_run_time is"):
        measured(gm, torch.randn(2, 4), cache=False, min_run_time=seconds)


def test_values_are_freed_after_their_last_use(monkeypatch):
    class Chain(nn.Module):
        def forward(self, x):
            for i in range(12):
                x = torch.add(x, i)
            return x

    gm, alive = capture(Chain(), torch.randn(777)), []

    def record(*args):
        alive.append(sum(type(t) is torch.Tensor and t.shape == (777,) for t in gc.get_objects(0)))
        return timing.time_call(*args)

    x = torch.randn(777)
    monkeypatch.setattr(door, "time_call", record)
    gc.disable()  # then what it makes is of the youngest generation
    try:
        measured(gm, x, cache=False, **QUICK)
    finally:
        gc.enable()
    assert len(alive) == 12 and max(alive) <= min(alive) + 1


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda gm: costs.measured(gm, None, cache=False), "SK324.*NoneType"),
        (lambda gm: costs.measured(gm, torch.ones(3), None, cache=False), "SK321.*None"),
        (lambda gm: costs.measured(gm, torch.ones(3, device="meta"), cache=False), "SK324.*meta"),
    ],
)
def test_measuring_without_inputs_or_a_device_is_refused_with_the_reason(call, said):
    with pytest.raises(CostError, match=said):
        call(captured(lambda self, x: x.sin(), torch.ones(3)))


def test_a_graph_inside_a_node_makes_its_tensors_on_the_measuring_device(tmp_path):
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
    prices = measured(gm, torch.ones(4), cache=tmp_path / "costs.json", **QUICK)
    assert sum(prices.seconds(node) for node in gm.graph.nodes) > 0


def test_a_terminal_is_shown_how_far_measuring_is(monkeypatch, capsys):
    gm = capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4))
    measured(gm, torch.ones(2, 4), cache=False, **QUICK)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    measured(gm, torch.ones(2, 4), cache=False, **QUICK)
    assert "measuring" in capsys.readouterr().err
