"""Parts as modules: lazy code, copies, pickles, hooks, compilation, tracing, replaced children, errors."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading

import pytest
import torch
from torch import fx, nn
from torch.nn.modules import module as hooks_of_all

import splitkit as sk
from splitkit.costs import unit
from splitkit.engine.codegen.writer import LeanGraph, is_fast
from splitkit.engine.split import split
from splitkit.policies import RoundRobin, Stages


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.relu(self.linear(x) * self.weight).sin().cos()


X = torch.tensor([[0.5, -1.0, 2.0, 0.1]])


@pytest.fixture
def whole():
    return fx.symbolic_trace(Model())


@pytest.fixture(params=[False, True], ids=["eager", "lazy"])
def made(request, whole):
    return split(whole, Stages(3), costs=unit(whole), lazy=request.param)


@pytest.fixture
def count_codes(monkeypatch):
    """A list that gets an entry for each code that a part or parent makes."""
    codes: list[fx.Graph] = []
    original = LeanGraph.python_code

    def python_code(self, *args, **kwargs):
        codes.append(self)
        return original(self, *args, **kwargs)

    is_fast()  # which makes code once a process, and so does the first lean graph
    LeanGraph().python_code("self")
    monkeypatch.setattr(LeanGraph, "python_code", python_code)
    return codes


def test_lazy_code_is_made_at_the_first_call_once(whole, count_codes):
    made = split(whole, Stages(3), costs=unit(whole), lazy=True)
    assert not count_codes
    made(X), made(X)
    graphs = [m.graph for m in (made.module, *made.parts.values())]
    assert len(count_codes) == len(graphs) and {*count_codes} == {*graphs}


def test_lazy_code_of_a_part_that_runs_alone(whole, count_codes):
    made = split(whole, Stages(3), costs=unit(whole), lazy=True)
    made.parts[2](X), made.parts[2](X)
    assert count_codes == [made.parts[2].graph]


def test_lazy_code_can_be_read(whole, count_codes):
    made = split(whole, Stages(3), costs=unit(whole), lazy=True)
    assert "def forward" in made.parts[2].code and len(count_codes) == 1


def test_copies(made, whole):
    other = copy.deepcopy(made.module)
    assert torch.equal(other(X), whole(X))
    with torch.no_grad():
        other.submod_0.linear.weight.zero_()
    assert torch.equal(made(X), whole(X)) and not torch.equal(other(X), whole(X))
    again = copy.deepcopy(made)
    assert torch.equal(again(X), whole(X)) and again.parts[0] is again.module.submod_0


@pytest.mark.parametrize("called", [False, True])
def test_pickles(made, whole, called):
    if called:
        made(X)
    again = pickle.loads(pickle.dumps(made.module))
    assert torch.equal(again(X), whole(X))
    file = io.BytesIO()
    torch.save(made.module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X), whole(X)) and list(loaded.state_dict()) == list(made.module.state_dict())


@pytest.mark.parametrize("called", [False, True])
def test_edits_count_after_recompile(made, whole, called):
    if called:
        made(X)
    part = made.parts[2]
    for node in part.graph.nodes:
        if node.target == "cos":
            node.target = "neg"
    part.recompile()
    assert torch.equal(made(X), -torch.relu(whole.linear(X) * whole.weight).sin())


def test_compilation_of_the_whole_in_one_graph(made, whole):
    torch.compiler.reset()
    compiled = torch.compile(made.module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), whole(X))


def test_a_part_compiled_in_place(made, whole):
    torch.compiler.reset()
    seen = []
    made.parts[1].compile(backend=lambda gm, inputs: seen.append(gm) or gm.forward)
    assert torch.equal(made(X), whole(X)) and len(seen) == 1


HOOKS = {
    "forward": lambda m, hook: m.register_forward_hook(hook),
    "forward pre": lambda m, hook: m.register_forward_pre_hook(hook),
    "backward": lambda m, hook: m.register_full_backward_hook(hook),
    "backward pre": lambda m, hook: m.register_full_backward_pre_hook(hook),
}
GLOBAL_HOOKS = {
    "forward": hooks_of_all.register_module_forward_hook,
    "forward pre": hooks_of_all.register_module_forward_pre_hook,
    "backward": hooks_of_all.register_module_full_backward_hook,
    "backward pre": hooks_of_all.register_module_full_backward_pre_hook,
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_parts_fire_once_a_call(made, kind):
    calls: list[nn.Module] = []
    handles = [HOOKS[kind](part, lambda module, *rest: calls.append(module)) for part in made.parts.values()]
    expected = list(made.parts.values())
    made(X).sum().backward()
    assert calls == (expected[::-1] if kind.startswith("back") else expected)
    for handle in handles:
        handle.remove()
    made(X).sum().backward()
    assert len(calls) == len(expected)


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
def test_hooks_on_all_modules_fire_once_a_part(made, kind):
    calls: list[nn.Module] = []
    handle = GLOBAL_HOOKS[kind](lambda module, *rest: calls.append(module))
    try:
        made(X).sum().backward()
    finally:
        handle.remove()
    assert all(calls.count(part) == 1 for part in made.parts.values())
    assert calls.count(made.module) == 1 and len(calls) == len(made.parts) + 2  # and the linear layer


def test_a_forward_hook_may_change_what_a_part_gives(made, whole):
    made.parts[2].register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(made(X), whole(X) + 1)


def test_tracing_opens_parts_like_torchs_own(made, whole):
    from torch.fx.passes.split_module import split_module

    steps = {n: min(i // 2, 2) for i, n in enumerate(whole.graph.nodes)}
    torchs = split_module(whole, whole, steps.__getitem__)
    traced, other = fx.symbolic_trace(made.module), fx.symbolic_trace(torchs)

    def calls(gm):
        return [n.op for n in gm.graph.nodes if n.op.startswith("call_")]

    assert calls(traced) == calls(other) == calls(whole)
    assert torch.equal(traced(X), whole(X))


def test_parts_as_leaves_of_a_trace(made, whole):
    class Leaves(fx.Tracer):
        def is_leaf_module(self, module, name):
            return name.startswith("submod")

    graph = Leaves().trace(made.module)
    assert [n.target for n in graph.nodes if n.op == "call_module"] == ["submod_0", "submod_1", "submod_2"]


def test_a_replaced_part_is_used(made):
    made.module.submod_2 = nn.Flatten(0)
    assert made(X).shape == (4,)
    made.module.submod_2.register_forward_hook(lambda module, args, out: out[:1])
    assert made(X).shape == (1,)
    assert made.names[2] == "submod_2"  # also where names are asked for late


@pytest.mark.parametrize("lazy", [False, True])
def test_an_error_inside_a_part_shows_the_line_of_the_graph(lazy, capsys):
    class Product(nn.Module):
        def forward(self, x):
            return torch.mm(x.sin(), x.cos()).tan()

    gm = fx.symbolic_trace(Product())
    made = split(gm, Stages(2), costs=unit(gm), lazy=lazy)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            made(torch.ones(2, 3))
        message = capsys.readouterr().err
        assert message.count("Call using an FX-traced Module") == 1 and "mm = torch.mm(sin, cos)" in message


def test_the_forward_of_a_lazy_part_can_be_replaced():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    made = split(gm, {"_0": 0, "_1": 1}, lazy=True)
    made.parts[0].forward = lambda x: x * 5
    assert made(torch.ones(())) == 5


@pytest.mark.parametrize("how", ["split", "lazy", "split_module"])
def test_a_part_can_be_overridden_in_the_dict_of_its_parent(how):
    """vLLM puts its piecewise backends there: ``module.__dict__["submod_0"] = backend``. A property would win."""
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    labels = {"_0": 0, "_1": 1}
    if how == "split_module":
        made = sk.split_module(gm, None, lambda node: labels[node.name])
    else:
        made = split(gm, labels, lazy=how == "lazy").module
    made.__dict__["submod_0"] = lambda x: x * 5
    assert made(torch.ones(())) == 5
    del made.__dict__["submod_0"], made.submod_0
    made.submod_0 = lambda x: x * 7
    assert made(torch.ones(())) == 7


def test_a_transform_of_the_code_of_a_split_leaves_the_original_alone():
    """The parent has a code generator of its own, which ``on_generate_code`` may change."""
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    made = split(gm, RoundRobin(2)).module
    made.graph.on_generate_code(lambda before: lambda body: ["raise AssertionError\n", *body])
    gm.recompile()
    assert torch.equal(gm(torch.ones(2)), torch.ones(2))


def test_several_threads_may_be_the_first_to_call_a_lazy_split():
    gm = fx.symbolic_trace(nn.Sequential(*[nn.ReLU() for _ in range(8)]))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    failed = []
    try:
        for _ in range(150):
            made = split(gm, RoundRobin(3), lazy=True)
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


def test_a_split_has_the_name_of_its_model_and_torchs_own_has_none():
    class Net(nn.Module):
        def forward(self, x):
            return torch.sin(x) + 1

    gm = fx.GraphModule(Net(), fx.Tracer().trace(Net()), "Net")
    assert type(split(gm, lambda node: 0).module).__name__ == type(gm).__name__ == "Net"
    torchs = sk.split_module(gm, None, lambda node: 0)
    assert type(torchs).__name__ == "GraphModule"


def test_a_part_is_called_by_names_too():
    gm = fx.symbolic_trace(lambda x, y: torch.sin(x) - y)
    part = split(gm, lambda node: 0).parts[0]
    names = [node.name for node in part.graph.find_nodes(op="placeholder")]
    x, y = torch.ones(2), torch.zeros(2)
    assert torch.equal(part(x, y), torch.sin(x))
    assert torch.equal(part(**dict(zip(names, (x, y), strict=True))), torch.sin(x))
