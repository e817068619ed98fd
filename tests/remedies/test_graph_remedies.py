"""Remedies of errors about a graph and its values (SK1xx)."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from carried import Remedy, refusal
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import splitkit as sk
from splitkit import _torch
from splitkit.graph.dataflow import analyze
from splitkit.memory.measurement import measure_memory
from splitkit.policies import SaveAll, Stages

X = torch.linspace(0.1, 1, 16).view(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).relu())


NET = Net()


def captured():
    return sk.capture(NET, X)


def same(module, *inputs):
    return torch.equal(module(*(inputs or (X,))), NET(X))


def written(write, root=None):
    """A graph that ``write`` fills, given the graph and its input; it returns what ``write`` returns."""
    graph = fx.Graph()
    graph.output(write(graph, graph.placeholder("x")))
    return fx.GraphModule(root or nn.Module(), graph)


def without(gm, name):
    delattr(gm, name)
    return gm


def reading_a_weight():
    root = nn.Module()
    root.w = nn.Parameter(torch.ones(4))
    return written(lambda g, x: g.call_function(torch.mul, (x, g.get_attr("w"))), root)


def profile(gm, **options):
    return sk.simulate_memory(gm, **options).peak > 0


def propagated():
    gm = fx.symbolic_trace(NET)
    sk.extend.propagate(gm, X)
    return profile(gm)


def restored():
    gm = without(reading_a_weight(), "w")
    gm.w = nn.Parameter(torch.ones(4))
    return torch.equal(sk.split(gm, {"mul": 0})(X), X)


def erased():
    gm = without(reading_a_weight(), "w")
    mul = next(n for n in gm.graph.nodes if n.name == "mul")
    mul.args = (mul.args[0], 1.0)
    gm.graph.erase_node(gm.graph.find_nodes(op="get_attr")[0])
    gm.recompile()
    return torch.equal(sk.split(gm, {"mul": 0})(X), X)


def inlined(change):
    made = sk.split(captured(), Stages(2))
    change(made)
    return same(sk.inline(made))


def compile_a_part(made):
    first = next(iter(made.parts))
    made.replace(first, torch.compile(made.parts[first], backend="eager"))


def put_an_equal_graph(made):
    compile_a_part(made)
    first = next(iter(made.parts))
    made.replace(first, copy.deepcopy(sk.split(captured(), Stages(2)).parts[first]))


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def called(model):
    model(X)
    return model


class Chosen(nn.Module):
    """The size of its result depends on the data, unless it is bounded."""

    def __init__(self, most=0):
        super().__init__()
        self.most = most

    def forward(self, x):
        n = x.max().to(torch.int64).item()
        torch._check(n >= 1)
        if self.most:
            torch._check(n <= self.most)
        return torch.ones(n, 4) + 1


def sizes_of(gm):
    """The sizes that the refusal itself proposes."""
    with refusal("SK108", "State an upper bound in the model") as told:
        sk.simulate_memory(gm)
    return eval(told.value.remedy.rsplit("sizes=", 1)[1].rstrip("."))


SMALL = torch.tensor([3.0])


def bounded():
    sizes = sizes_of(sk.capture(Chosen(), SMALL, dynamic=True))
    return sk.simulate_memory(sk.capture(Chosen(most=1024), SMALL)).peak > 0 and set(sizes.values()) == {1024}


def with_its_sizes():
    gm = sk.capture(Chosen(), SMALL)
    return sk.simulate_memory(gm, sizes=sizes_of(gm)).peak > 0


SPARSE = make_fx(lambda x: torch.sparse.mm(x.to_sparse(), x.T).sum(), tracing_mode="fake")(X)


@torch.library.custom_op("remedies::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("remedies::faked", mutates_args=())
def faked(x: torch.Tensor) -> torch.Tensor:
    return x * 2


faked.register_fake(torch.empty_like)


def recorded(op):
    return make_fx(lambda x: op(x.view(-1)))(X)


def traced_call(op):
    return written(lambda g, x: g.call_function(op._opoverload, (x,)))


def unbacked():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return measure_memory(torch.nonzero, mode.from_tensor(X))


def joint():
    return sk.capture_joint(NET, X, loss=torch.sum)


def pair():
    made = joint().split(SaveAll())
    return made.forward, made.backward


def mapped():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(torch.vmap(lambda row: (row.sin() * 2).cos() + row.tanh())(self.a(x)))

    return sk.split(sk.capture(Mapped(), X), Stages(3))


def ambient(*steps):
    """A graph of ambient state: autocast is entered and left as the steps say, around one node."""
    graph = fx.Graph()
    x, handles = graph.placeholder("x"), []
    for step in steps:
        if step == "enter":
            handles.append(graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None)))
        elif step == "exit":
            graph.call_function(_torch.EXIT_AUTOCAST, (handles.pop() if handles else x,))
        elif step == "another exit":
            graph.call_function(_torch.EXIT_INFERENCE, (handles.pop(),))
        elif step == "computed":
            handles.append(graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, x, None)))
        elif step == "set to x":
            graph.call_function(_torch.SET_GRAD, (x,))
        elif step == "set":
            graph.call_function(_torch.SET_GRAD, (True,))
        elif step == "set to what it was":
            was = graph.call_function(torch.is_grad_enabled)
            graph.call_function(_torch.SET_GRAD, (was,))
        elif step == "set to 3":
            graph.call_function(_torch.ALLOW_HOOKS, (3,))
        elif step == "set hooks":
            graph.call_function(_torch.ALLOW_HOOKS)
    graph.output(graph.call_function(torch.sin, (x,)))
    return analyze(fx.GraphModule(nn.Module(), graph))


def enter_own(value):
    return value


def leave_own(value):
    return None


SIMPLE = [
    Remedy(
        "SK101",
        "Capture the model first: gm = splitkit.capture(model, *example_inputs).",
        lambda: sk.split(NET, Stages(2)),
        lambda: same(sk.split(captured(), Stages(2))),
    ),
    Remedy(
        "SK101",
        "Give a module or a function, and its inputs.",
        lambda: sk.measure_memory(3),
        (lambda: sk.measure_memory(NET, X).peak > 0, lambda: sk.measure_memory(torch.sin, X).peak > 0),
    ),
    Remedy(
        "SK101",
        "Pass the result of splitkit.split.",
        lambda: sk.inline(captured()),
        lambda: same(sk.inline(sk.split(captured(), Stages(2)))),
    ),
    Remedy(
        "SK102",
        "Capture the model with splitkit.capture(model, *inputs), or add them: splitkit.extend.propagate(gm, *inputs).",
        lambda: profile(fx.symbolic_trace(NET)),
        (lambda: profile(captured()), propagated),
    ),
    Remedy(
        "SK103",
        "Capture the model with constant region settings.",
        lambda: ambient("computed", "exit"),
        lambda: ambient("enter", "exit"),
    ),
    Remedy(
        "SK103",
        "Let a region's exit be the only reader of what its enter yields.",
        lambda: ambient("enter", "another exit"),
        lambda: ambient("enter", "exit"),
    ),
    Remedy(
        "SK103",
        "Put an enter node before it, or erase the exit node.",
        lambda: ambient("exit"),
        (lambda: ambient("enter", "exit"), ambient),
    ),
    Remedy(
        "SK103",
        "Set it to a constant or to the result of {...}().",
        lambda: ambient("set to x"),
        (lambda: ambient("set"), lambda: ambient("set to what it was")),
    ),
    Remedy(
        "SK103",
        "Call it with the arguments that it takes.",
        lambda: ambient("set to 3"),
        lambda: ambient("set hooks"),
    ),
    Remedy(
        "SK104",
        "Restore the attribute, or erase the node.",
        lambda: analyze(without(reading_a_weight(), "w")),
        (restored, erased),
    ),
    Remedy(
        "SK105",
        "Give two functions or operators that have no other meaning.",
        lambda: sk.extend.register_region("own", enter_own, enter_own),
        lambda: sk.extend.register_region("own", enter_own, leave_own),
    ),
    Remedy(
        "SK106",
        "Inline before parts are replaced or compiled, or put a GraphModule with the same inputs and outputs there.",
        lambda: inlined(compile_a_part),
        (lambda: inlined(lambda made: None), lambda: inlined(put_an_equal_graph)),
    ),
    Remedy(
        "SK108",
        "State an upper bound in the model, torch._check(n <= 1024) for the n that is {...}, and capture again; "
        "simulate_memory also takes sizes={{...}: 1024}.",
        lambda: profile(sk.capture(Chosen(), SMALL)),
        (bounded, with_its_sizes),
    ),
    Remedy(
        "SK108",
        "Make it dense, or measure a run with splitkit.measure_memory.",
        lambda: profile(SPARSE),
        (
            lambda: profile(make_fx(lambda x: torch.mm(x, x.T).sum(), tracing_mode="fake")(X)),
            lambda: sk.measure_memory(SPARSE, X).peak > 0,
        ),
    ),
    Remedy("SK108", "Measure the run on real tensors.", unbacked, lambda: measure_memory(torch.nonzero, X).peak > 0),
    Remedy(
        "SK109",
        "Capture with splitkit.capture, or make_fx(..., tracing_mode='fake'); register fakes of custom ops.",
        lambda: profile(recorded(twice)),
        (
            lambda: profile(make_fx(lambda x: faked(x.view(-1)), tracing_mode="fake")(X)),
            lambda: profile(recorded(faked)),
        ),
    ),
    Remedy(
        "SK109",
        "Give inputs that gm(*args, **kwargs) accepts; register fake kernels for custom ops.",
        lambda: sk.extend.propagate(fx.symbolic_trace(NET), torch.ones(3, 7)),
        propagated,
    ),
    Remedy(
        "SK109",
        "Give inputs that gm(*args, **kwargs) accepts; register fake kernels for custom ops.",
        lambda: sk.extend.propagate(traced_call(twice), X),
        lambda: sk.extend.propagate(traced_call(faked), X),
    ),
    Remedy(
        "SK109",
        "Give inputs like those of capture_joint, or capture again.",
        lambda: joint().run(torch.ones(2, 4)),
        (
            lambda: torch.allclose(joint().run(X).loss, NET(X).sum()),
            lambda: sk.capture_joint(NET, torch.ones(2, 4), loss=torch.sum).run(torch.ones(2, 4)),
        ),
    ),
    Remedy(
        "SK109",
        "Give simulate_memory the Split: parts[...] of the profile is what the part takes alone.",
        lambda: [profile(part) for part in mapped().parts.values()],
        lambda: (made := mapped()) and sk.simulate_memory(made).parts.keys() == made.parts.keys(),
    ),
    Remedy(
        "SK110",
        "Give a function from a node to bytes.",
        lambda: profile(captured(), workspace=3),
        lambda: profile(captured(), workspace=lambda n: 8),
    ),
    Remedy(
        "SK110",
        "Give bytes, 0 or more.",
        lambda: profile(captured(), workspace=lambda n: -1),
        lambda: profile(captured(), workspace=lambda n: 0),
    ),
    Remedy("SK110", "Give a whole number, 0 or more.", lambda: with_sizes(-1), lambda: with_sizes(0)),
    Remedy("SK110", "Its symbols are {...}.", lambda: named_sizes("nosuch"), lambda: with_sizes(12)),
    Remedy(
        "SK110",
        "Leave sizes out: its sizes are all known.",
        lambda: profile(captured(), sizes={"u0": 3}),
        lambda: profile(captured()),
    ),
    Remedy(
        "SK110",
        "Leave it out, or give backward.",
        lambda: profile(pair()[0], user_outputs=1),
        (lambda: profile(pair()[0]), lambda: profile(pair()[0], backward=pair()[1], user_outputs=1)),
    ),
    Remedy(
        "SK110",
        "forward has {...} outputs.",
        lambda: sk.simulate_memory(*pair(), user_outputs=99),
        lambda: sk.simulate_memory(*pair(), user_outputs=1).peak > 0,
    ),
    Remedy(
        "SK110",
        "Take the graphs of splitkit.capture_joint(...).split.",
        lambda: sk.simulate_memory(sk.split(captured(), Stages(2)), pair()[1]),
        lambda: sk.simulate_memory(*pair()).peak > 0,
    ),
    Remedy(
        "SK110",
        "Name one of {...}.",
        lambda: sk.simulate_memory(*pair()).peak_of("sideways"),
        (
            lambda: sk.simulate_memory(*pair()).peak_of("forward") > 0,
            lambda: sk.simulate_memory(*pair()).peak_of("backward") > 0,
        ),
    ),
    Remedy(
        "SK110",
        "This profile has no calls: take its peak.",
        lambda: sk.simulate_memory(captured()).peak_of("forward"),
        lambda: sk.simulate_memory(captured()).peak > 0,
    ),
    Remedy(
        "SK112",
        "Call the model once on real inputs; it may be captured and split before that.",
        lambda: sk.extend.propagate(fx.symbolic_trace(lazy()), X),
        (
            lambda: sk.extend.propagate(fx.symbolic_trace(called(lazy())), X),
            lambda: sk.split(fx.symbolic_trace(lazy()), {"_0": 0, "_1": 1})(X).shape == (4, 2),
            lambda: profile(sk.capture(lazy(), X)),
        ),
    ),
    *(
        Remedy(
            "SK112",
            "Make the model and its inputs outside of torch.device('meta'), then capture and split again.",
            lambda parts=parts, real=real: compared_on("meta", "cpu" if real else "meta", parts),
            lambda parts=parts: compared_on("cpu", "cpu", parts).same,
        )
        for parts in (False, True)
        for real in (False, True)
    ),
]


def compared_on(device, inputs, parts):
    """Compare a vision model that is made on a device with its split."""
    with torch.device(device):
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    x = torch.ones(2, 3, 4, 4, device=inputs)
    return sk.compare(model, sk.split(sk.capture(model, x), Stages(2)), x, parts=parts)


def with_sizes(bound):
    gm = sk.capture(Chosen(), SMALL)
    (symbol,) = sizes_of(gm)
    return sk.simulate_memory(gm, sizes={symbol: bound}).peak > 0


def named_sizes(name):
    return sk.simulate_memory(sk.capture(Chosen(), SMALL), sizes={name: 3})


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


def test_a_split_with_an_op_without_a_name_is_pickled(tmp_path):
    """Torch knows no other name for ``aten::from_file``, which reads the file that the graph names."""
    file = tmp_path / "tensor"
    file.write_bytes(torch.ones(4, 4).numpy().tobytes())

    def graph():
        made = reading_a_weight()
        mul = next(n for n in made.graph.nodes if n.name == "mul")
        with made.graph.inserting_after(mul):
            read = made.graph.call_function(torch.ops.aten.from_file.default, (str(file), False, 4))
        with made.graph.inserting_after(read):
            total = made.graph.call_function(torch.add, (mul, read))
        made.graph.output_node().args = (total,)
        made.recompile()
        return made

    gm = graph()
    made = sk.split(gm, lambda node: 0)
    with refusal(
        "SK107",
        "Save the plan (plan.save) and the weights (module.state_dict), and split again; or copy with copy.deepcopy.",
    ):
        pickle.dumps(made.module)
    with torch.no_grad():
        gm.w.fill_(3)
    made.plan.save(tmp_path / "plan.json")
    torch.save(made.module.state_dict(), tmp_path / "weights.pt")
    again = graph()
    split = sk.split(again, sk.Plan.load(tmp_path / "plan.json", again.graph))
    split.module.load_state_dict(torch.load(tmp_path / "weights.pt"))
    x = torch.ones(4, 1, 4)
    for other in (split.module, copy.deepcopy(made.module)):
        assert torch.equal(other(x), made(x))


def test_a_plan_whose_graph_is_gone(tmp_path):
    gm = sk.capture(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), X)
    with refusal("SK101", "Give the split: splitkit.export(splitkit.split(gm, plan), to=...)."):
        sk.export(sk.Plan.of({}), to="torch")
    split = sk.split(gm, sk.plan(gm, Stages(2)))
    assert sk.export(split, to="torch").text


def test_a_node_that_reads_a_later_one():
    gm = fx.symbolic_trace(NET)
    a, relu, b = (n for n in gm.graph.nodes if n.op.startswith("call"))
    a.args = (b,)
    with refusal(
        "SK111", "Correct the edit that caused this: give the node an input from its own graph that comes before it"
    ):
        analyze(gm)
    a.args = (next(iter(gm.graph.nodes)),)
    gm.graph.lint()
    assert same(sk.split(gm, {"a": 0, "relu": 0, "b": 1}))
    assert relu.args == (a,)
