"""Hooks on the outputs of modules, in the parts of a captured graph."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import prune

import splitkit as sk
from splitkit.policies import RoundRobin, Stages


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x):
        return self.linear(x).chunk(2, -1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.shared, self.halves, self.same = nn.Linear(4, 4), Halves(), nn.Identity()

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            x = self.shared(x)
        x = self.same(self.shared(x))
        left, right = self.halves(x)
        return left * right


X = torch.randn(2, 4)
FIRST = dict.fromkeys(("linear", "relu", "linear_1", "linear_2", "relu_1", "linear_3"), 0) | {"linear_4": None}
WAYS = {
    "own": lambda gm: sk.split(gm, Stages(3)),
    "lazy": lambda gm: sk.split(gm, Stages(3), lazy=True),
    "hoist": lambda gm: sk.split(gm, Stages(3), parameters="hoist"),
    "mixed": lambda gm: sk.split(gm, RoundRobin(3), on_cycle="refine"),
    "parent": lambda gm: sk.split(gm, lambda node: FIRST.get(node.name, 1)),
    "copy": lambda gm: copy.deepcopy(sk.split(gm, Stages(2))),
}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def graph(net):
    return sk.capture(net, X)


def outputs_of(model, path, run):
    found = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: found.append(output))
    run(X)
    handle.remove()
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_hook_sees_the_output_of_each_call_of_its_module_until_it_is_removed(net, graph, way):
    for path in ("blocks.0", "blocks.1", "blocks.1.up", "shared", "halves.linear"):
        split, seen = WAYS[way](graph), []
        code = [part.code for part in split.parts.values()]
        handle = split.register_forward_hook(path, seen.append)
        result, wanted = split(X), outputs_of(net, path, net)
        assert torch.equal(result, net(X)) and len(seen) == len(wanted)
        assert all(map(torch.equal, seen, wanted))
        sk.inline(split)(X)
        assert len(seen) == 2 * len(wanted)
        handle.remove()
        handle.remove()
        split(X)
        assert len(seen) == 2 * len(wanted) and [part.code for part in split.parts.values()] == code


def test_what_a_hook_returns_takes_the_place_of_the_output(net, graph):
    split, other = sk.split(graph, Stages(3)), copy.deepcopy(net)
    split.register_forward_hook("shared", torch.sin)
    other.shared.register_forward_hook(lambda module, args, output: torch.sin(output))
    assert torch.equal(split(X), other(X)) and not torch.equal(split(X), net(X))
    part = next(part for part in split.parts.values() if "hook_shared" in dict(part.named_children()))
    assert any(n.target == "hook_shared" for n in pickle.loads(pickle.dumps(part)).graph.nodes)


def test_a_hook_that_cannot_be_put_is_refused(net, graph):
    split = sk.split(graph, Stages(2))
    with pytest.raises(sk.errors.PolicyError, match=r"SK304: .*'blocks.7'\n.*blocks\.[01]"):
        split.register_forward_hook("blocks.7", print)
    with pytest.raises(sk.errors.PolicyError, match="SK304: .*'same'"):  # it computes nothing
        split.register_forward_hook("same", print)
    with pytest.raises(sk.errors.PlanError, match=r"SK221: .*'halves'.*several of its values \(getitem, getitem_1\)"):
        split.register_forward_hook("halves", print)
    assert split.register_forward_hook("halves.linear", lambda output: None)  # the remedy
    node = next(n for n in split.flow.nodes if n.name == "linear")
    twice = sk.split(graph, split.plan.place({node: tuple(split.plan.parts)}))
    with pytest.raises(sk.errors.PlanError, match="SK221: .*parts 0, 1 each compute its output linear"):
        twice.register_forward_hook("blocks.0.up", print)
    assert torch.equal(split(X), net(X)) and torch.equal(twice(X), net(X))


def test_a_traced_graph_has_hooks_by_path_as_well():
    model = nn.Sequential(Block(), nn.Linear(4, 4))
    split, seen = sk.split(fx.symbolic_trace(model), Stages(2)), []
    for path in ("0", "0.up", "1"):
        split.register_forward_hook(path, seen.append)
    assert torch.equal(split(X), seen[-1]) and torch.equal(seen[1], model[0](X)) and len(seen) == 3


def test_a_user_is_told_of_hooks_that_do_not_run(net):
    hooked, split = copy.deepcopy(net), sk.split(sk.capture(net, X), Stages(2))
    hooked.shared.register_forward_hook(lambda module, args, output: None)
    hooked.blocks[1].register_forward_pre_hook(lambda module, args: None)
    with pytest.warns(UserWarning, match=r"forward hooks of blocks.1 \(Block\), shared \(Linear\) run once"):
        sk.capture(hooked, X)
    holder = next(p for p in split.parts.values() if "shared" in dict(p.named_children())).shared
    for register in (holder.register_forward_hook, holder.register_forward_pre_hook):
        with pytest.warns(UserWarning, match="the hook never runs"):
            register(print)


def test_hooks_of_libraries_are_not_warned_of():
    hooked = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 4)).eval())
    prune.l1_unstructured(hooked[1], "bias", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(sk.capture(hooked, X)(X), hooked(X))
    assert not [w for w in caught if "forward hooks" in str(w.message)]
