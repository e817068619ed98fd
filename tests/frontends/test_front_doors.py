"""Graphs from every door are what Dynamo, strict export and pickle take, and refuse the wrong inputs there as well."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from campaigns import some_of_all
from torch import nn

import splitkit as sk


class Net(nn.Module):
    """Takes and returns dicts, a number that is fixed at capture, and writes a buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, given, times=2):
        self.count.add_(1)
        y = torch.relu(self.one(x)) * times
        return {"y": self.two(y), "z": given["q"] + self.count}


def inputs(rows=2):
    torch.manual_seed(0)
    return torch.randn(rows, 4), {"q": torch.ones(rows, 4)}, 2


def net():
    torch.manual_seed(0)
    return Net()


def in_two(node):
    return int("two" in str(node.meta.get("nn_module_stack", "")))


DOORS = {
    "capture": lambda gm: gm,
    "own": lambda gm: sk.split(gm, in_two).module,
    "hoist": lambda gm: sk.split(gm, in_two, parameters="hoist").module,
    "lazy": lambda gm: sk.split(gm, in_two, lazy=True).module,
    "split_module": lambda gm: sk.split_module(gm, None, in_two),
    "inline": lambda gm: sk.inline(sk.split(gm, in_two)),
    "ExportedProgram": lambda gm: sk.split(sk.capture(torch.export.export(net(), inputs())), in_two).module,
}
WAYS = {
    "fullgraph": lambda m: torch.compile(m, backend="eager", fullgraph=True),
    "strict export": lambda m: torch.export.export(m, inputs(), strict=True).module(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
}


@pytest.fixture(scope="module")
def graph():
    return sk.capture(net(), *inputs())


@pytest.mark.parametrize(("door", "way"), some_of_all(DOORS, WAYS, ["fullgraph"]))
def test_a_graph_gives_the_same_however_it_is_run_and_refuses_other_sizes(graph, door, way):
    torch._dynamo.reset()
    run = WAYS[way](DOORS[door](copy.deepcopy(graph)))
    expected, found = net()(*inputs()), run(*inputs())
    assert found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
    with pytest.raises((RuntimeError, AssertionError, torch._dynamo.exc.Unsupported)):
        run(*inputs(rows=3))


@pytest.mark.parametrize("wrong", [(*inputs()[:2], 3), (inputs()[0][0], *inputs()[1:]), ("x", *inputs()[1:])])
def test_a_compiled_graph_refuses_other_values_and_ranks(graph, wrong):
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported)):
        torch.compile(copy.deepcopy(graph), backend="eager", fullgraph=True)(*wrong)


def test_sizes_may_vary_within_their_bounds_and_together():
    class Rows(nn.Module):
        def forward(self, x, y):
            return x + y, x.new_zeros(2 * x.shape[0])

    gm = sk.capture(Rows(), torch.ones(4, 3), torch.ones(4, 3), dynamic=True)
    compiled = torch.compile(gm, backend="eager", fullgraph=True)
    for run in (gm, compiled, pickle.loads(pickle.dumps(gm))):
        torch._dynamo.reset()
        assert run(torch.ones(5, 3), torch.ones(5, 3))[1].shape == (10,)
        with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported)):
            run(torch.ones(5, 3), torch.ones(6, 3))


def test_a_traced_graph_with_a_fixed_input_is_traceable_and_one_without_has_no_hook():
    class Flag(nn.Module):
        def forward(self, x, times=2, *, shift=1):
            return x * times + shift

    plain = sk.capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(2), how="symbolic_trace")
    assert torch.equal(torch.jit.script(plain)(torch.ones(2)), plain(torch.ones(2)))
    gm = sk.capture(Flag(), torch.ones(2), 3, how="symbolic_trace")
    torch._dynamo.reset()
    compiled = torch.compile(gm, backend="eager", fullgraph=True)
    for run in (gm, compiled):
        assert run(torch.ones(2), 3).tolist() == [4.0, 4.0]
        for args, kwargs in ((4,), {}), ((3,), {"shift": 2}):
            with pytest.raises((RuntimeError, torch._dynamo.exc.Unsupported)):
                run(torch.ones(2), *args, **kwargs)


def test_an_exported_program_in_the_place_of_its_module_is_refused_with_what_works():
    x = torch.randn(4, 8)
    program = torch.export.export(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), (x,))
    with pytest.raises(sk.errors.GraphError, match=r"SK101.*ExportedProgram\n.*program\.module\(\)"):
        sk.split(program, sk.policies.Stages(2))
    with pytest.raises(sk.errors.CaptureError, match=r"SK401.*ExportedProgram.*\n.*program\.module\(\)"):
        sk.capture_joint(program, x)
    module = program.module()
    assert torch.equal(sk.split(module, sk.policies.Stages(2))(x), module(x))
    assert sk.capture_joint(module, x, loss=lambda y: y.sum())
