"""A copied or pickled graph keeps its effects, regions and input check; what cannot be kept is refused."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from campaigns import some_of_all
from splitlaws import assert_emitted_as_planned
from torch import fx, nn

import splitkit as sk
from splitkit.errors import FileError, GraphError
from splitkit.policies import RoundRobin
from splitkit.testing import assert_same


def test_hooks_of_an_exported_module_find_their_attributes_on_the_parent():
    gm = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(check_guards=False)
    assert_same(gm, sk.split(gm, lambda node: 0), torch.ones(1, 2))


def test_backward_hooks_of_the_original_run_on_its_split():
    gm = fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.Tanh()))
    gm.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 10,))
    gm.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_a_copy_of_a_split_keeps_the_check_of_its_inputs():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3))
    made = sk.split(gm, lambda node: 0)
    for copied in (copy.deepcopy(made.module), copy.deepcopy(made)):
        with pytest.raises(RuntimeError, match="[Ee]xpected input"):
            copied(torch.ones(5, 3))


def test_a_split_of_a_captured_model_can_be_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    gm = sk.capture(model, torch.ones(2, 3))
    made = sk.split(gm, RoundRobin(2))
    copied = copy.deepcopy(made)
    assert_emitted_as_planned(copied)
    assert not {id(p) for p in copied.module.parameters()} & {id(p) for p in made.module.parameters()}
    assert_same(gm, copied, torch.ones(2, 3))


def test_a_split_with_hooks_can_be_pickled():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3), how="symbolic_trace")
    again = pickle.loads(pickle.dumps(sk.split(gm, lambda node: 0).module))
    assert torch.equal(again(torch.ones(2, 3)), gm(torch.ones(2, 3)))


class Counting(nn.Module):
    """All that fx would run once while it unpickles a graph, and never again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        made = torch.zeros(3)
        made[:2] += x[0, :2]
        with torch.no_grad():
            y = self.linear(x) * torch.rand(3)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.linear(x)
        x = torch.vmap(torch.sin)(x.float())
        return torch.cond(x.sum() > 0, lambda x: x * torch.rand(3), torch.sin, (x,)) * self.count + y + made


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(module):
    return pickle.loads(pickle.dumps(module))


GRAPHS = {
    "graph": lambda gm: gm,
    "own": lambda gm: sk.split(gm, sk.policies.Stages(2)).module,
    "lazy": lambda gm: sk.split(gm, sk.policies.Stages(2), lazy=True).module,
    "hoist": lambda gm: sk.split(gm, sk.policies.Stages(2), parameters="hoist").module,
    "inline": lambda gm: sk.inline(sk.split(gm, sk.policies.Stages(2))),
    "split_module": lambda gm: sk.split_module(gm, None, sk.policies.Stages(2)),
}
WAYS = {
    "pickle": pickled,
    "twice": lambda module: pickled(pickled(module)),
    "a copy": lambda module: pickled(copy.deepcopy(module)),
    "copied": lambda module: copy.deepcopy(pickled(module)),
    "saved": saved,
}


@pytest.fixture(scope="module")
def counting():
    torch.manual_seed(0)
    return sk.capture(Counting(), torch.randn(2, 3))


@pytest.mark.parametrize(("graph", "way"), some_of_all(GRAPHS, WAYS, always=()))
def test_a_pickled_graph_does_what_the_original_does_at_each_call(counting, graph, way):
    x = torch.randn(2, 3)
    first, second = (GRAPHS[graph](copy.deepcopy(counting)) for _ in range(2))
    again = WAYS[way](second)
    again.load_state_dict(first.state_dict())
    for seed in range(3):
        results = []
        for module in (first, again):
            torch.manual_seed(seed)
            made = module(x)
            made.sum().backward()
            results.append([made, *(p.grad for p in module.parameters()), *module.buffers()])
        assert all(map(torch.equal, *results))
    with pytest.raises(RuntimeError, match="[Ee]xpected input"):
        again(torch.ones(5, 3))


def test_each_part_and_each_half_is_pickled_by_its_nodes(counting):
    split = sk.split(counting, sk.policies.Stages(2))
    x = torch.randn(2, 3, requires_grad=True)
    pair = sk.capture_joint(nn.Dropout(0.5), x, loss=torch.sum).split(sk.policies.SaveAll())
    for module in (*split.parts.values(), pair.forward, pair.backward):
        again = pickled(module)
        assert [(n.op, n.target, n.name) for n in again.graph.nodes] == [
            (n.op, n.target, n.name) for n in module.graph.nodes
        ]


def test_what_a_pickle_cannot_name_is_refused():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((x, graph.call_function(torch.ops.aten.from_file.default, ("a file",))))
    module = sk.split(fx.GraphModule(nn.Module(), graph), lambda node: 0).module
    with pytest.raises(GraphError, match="SK107: from_file_default calls aten.from_file.default"):
        pickle.dumps(module)
    assert sum(n.op == "call_module" for n in copy.deepcopy(module).graph.nodes) == 1
    library = torch.library.Library("splitkit_pickled", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.splitkit_pickled.twice.default, (graph.placeholder("x"),)))
    data = pickle.dumps(sk.split(fx.GraphModule(nn.Module(), graph), lambda node: 0).module)
    assert pickle.loads(data).submod_0
    library._destroy()
    with pytest.raises(FileError, match="SK508: the pickled graph calls splitkit_pickled.twice"):
        pickle.loads(data)
